"""The targets: for each format the origin of its cases, and every reader of such files.

To add a format, add an entry to TARGETS: seeds, mutations, a grammar and readers.
"""

from __future__ import annotations

import copy
import io
import shutil
import tomllib
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import onnx
from click.testing import CliRunner
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

import modelexport
import modelexport.cli.main
from fuzz import (
    grammars,
    mutate_bytes,
    mutate_json,
    mutate_protobuf,
    mutate_toml,
    mutate_xml,
    mutate_zip,
    seeds,
)
from fuzz.limits import Limits, Reader
from fuzz.mutate_bytes import Draw
from fuzz.seeds import DECODE, GENERATION, GRAPHML, MODEL, MODULES, SIDECAR, Files, Seed
from modelexport.batch.jobs import read_jobs
from modelexport.batch.results import JobResult, ResultsFile
from modelexport.errors import FormatError, ModelExportError
from modelexport.extraction.extract import list_modules
from modelexport.generation.part_inputs import cache_shapes
from modelexport.options import PARAMETER_MODES
from modelexport.tagged.records import METADATA_KEY, decode_embedded, encode_embedded, text_digest
from modelexport.viewing.explorer import write_model_explorer

Mutation = Callable[[Draw, bytes], bytes]
_MUTATIONS_OF_SEED, _MUTATIONS_OF_GENERATED = (1, 1, 1, 1, 2, 2, 3, 5), (0, 0, 1, 2)
"""How many mutations a case has: with one or two, readers get furthest."""
_INPUT_LIMITS = Limits(memory=512 << 20, address_space=512 << 20)
"""Specs may ask for an input of any size, which only the system can refuse."""


class Target(NamedTuple):
    """One format. `seal` corrects the digests in mutated files."""

    name: str
    seeds: Callable[[], Iterable[Seed]]
    mutations: tuple[Mutation, ...]
    readers: Mapping[str, Reader]
    grammar: Callable[[Draw], bytes] | None = None
    seal: Callable[[Files], None] | None = None
    limits: Limits = Limits()

    def cases(self) -> st.SearchStrategy[Files]:
        """Return a strategy for folders of files, one of them mutated or generated."""
        seeds = tuple(self.seeds())

        @st.composite
        def case(draw: Draw) -> Files:
            seed = draw(st.sampled_from(seeds))
            generated = self.grammar is not None and not draw(st.integers(0, 3))
            content = self.grammar(draw) if generated else seed.content
            for _ in range(
                draw(st.sampled_from(_MUTATIONS_OF_GENERATED if generated else _MUTATIONS_OF_SEED))
            ):
                content = self._mutate(draw, content, seeds)
            files = Files(seed.files, **{seed.name: content})
            if self.seal is not None and draw(st.booleans()):
                self.seal(files)
            return files

        return case()

    def _mutate(self, draw: Draw, content: bytes, seeds: tuple[Seed, ...]) -> bytes:
        """Apply a mutation of the format most of the time, otherwise one of bytes."""
        if self.mutations and draw(st.integers(0, 7)):
            return draw(st.sampled_from(self.mutations))(draw, content)
        return mutate_bytes.mutate(draw, content, draw(st.sampled_from(seeds)).content)


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
    _inline(out, out, "functions.onnx")
    if (out / "back.onnx").read_bytes() != (folder / MODEL).read_bytes():
        raise AssertionError("the flat file is not restored")


def _inline(folder: Path, out: Path, name: str = MODEL) -> None:
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


_ON_MODELS: dict[str, Reader] = {
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
_ON_SIDECARS = {name: _ON_MODELS[name] for name in _WITH_SIDECARS}


def _import(folder: Path, out: Path) -> None:
    modelexport.import_onnx(folder / GRAPHML, out / "back.onnx")


def _import_command(folder: Path, out: Path) -> None:
    options = ["--validate"] * _choose(folder / GRAPHML, 2)
    _run_command("import-onnx", folder / GRAPHML, out / "again.onnx", *options)


_ON_GRAPHML: dict[str, Reader] = {"import": _import, "command": _import_command}


def _read_specs(folder: Path, out: Path) -> None:
    """Read input specs, and make the inputs."""
    import torch

    from modelexport.source.input_specs import InputSpec, make_tensor, read_specs

    for path in folder.iterdir():
        for spec in read_specs(path).values():
            if isinstance(spec, InputSpec):
                make_tensor(spec, torch.Generator().manual_seed(0))


def _read_jobs(folder: Path, out: Path) -> None:
    """Read a list of jobs with its memory limits."""
    for path in folder.iterdir():
        for job in read_jobs(path).jobs:
            assert job.memory_bytes is None or job.memory_bytes > 0


def _show_overlay(folder: Path, out: Path) -> None:
    modelexport.view(folder / MODEL, out / "page.html", overlays=[folder / "result.json"])


def _generate(folder: Path, out: Path) -> None:
    """Generate with the parts, as the file says."""
    modelexport.generate(folder / GENERATION, input_ids=[1, 2], max_new_tokens=3)


def _shapes_of_cache(folder: Path, out: Path) -> None:
    cache_shapes(folder / DECODE, 4)


def _read_results(folder: Path, out: Path) -> None:
    ResultsFile(folder / "results.jsonl").read()


def _correct_digests(files: Files) -> None:
    """Correct the digest of the metadata, and that of the sidecar in it."""
    with suppress(DecodeError, FormatError):
        proto = onnx.ModelProto.FromString(files[MODEL])
        for entry in proto.metadata_props:
            if entry.key == METADATA_KEY:
                embedded = decode_embedded(entry.value)
                sidecar = text_digest(files.get(SIDECAR, b""))
                new = msgspec.structs.replace(embedded, sidecar_digest=sidecar)
                entry.value = encode_embedded(
                    msgspec.structs.replace(new, digest=new.computed_digest())
                )
                files[MODEL] = proto.SerializeToString()


def _sidecars() -> Iterable[Seed]:
    """Yield sidecars of tagged models, and one of a model without tags."""
    for seed in seeds.models():
        if SIDECAR in seed.files:
            yield Seed(seed.files, SIDECAR)
    net = seeds.models()[0].files
    yield Seed(Files({MODEL: seeds.net().SerializeToString(), SIDECAR: net[SIDECAR]}), SIDECAR)


def _if_present(name: str, readers: Mapping[str, Reader]) -> dict[str, Reader]:
    """Return readers that run only if the folder has their file."""

    def run(reader: Reader, folder: Path, out: Path) -> None:
        if (folder / name).exists():
            reader(folder, out)

    return {f"{name} {label}": partial(run, reader) for label, reader in readers.items()}


_SPECS = {
    "ids": {"shape": [1, 8], "dtype": "int64", "range": [0, 100]},
    "x": {"shape": [2, 3]},
    "flag": {"shape": [], "dtype": "bool"},
}


def _specs_seeds() -> Iterable[Seed]:
    yield Seed(Files({"specs.json": msgspec.json.encode(_SPECS)}), "specs.json")


def _arrays_seeds() -> Iterable[Seed]:
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, x=np.ones((2, 3), np.float32), ids=np.arange(8), flags=np.array([True]))
        yield Seed(Files({"specs.npz": file.getvalue()}), "specs.npz")


