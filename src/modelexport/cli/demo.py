"""`modelexport demo`: the main job on a small bundled model, offline."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from importlib.resources import as_file, files
from pathlib import Path

import click

from modelexport.cli.console import line, note, plain_table, progress, show
from modelexport.cli.extract import extracted
from modelexport.cli.summary import show_summary
from modelexport.cli.verify import format_verification
from modelexport.errors import FileError
from modelexport.extraction.extract import extract
from modelexport.report import ExportReport

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


@click.command("demo", short_help="The whole tour on a tiny BERT, offline.")
@click.argument(
    "folder",
    metavar="[DIR]",
    required=False,
    default="modelexport-demo",
    type=click.Path(path_type=Path),
)
@click.option("--strategy", default="auto", show_default=True, help="auto, fx, htp or usage_based.")
def demo_command(folder: Path, strategy: str) -> None:
    """Build a tiny BERT with random weights, export it, and work with it by module. Needs no network.

    DIR (default modelexport-demo) gets the model as a normal Hugging Face folder, the ONNX file with
    its sidecar and a GraphML for yEd, a layer of it as a model of its own, and a list of jobs for batch.
    Every module is checked against PyTorch.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"cannot create {folder}: {error.strerror}", hint="choose another folder"
        ) from error
    with progress(verbose=False) as on_step:
        on_step("load torch and transformers")
        from modelexport.pipeline import export_model
        from modelexport.source.example_inputs import InputRequest, make_example_inputs
        from modelexport.source.load import load_source

        on_step("build the model")
        model_folder = folder / "bert-tiny"
        _save_model(model_folder)
        (folder / "jobs.toml").write_text(JOBS)
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
        )
        layer = _layer(report)
        on_step(f"extract {layer}")
        piece = extract(report.onnx_path, layer, folder / "layer.onnx").record
        parity = None
        if importlib.util.find_spec("onnxruntime") is not None:
            from modelexport.verification.verify import verify

            parity = verify(source.model, example.inputs, report.onnx_path, on_step=on_step)
    show_summary(report)
    _show_tags(report)
    show(
        [
            "",
            line("One layer cut out, a model that runs by itself:"),
            *extracted(folder / "layer.onnx", piece),
        ]
    )
    if parity is None:
        note("note: with onnxruntime installed, the demo also checks every module against PyTorch")
    else:
        show(["", line("Every module against PyTorch:"), *format_verification(parity, source.name)])
    _show_next_steps(folder, layer)


def _layer(report: ExportReport) -> str:
    """The first module of a list that has nodes."""
    modules = report.hierarchy.modules
    return next(
        path for path in modules if path.rpartition(".")[2].isdecimal() and modules[path].nodes
    )


def _save_model(folder: Path) -> None:
    """The bundled configuration and vocabulary as a Hugging Face folder with seeded random weights."""
    import torch

    from modelexport.source.huggingface import import_transformers

    transformers = import_transformers()
    with as_file(files("modelexport.cli") / "demo_model") as bundled:
        shutil.copytree(bundled, folder, dirs_exist_ok=True)
    torch.manual_seed(_SEED)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _show_tags(report: ExportReport) -> None:
    counts = Counter(
        record.tag for record in report.hierarchy.nodes.values() if record.tag is not None
    )
    rows = [
        (str(count), tag)
        for tag, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    show(["", plain_table({"nodes": True, "tag": False}, rows)])


def _show_next_steps(folder: Path, layer: str) -> None:
    lines = [
        "",
        "Try next:",
        f"  modelexport analyze {folder}/bert-tiny.onnx --output-format detailed",
        f"  modelexport validate {folder}/bert-tiny.onnx --check-consistency",
        f"  modelexport extract {folder}/bert-tiny.onnx --list",
        f"  modelexport extract {folder}/bert-tiny.onnx {layer.rpartition('.')[0]} {folder}/piece.onnx",
        f"  modelexport verify {folder}/bert-tiny {folder}/bert-tiny.onnx",
        f"  modelexport import-onnx {folder}/bert-tiny_hierarchical_graph.graphml {folder}/back.onnx --validate",
        f"  modelexport strip {folder}/bert-tiny.onnx {folder}/baseline.onnx",
        f"  modelexport compare {folder}/baseline.onnx {folder}/bert-tiny.onnx",
        f"  modelexport export {folder}/bert-tiny {folder}/traced.onnx --strategy htp --with-report",
        f"  modelexport export {folder}/bert-tiny {folder}/all.onnx --torch-nn all --input-shape 2,64",
        f"  modelexport batch {folder}/jobs.toml",
    ]
    click.echo("\n".join(lines))
