"""`modelexport demo`: export a small bundled model and work with it by module, offline."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modelexport.cli.console import line, note, plain_table, progress, show
from modelexport.cli.export import show_summary
from modelexport.errors import FileError
from modelexport.packages import import_package

if TYPE_CHECKING:
    from modelexport.report import ExportReport
    from modelexport.verification.records import Verification

_SEED = 0
JOBS = """\
output_dir = "batch"

[defaults]
model = "bert-tiny"
timeout = 600

[[jobs]]
name = "traced"
strategy = "htp"

[[jobs]]
name = "every-class"
torch_nn = "all"
input_shape = [2, 64]
"""
_NEXT_STEPS = """
Look at it: open {page} in a browser.

Try next:{activation}
  modelexport view {folder}/bert-tiny.onnx
  modelexport analyze {folder}/bert-tiny.onnx --output-format detailed
  modelexport validate {folder}/bert-tiny.onnx --check-consistency
  modelexport extract {folder}/bert-tiny.onnx --list
  modelexport extract {folder}/bert-tiny.onnx {layers} {folder}/layers.onnx
  modelexport verify {folder}/bert-tiny {folder}/bert-tiny.onnx
  modelexport profile {folder}/bert-tiny.onnx
  modelexport quantize {folder}/bert-tiny.onnx --sensitivity
  modelexport quantize {folder}/bert-tiny.onnx {folder}/int8.onnx --max-error 0.01
  modelexport import-onnx {folder}/bert-tiny_hierarchical_graph.graphml {folder}/new.onnx --validate
  modelexport strip {folder}/bert-tiny.onnx {folder}/baseline.onnx
  modelexport compare {folder}/baseline.onnx {folder}/bert-tiny.onnx
  modelexport export {folder}/bert-tiny {folder}/traced.onnx --strategy htp --with-report
  modelexport export {folder}/bert-tiny {folder}/all.onnx --torch-nn all --input-shape 2,64
  modelexport batch {folder}/jobs.toml"""


@click.command("demo")
@click.argument(
    "folder",
    metavar="[DIR]",
    required=False,
    default="modelexport-demo",
    type=click.Path(path_type=Path),
)
@click.option("--strategy", default="auto", show_default=True, help="auto, fx, htp or usage_based.")
def demo_command(folder: Path, strategy: str) -> None:
    """Build a tiny BERT with random weights, export it, and work with it by module.

    Needs no network. DIR (default modelexport-demo) gets the model as a normal Hugging Face folder,
    the ONNX file with its sidecar, a page to look at and a GraphML for yEd, a layer of it as a
    model of its own, and a list of jobs for batch. Every module is checked against PyTorch.

    \b
    Example:
      modelexport demo
    """
    _make_folder(folder)
    with progress() as on_step:
        on_step("load torch and transformers")
        import_package("torch")
        from modelexport.cli.extract import describe_extraction
        from modelexport.extraction.extract import extract
        from modelexport.pipeline import export_model
        from modelexport.source.example_inputs import InputRequest, make_example_inputs
        from modelexport.source.load import load_source

        on_step("build the model")
        model_folder = folder / "bert-tiny"
        _save_model(model_folder)
        source = load_source(str(model_folder))
        example = make_example_inputs(source, InputRequest(), _SEED)
        report = export_model(
            source.model,
            example.inputs,
            folder / "bert-tiny.onnx",
            strategy,
            source=source.name,
            inputs_from=example.origin,
            seed=_SEED,
            on_step=on_step,
            with_graphml=True,
            with_view=True,
        )
        layer = _first_layer(report)
        on_step(f"extract {layer}")
        extraction = extract(report.onnx_path, layer, folder / "layer.onnx").record
        parity = None
        if importlib.util.find_spec("onnxruntime") is not None:
            from modelexport.verification.verify import verify

            parity = verify(source.model, example.inputs, report.onnx_path, on_step=on_step)
    show_summary(report)
    _show_tags(report)
    show(["", line("One layer cut out, a model that runs by itself:")])
    show(describe_extraction(folder / "layer.onnx", extraction))
    _show_parity(parity, source.name)
    layers = layer.rpartition(".")[0]
    click.echo(
        _NEXT_STEPS.format(
            folder=shlex.quote(str(folder)),
            layers=layers,
            page=report.view_path,
            activation=_activation(),
        )
    )


def _show_parity(parity: Verification | None, source: str) -> None:
    """Show how the modules compare with PyTorch, or what is missing to compare them."""
    from modelexport.cli.verify import format_verification

    if parity is None:
        note("note: with onnxruntime installed, the demo also checks every module against PyTorch")
    else:
        show(["", line("Every module against PyTorch:"), *format_verification(parity, source)])


def _activation() -> str:
    """Return the line that activates the virtual environment, if it is not active."""
    script = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("modelexport") is not None or not script.exists():
        return ""
    return f"\n  . {shlex.quote(os.path.relpath(script))}"


def _make_folder(folder: Path) -> None:
    """Create the folder of the demo, with a list of jobs for batch."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"cannot create {folder}: {error.strerror}", hint="choose another folder"
        ) from error
    (folder / "jobs.toml").write_text(JOBS)


def _first_layer(report: ExportReport) -> str:
    """Return the path of the first numbered module that has nodes."""
    modules = report.hierarchy.modules
    return next(
        path for path in modules if path.rpartition(".")[2].isdecimal() and modules[path].nodes
    )


def _save_model(folder: Path) -> None:
    """Save the bundled configuration as a Hugging Face folder with seeded random weights."""
    from importlib.resources import as_file, files

    from modelexport.source.huggingface import save_random_weights

    with as_file(files("modelexport.cli") / "demo_model") as bundled:
        shutil.copytree(bundled, folder, dirs_exist_ok=True)
    save_random_weights(folder, _SEED)


def _show_tags(report: ExportReport) -> None:
    """Print the tags with their numbers of nodes, the most frequent first."""
    counts = Counter(
        record.tag for record in report.hierarchy.nodes.values() if record.tag is not None
    )
    rows = [
        (str(count), tag)
        for tag, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    show(["", plain_table({"nodes": True, "tag": False}, rows)])
