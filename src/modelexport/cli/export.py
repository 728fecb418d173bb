"""`modelexport export`: from a named model to a tagged file."""

from __future__ import annotations

from pathlib import Path

import click

from modelexport.cli.render import note, progress
from modelexport.cli.summary import show_summary
from modelexport.tagged.staging import check_target

_SEED = 0


class _Shape(click.ParamType[tuple[int, ...]]):
    name = "N,N,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            shape = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a shape; write it as 1,128", param, ctx)
        if not shape or min(shape) < 1:
            self.fail(f"{value!r} has a size below 1", param, ctx)
        return shape


@click.command("export", short_help="Export a model with its map.")
@click.argument("model")
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--strategy", default="auto", show_default=True, help="auto, fx, htp or usage_based.")
@click.option("--exporter", type=click.Choice(["dynamo", "torchscript"]), help="Override the strategy's exporter.")
@click.option("--input-text", help="Text for the model's tokenizer.")
@click.option("--input-shape", type=_Shape(), help="Shape of the main input, for example 1,128.")
@click.option("--opset-version", type=int, help="ONNX opset; the exporter's default if left out.")
@click.option("--torch-nn", metavar="NAMES", help="torch.nn classes to show in tags: a comma list, all or none.")
@click.option("--include", metavar="GLOBS", help="Show modules whose class or path matches (comma list).")
@click.option("--exclude", metavar="GLOBS", help="Hide modules whose class or path matches (comma list).")
@click.option("--max-depth", type=int, help="Greatest number of segments in a tag.")
@click.option("--no-optimize", is_flag=True, help="Turn the exporter's own optimisation off.")
@click.option(
    "--clean", "--no-hierarchy-attrs", "clean", is_flag=True, help="Write the baseline's bytes and only the sidecar."
)
@click.option("--with-report", is_flag=True, help="Also write OUTPUT's report, <stem>_report.md.")
@click.option("--jit-graph", type=click.Path(path_type=Path), help="Also write the TorchScript graph to this file.")
@click.option("--fx-graph", type=click.Path(path_type=Path), help="Also write the FX program to this file.")
@click.option("--temp-dir", type=click.Path(path_type=Path), help="Folder for temporary files.")
@click.option("-v", "--verbose", is_flag=True, help="Show what torch prints, and the time of each step.")
def export_command(
    model: str,
    output: Path,
    strategy: str,
    exporter: str | None,
    input_text: str | None,
    input_shape: tuple[int, ...] | None,
    opset_version: int | None,
    torch_nn: str | None,
    include: str | None,
    exclude: str | None,
    max_depth: int | None,
    no_optimize: bool,
    clean: bool,
    with_report: bool,
    jit_graph: Path | None,
    fx_graph: Path | None,
    temp_dir: Path | None,
    verbose: bool,
) -> None:
    """Export MODEL to OUTPUT (a .onnx file) with its sidecar.

    MODEL is a local Hugging Face folder, a hub name, or package.module:factory, a callable that
    returns a torch.nn.Module or a module and its example inputs.

    \b
    Examples:
      modelexport export ./bert-tiny bert.onnx --input-text "hello world"
      modelexport export mypackage.models:make_model model.onnx --strategy htp
    """
    check_target(output)  # before torch is loaded
    with progress(verbose) as on_step:
        on_step("load torch and the model")
        from modelexport.pipeline import export_model
        from modelexport.source.inputs import example_inputs
        from modelexport.source.load import load_source

        source = load_source(model)
        inputs = example_inputs(source, input_text, input_shape, _SEED)
        report = export_model(
            source.model,
            inputs,
            output,
            strategy,
            not no_optimize,
            verbose,
            exporter=exporter,
            opset_version=opset_version,
            torch_nn_exceptions=torch_nn,
            include=include,
            exclude=exclude,
            max_depth=max_depth,
            clean=clean,
            with_report=with_report,
            temp_dir=temp_dir,
            jit_graph=jit_graph,
            fx_graph=fx_graph,
            source=source.name,
            seed=_SEED,
            on_step=on_step,
        )
    for asked, needed in ((jit_graph, "torchscript"), (fx_graph, "dynamo")):
        if asked is not None and report.exporter != needed:
            note(f"{asked} was not written: only the {needed} exporter has such a graph")
    show_summary(report, verbose)
