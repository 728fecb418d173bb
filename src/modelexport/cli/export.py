"""`modelexport export`: from a named model to a tagged file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from modelexport.cli.console import note, progress
from modelexport.cli.graphml import parameters_option
from modelexport.cli.source_options import input_options
from modelexport.cli.summary import show_summary
from modelexport.job import Job, perform


class _Axes(click.ParamType[tuple[str, dict[int, str]]]):
    name = "NAME=N:LABEL,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, dict[int, str]]:
        name, _, axes = str(value).partition("=")
        try:
            found = {
                int(axis): label.strip()
                for axis, label in (part.split(":") for part in axes.split(","))
            }
        except ValueError:
            self.fail(
                f"{value!r} names no axes; write it as input_ids=0:batch,1:sequence", param, ctx
            )
        if not name or not all(label.isidentifier() for label in found.values()):
            self.fail(
                f"{value!r} names no axes; write it as input_ids=0:batch,1:sequence", param, ctx
            )
        return name, found


def _merged(axes: Iterable[tuple[str, dict[int, str]]]) -> dict[str, dict[int, str]]:
    merged: dict[str, dict[int, str]] = {}
    for name, found in axes:
        merged.setdefault(name, {}).update(found)
    return merged


@click.command("export")
@click.argument("model")
@click.argument("output", type=click.Path())
@click.option(
    "--strategy",
    default="auto",
    show_default=True,
    help="auto, fx, htp, usage_based, or a plugin's.",
)
@click.option(
    "--exporter",
    type=click.Choice(["dynamo", "torchscript"]),
    help="Override the strategy's exporter.",
)
@click.option(
    "--no-fallback", is_flag=True, help="With auto: try only dynamo, and fail where it fails."
)
@click.option("--dynamic", is_flag=True, help="Make batch and sequence-like axes symbolic.")
@click.option(
    "--dynamic-axes", type=_Axes(), multiple=True, help="Name symbolic axes by hand; repeatable."
)
@click.option("--opset-version", type=int, help="ONNX opset; the exporter's default if left out.")
@input_options
@click.option(
    "--torch-nn",
    metavar="NAMES",
    help="torch.nn classes to show in tags: a comma list, all or none.",
)
@click.option(
    "--include", metavar="GLOBS", help="Show modules whose class or path matches (comma list)."
)
@click.option(
    "--exclude", metavar="GLOBS", help="Hide modules whose class or path matches (comma list)."
)
@click.option("--max-depth", type=int, help="Greatest number of segments in a tag.")
@click.option("--no-optimize", is_flag=True, help="Turn the exporter's own optimisation off.")
@click.option(
    "--external-data/--no-external-data",
    default=None,
    help="Weights beside the file, or inside it.",
)
@click.option(
    "--clean",
    "--no-hierarchy-attrs",
    "clean",
    is_flag=True,
    help="Write the baseline's bytes and only the sidecar.",
)
@click.option(
    "--scrub",
    is_flag=True,
    help="Leave out torch's own metadata: stack traces, paths, source lines.",
)
@click.option(
    "--with-graphml",
    is_flag=True,
    help="Also write a GraphML for yEd, <stem>_hierarchical_graph.graphml.",
)
@click.option("--graphml-output", type=click.Path(), help="The same, to this file.")
@parameters_option
@click.option("--with-report", is_flag=True, help="Also write OUTPUT's report, <stem>_report.md.")
@click.option(
    "--jit-graph", type=click.Path(), help="Also write the TorchScript graph to this file."
)
@click.option("--fx-graph", type=click.Path(), help="Also write the FX program to this file.")
@click.option("--temp-dir", type=click.Path(), help="Folder for temporary files.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Show what torch prints, and the time of each step."
)
def export_command(
    model: str,
    output: str,
    strategy: str,
    exporter: str | None,
    no_fallback: bool,
    input_text: str | None,
    input_shape: tuple[tuple[str, tuple[int, ...]], ...],
    input_specs: Path | None,
    dynamic: bool,
    dynamic_axes: tuple[tuple[str, dict[int, str]], ...],
    opset_version: int | None,
    task: str | None,
    model_class: str | None,
    revision: str | None,
    trust_remote_code: bool,
    random_weights: bool,
    torch_nn: str | None,
    include: str | None,
    exclude: str | None,
    max_depth: int | None,
    no_optimize: bool,
    external_data: bool | None,
    clean: bool,
    scrub: bool,
    with_graphml: bool,
    graphml_output: str | None,
    graphml_parameters: str,
    with_report: bool,
    jit_graph: str | None,
    fx_graph: str | None,
    temp_dir: str | None,
    verbose: bool,
) -> None:
    """Export MODEL to OUTPUT (a .onnx file) with its sidecar.

    MODEL is a local Hugging Face folder, a hub name, a program saved by torch.export (.pt2), or a
    factory, package.module:name or path/to/file.py:name: a callable that returns a torch.nn.Module,
    or a module and its example inputs.

    Without --input-specs the inputs come from the model's own processor, the factory, the model's
    dummy_inputs, or a guess; the summary says which.

    \b
    Examples:
      modelexport export ./bert bert.onnx --input-text "hello" --dynamic
      modelexport export ./llama l.onnx --random-weights --input-shape 1,128
      modelexport export models.py:make_model model.onnx --strategy htp
    """
    job = Job(
        model=model,
        output=output,
        strategy=strategy,
        exporter=exporter,
        fallback=not no_fallback,
        input_text=input_text,
        input_shape=dict(input_shape),
        input_specs=None if input_specs is None else str(input_specs),
        dynamic=dynamic,
        dynamic_axes=_merged(dynamic_axes),
        opset_version=opset_version,
        task=task,
        model_class=model_class,
        revision=revision,
        trust_remote_code=trust_remote_code,
        random_weights=random_weights,
        torch_nn=torch_nn,
        include=include,
        exclude=exclude,
        max_depth=max_depth,
        optimize=not no_optimize,
        external_data=external_data,
        clean=clean,
        scrub=scrub,
        with_graphml=with_graphml,
        graphml_output=graphml_output,
        graphml_parameters=graphml_parameters,
        with_report=with_report,
        jit_graph=jit_graph,
        fx_graph=fx_graph,
        temp_dir=temp_dir,
    )
    with progress(verbose=verbose) as on_step:
        report, notes = perform(job, on_step, verbose)
    for told in notes:
        note(f"note: {told}")
    show_summary(report, verbose)