def _overlay_seeds() -> Iterable[Seed]:
    """Yield results of each command that `view` takes."""
    row = {"module": "encoder", "path": "encoder", "own_ms": 1.5, "max_abs": 1e-6}
    row |= {"error": {"relative": 0.01}, "own_bytes": 80, "own_nodes": 3, "flops": 100}
    for field in ("kernel_ms", "outcomes", "whole", "by_operator"):
        result = {field: 1, "to": "int8", "modules": [row, {**row, "module": "", "path": ""}]}
        files = Files(seeds.models()[0].files, **{"result.json": msgspec.json.encode(result)})
        yield Seed(files, "result.json")


_JOBS = b"""output_dir = "out"
[defaults]
strategy = "htp"
timeout = 60
memory = "4 GiB"
[[jobs]]
name = "first"
model = "some/model"
input_shape = [2, 64]
dynamic_axes = {input_ids = {0 = "batch"}}
[[jobs]]
model = "./bert"
output = "sub/bert.onnx"
torch_nn = ["Linear"]
with_report = true
"""


def _toml_jobs() -> Iterable[Seed]:
    yield Seed(Files({"jobs.toml": _JOBS}), "jobs.toml")


def _json_jobs() -> Iterable[Seed]:
    yield Seed(
        Files({"jobs.json": msgspec.json.encode(tomllib.loads(_JOBS.decode()))}), "jobs.json"
    )


def _results_seeds() -> Iterable[Seed]:
    done = JobResult(
        name="first",
        status="done",
        output="/out/first.onnx",
        nodes=3,
        files={"first.onnx": "0" * 64},
    )
    failed = JobResult(
        name="second", status="failed", output="/out/second.onnx", message="no", log=("a", "b")
    )
    lines = b"\n".join(map(msgspec.json.encode, (done, failed))) + b"\n"
    yield Seed(Files({"results.jsonl": lines}), "results.jsonl")


_ALL = (
    Target(
        "onnx",
        seeds.models,
        (mutate_protobuf.mutate_fields, mutate_protobuf.mutate_message),
        _ON_MODELS,
        grammars.generate_model,
        _correct_digests,
    ),
    Target(
        "functions",
        seeds.function_files,
        (mutate_protobuf.mutate_fields, mutate_protobuf.mutate_message),
        {"inline": _inline, "analyze": _ON_MODELS["analyze"], "validate": _ON_MODELS["validate"]},
    ),
    Target(
        "sidecar",
        _sidecars,
        (mutate_json.mutate,),
        _ON_SIDECARS,
        grammars.generate_sidecar,
        _correct_digests,
    ),
    Target(
        "graphml",
        seeds.graphml_files,
        (mutate_xml.mutate,),
        _ON_GRAPHML,
        grammars.generate_graphml,
    ),
    Target(
        "onnxdata",
        seeds.data_files,
        (),
        _if_present(GRAPHML, _ON_GRAPHML) | _if_present(MODEL, _ON_MODELS),
    ),
    Target(
        "specs",
        _specs_seeds,
        (mutate_json.mutate,),
        {"specs": _read_specs},
        grammars.generate_specs,
        limits=_INPUT_LIMITS,
    ),
    Target("jobs", _json_jobs, (mutate_json.mutate,), {"jobs": _read_jobs}, grammars.generate_jobs),
    Target("toml", _toml_jobs, (mutate_toml.mutate,), {"jobs": _read_jobs}),
    Target("overlay", _overlay_seeds, (mutate_json.mutate,), {"view": _show_overlay}),
    Target(
        "generation",
        seeds.generation_files,
        (mutate_json.mutate,),
        {"generate": _generate, "cache": _shapes_of_cache},
    ),
    Target("results", _results_seeds, (mutate_json.mutate,), {"results": _read_results}),
    Target(
        "arrays",
        _arrays_seeds,
        (mutate_zip.mutate,),
        {"specs": _read_specs},
        grammars.generate_arrays,
        limits=_INPUT_LIMITS,
    ),
)
TARGETS = {target.name: target for target in _ALL}
