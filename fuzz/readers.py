"""Read a damaged case as users would: every reader of each format."""

from __future__ import annotations

import copy
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import onnx
from click.testing import CliRunner
from google.protobuf.message import DecodeError

import modelexport
import modelexport.cli.main
from fuzz import (
    seeds,
)
from fuzz.limits import Reader
from fuzz.seeds import DECODE, GENERATION, GRAPHML, MODEL, MODULES
from modelexport.batch.jobs import read_jobs
from modelexport.batch.results import ResultsFile
from modelexport.errors import ModelExportError
from modelexport.extraction.extract import list_modules
from modelexport.generation.part_inputs import cache_shapes
from modelexport.options import PARAMETER_MODES
from modelexport.viewing.explorer import write_model_explorer


def _choose(path: Path, count: int) -> int:
    """Choose one of several by the content of a file, so that a case can be repeated."""
    return zlib.crc32(path.read_bytes()) % count


def _run_command(*arguments: object) -> None:
    """Run a command, and check that an error is one line and exit code 2."""
    result = CliRunner().invoke(modelexport.cli.main.main, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in (0, 1, 2):
        raise AssertionError(f"exit code {result.exit_code}")
    if result.exit_code == 2:
        if not (result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1):
            raise AssertionError(f"expected an error of one line, got {result.stderr[:500]!r}")
        raise ModelExportError(result.stderr)


def _compare(folder: Path, out: Path) -> None:
    """Compare with a valid model, and with a copy whose nodes are reversed."""
    reversed_ = out / "reversed.onnx"
    with suppress(DecodeError):
        proto = onnx.ModelProto.FromString((folder / MODEL).read_bytes())
        nodes = [copy.deepcopy(node) for node in reversed(proto.graph.node)]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
        reversed_.write_bytes(proto.SerializeToString())
        modelexport.compare(folder / MODEL, reversed_)
    valid = out / "valid"
    valid.mkdir()
    seeds.write_files(seeds.models()[_choose(folder / MODEL, 3)].files, valid)
    modelexport.compare(valid / MODEL, folder / MODEL)


def _repair(folder: Path, out: Path) -> None:
    copied = Path(shutil.copytree(folder, out / "copy")) / MODEL
    modelexport.validate(copied, repair=True)
    modelexport.validate(copied, check_consistency=True)


def _extract(folder: Path, out: Path) -> None:
    modelexport.extract(folder / MODEL, "", out / "whole.onnx")


def _extract_module(folder: Path, out: Path) -> None:
    """Extract a module to a file or into memory."""
    choice = _choose(folder / MODEL, 2 * len(MODULES))
    modelexport.extract(
        folder / MODEL, [*MODULES][choice // 2], out / "some.onnx" if choice % 2 else None
    )


def _partition(folder: Path, out: Path) -> None:
    """Partition a module, and extract its subgraph."""
    module = [*MODULES][_choose(folder / MODEL, len(MODULES))]
    modelexport.extract_module_subgraph(folder / MODEL, None, module)
    for _ in modelexport.partition(folder / MODEL, module):
        pass


def _round_trip(folder: Path, out: Path) -> None:
    """Write GraphML and read it back, except in `reference` mode, which writes beside the model."""
    mode = PARAMETER_MODES[_choose(folder / MODEL, 2)]
    export = modelexport.export_graphml(folder / MODEL, out / GRAPHML, parameters=mode)
    modelexport.import_onnx(export.graphml, out / "back.onnx")


def _convert(folder: Path, out: Path) -> None:
    """Write modules as functions, and inline them again."""
    modelexport.to_functions(folder / MODEL, out / "functions.onnx", all_modules=True)
    inline(out, out, "functions.onnx")
    if (out / "back.onnx").read_bytes() != (folder / MODEL).read_bytes():
        raise AssertionError("the flat file is not restored")


def inline(folder: Path, out: Path, name: str = MODEL) -> None:
    modelexport.from_functions(folder / name, out / "back.onnx")


def _retag(folder: Path, out: Path) -> None:
    """Carry the map of a valid model over, and that of the damaged one, without running them."""
    valid = out / "tagged"
    valid.mkdir()
    seeds.write_files(seeds.models()[0].files, valid)
    with suppress(ModelExportError):
        modelexport.retag(valid / MODEL, folder / MODEL, out / "retagged.onnx", run=False)
    modelexport.retag(folder / MODEL, valid / MODEL, out / "other.onnx", run=False)


def _read_command(folder: Path, out: Path) -> None:
    """Run one of the commands that read a model."""
    path = folder / MODEL
    formats = ("summary", "detailed", "json", "csv")
    filters = ("/Net/Encoder", "auxiliary", "e*")
    validate = ("validate", path, "--check-consistency", "--output-format")
    commands = [
        *(("analyze", path, "--output-format", format_) for format_ in formats),
        *(("analyze", path, "--filter-tag", pattern) for pattern in filters),
        *((*validate, format_) for format_ in ("text", "json")),
        ("compare", path, path),
        ("extract", path, "--list"),
        ("extract", path, "encoder", out / "extracted.onnx"),
        ("strip", path, out / "stripped.onnx"),
        ("export-graphml", path, out / "shown.graphml"),
    ]
    _run_command(*commands[_choose(path, len(commands))])


ON_MODELS: dict[str, Reader] = {
    "load": lambda folder, out: modelexport.load(folder / MODEL).modules,
    "analyze": lambda folder, out: modelexport.analyze(folder / MODEL),
    "validate": lambda folder, out: modelexport.validate(folder / MODEL, check_consistency=True),
    "repair": _repair,
    "compare": _compare,
    "strip": lambda folder, out: modelexport.strip(folder / MODEL, out / "bare.onnx"),
    "extract": _extract,
    "extract module": _extract_module,
    "partition": _partition,
    "extract --list": lambda folder, out: list_modules(folder / MODEL),
    "graphml": _round_trip,
    "view": lambda folder, out: modelexport.view(folder / MODEL, out / "page.html"),
    "explorer": lambda folder, out: write_model_explorer(folder / MODEL, out / "explorer.json"),
    "functions": _convert,
    "retag": _retag,
    "select": lambda folder, out: modelexport.select(folder / MODEL, ["encoder", "/Net/*"]),
    "command": _read_command,
}
_WITH_SIDECARS = ("analyze", "validate", "repair", "extract", "extract --list", "command")
ON_SIDECARS = {name: ON_MODELS[name] for name in _WITH_SIDECARS}


def _import(folder: Path, out: Path) -> None:
    modelexport.import_onnx(folder / GRAPHML, out / "back.onnx")


def _import_command(folder: Path, out: Path) -> None:
    options = ["--validate"] * _choose(folder / GRAPHML, 2)
    _run_command("import-onnx", folder / GRAPHML, out / "again.onnx", *options)


ON_GRAPHML: dict[str, Reader] = {"import": _import, "command": _import_command}


def read_input_specs(folder: Path, out: Path) -> None:
    """Read input specs, and make the inputs."""
    import torch

    from modelexport.source.input_specs import InputSpec, make_tensor, read_specs

    for path in folder.iterdir():
        for spec in read_specs(path).values():
            if isinstance(spec, InputSpec):
                make_tensor(spec, torch.Generator().manual_seed(0))


def read_job_files(folder: Path, out: Path) -> None:
    """Read a list of jobs with its memory limits."""
    for path in folder.iterdir():
        for job in read_jobs(path).jobs:
            assert job.memory_bytes is None or job.memory_bytes > 0


def show_overlay(folder: Path, out: Path) -> None:
    modelexport.view(folder / MODEL, out / "page.html", overlays=[folder / "result.json"])


def generate(folder: Path, out: Path) -> None:
    """Generate with the parts, as the file says."""
    modelexport.generate(folder / GENERATION, input_ids=[1, 2], max_new_tokens=3)


def shapes_of_cache(folder: Path, out: Path) -> None:
    cache_shapes(folder / DECODE, 4)


def read_results(folder: Path, out: Path) -> None:
    ResultsFile(folder / "results.jsonl").read()


def if_present(name: str, readers: Mapping[str, Reader]) -> dict[str, Reader]:
    """Return readers that run only if the folder has their file."""

    def run(reader: Reader, folder: Path, out: Path) -> None:
        if (folder / name).exists():
            reader(folder, out)

    return {f"{name} {label}": partial(run, reader) for label, reader in readers.items()}
