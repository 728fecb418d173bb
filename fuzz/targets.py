"""What is fuzzed: for each kind of file where cases come from, and every reader that such a file gets to.

A target for another kind of file is one more entry in TARGETS: seeds, the ways to damage them, a grammar, readers.
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
from fuzz import grammars, of_bytes, of_json, of_protobuf, of_toml, of_xml, of_zip, seeds
from fuzz.limits import Limits, Reader
from fuzz.of_bytes import Draw
from fuzz.seeds import GRAPHML, MODEL, MODULES, SIDECAR, Files, Seed
from modelexport.batch.jobs import read_jobs
from modelexport.batch.results import JobResult, ResultsFile
from modelexport.errors import FormatError, ModelExportError
from modelexport.extraction.extract import list_modules
from modelexport.options import PARAMETER_MODES
from modelexport.tagged.records import METADATA_KEY, decode_embedded, encode_embedded, text_digest

Damage = Callable[[Draw, bytes], bytes]
_CHANGES, _CHANGES_MADE_UP = (1, 1, 1, 1, 2, 2, 3, 5), (0, 0, 1, 2)
"""How many a case has: after one or two, readers get furthest."""
_FILLED = Limits(memory=512 << 20, address_space=512 << 20)
"""An input may be as large as someone says, so it is the system that refuses more."""


class Target(NamedTuple):
    """One kind of file. `seal` makes files say again that nothing was changed, as far as they say so."""

    name: str
    seeds: Callable[[], Iterable[Seed]]
    damage: tuple[Damage, ...]
    readers: Mapping[str, Reader]
    grammar: Callable[[Draw], bytes] | None = None
    seal: Callable[[Files], None] | None = None
    limits: Limits = Limits()

    def cases(self) -> st.SearchStrategy[Files]:
        """Folders of files, one of them damaged, or made up."""
        found = tuple(self.seeds())

        @st.composite
        def case(draw: Draw) -> Files:
            seed = draw(st.sampled_from(found))
            made_up = self.grammar is not None and not draw(st.integers(0, 3))
            content = self.grammar(draw) if made_up else seed.content
            for _ in range(draw(st.sampled_from(_CHANGES_MADE_UP if made_up else _CHANGES))):
                content = self._changed(draw, content, found)
            files = Files(seed.files, **{seed.damaged: content})
            if self.seal is not None and draw(st.booleans()):
                self.seal(files)
            return files

        return case()

    def _changed(self, draw: Draw, content: bytes, found: tuple[Seed, ...]) -> bytes:
        """Mostly damage that fits the kind of file; always bytes where there is none."""
        if self.damage and draw(st.integers(0, 7)):
            return draw(st.sampled_from(self.damage))(draw, content)
        return of_bytes.damaged(draw, content, draw(st.sampled_from(found)).content)


def _choice(path: Path, of: int) -> int:
    """One of several, by what the file holds, so that the same files always get the same."""
    return zlib.crc32(path.read_bytes()) % of


def _command(*arguments: object) -> None:
    """A command as people call it: its errors are one line and an exit code."""
    result = CliRunner().invoke(modelexport.cli.main.main, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in (0, 1, 2):
        raise AssertionError(f"exit code {result.exit_code}")
    if result.exit_code == 2:
        if not (result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1):
            raise AssertionError(f"not one line that tells the error: {result.stderr[:500]!r}")
        raise ModelExportError(result.stderr)


def _compare(folder: Path, out: Path) -> None:
    """With one that is whole, and with itself turned around, where it comes down to every node."""
    turned = out / "turned.onnx"
    with suppress(DecodeError):
        proto = onnx.ModelProto.FromString((folder / MODEL).read_bytes())
        nodes = [copy.deepcopy(node) for node in reversed(proto.graph.node)]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
        turned.write_bytes(proto.SerializeToString())
        modelexport.compare(folder / MODEL, turned)
    whole = out / "whole"
    whole.mkdir()
    seeds.written(seeds.models()[_choice(folder / MODEL, 3)].files, whole)
    modelexport.compare(whole / MODEL, folder / MODEL)


def _repair(folder: Path, out: Path) -> None:
    mended = Path(shutil.copytree(folder, out / "mended")) / MODEL
    modelexport.validate(mended, repair=True)
    modelexport.validate(mended, check_consistency=True)


def _extract(folder: Path, out: Path) -> None:
    modelexport.extract(folder / MODEL, "", out / "whole.onnx")


def _extract_some(folder: Path, out: Path) -> None:
    """A module, written to a file or into memory."""
    choice = _choice(folder / MODEL, 2 * len(MODULES))
    modelexport.extract(
        folder / MODEL, [*MODULES][choice // 2], out / "some.onnx" if choice % 2 else None
    )


def _take_apart(folder: Path, out: Path) -> None:
    """A module's children, and what the graph around a module looks like."""
    module = [*MODULES][_choice(folder / MODEL, len(MODULES))]
    modelexport.extract_module_subgraph(folder / MODEL, None, module)
    for _ in modelexport.partition(folder / MODEL, module):
        pass


def _there_and_back(folder: Path, out: Path) -> None:
    mode = PARAMETER_MODES[
        _choice(folder / MODEL, 2)
    ]  # a reference would have to lie beside the model
    made = modelexport.export_graphml(folder / MODEL, out / GRAPHML, parameters=mode)
    modelexport.import_onnx(made.graphml, out / "back.onnx")


def _reading_command(folder: Path, out: Path) -> None:
    """One of the commands that show something."""
    path = folder / MODEL
    forms = [
        ("analyze", path, "--output-format", form)
        for form in ("summary", "detailed", "json", "csv")
    ]
    forms += [
        ("analyze", path, "--filter-tag", told) for told in ("/Net/Encoder", "auxiliary", "e*")
    ]
    forms += [
        ("validate", path, "--check-consistency", "--output-format", form)
        for form in ("text", "json")
    ]
    forms += [
        ("compare", path, path),
        ("extract", path, "--list"),
        ("extract", path, "encoder", out / "piece.onnx"),
    ]
    forms += [
        ("strip", path, out / "stripped.onnx"),
        ("export-graphml", path, out / "shown.graphml"),
    ]
    _command(*forms[_choice(path, len(forms))])


_ON_MODELS: dict[str, Reader] = {
    "load": lambda folder, out: modelexport.load(folder / MODEL).modules,
    "analyze": lambda folder, out: modelexport.analyze(folder / MODEL),
    "validate": lambda folder, out: modelexport.validate(folder / MODEL, check_consistency=True),
    "repair": _repair,
    "compare": _compare,
    "strip": lambda folder, out: modelexport.strip(folder / MODEL, out / "bare.onnx"),
    "extract": _extract,
    "extract some": _extract_some,
    "take apart": _take_apart,
    "extract --list": lambda folder, out: list_modules(folder / MODEL),
    "graphml": _there_and_back,
    "command": _reading_command,
}
_WITH_SIDECARS = ("analyze", "validate", "repair", "extract", "extract --list", "command")
_ON_SIDECARS = {name: _ON_MODELS[name] for name in _WITH_SIDECARS}


def _import(folder: Path, out: Path) -> None:
    modelexport.import_onnx(folder / GRAPHML, out / "back.onnx")


def _import_command(folder: Path, out: Path) -> None:
    _command(
        "import-onnx",
        folder / GRAPHML,
        out / "again.onnx",
        *(["--validate"] * _choice(folder / GRAPHML, 2)),
    )


_ON_GRAPHML: dict[str, Reader] = {"import": _import, "command": _import_command}


def _specs(folder: Path, out: Path) -> None:
    """The inputs that are described, made."""
    import torch

    from modelexport.source.input_specs import InputSpec, make_tensor, read_specs

    for path in folder.iterdir():
        for spec in read_specs(path).values():
            if isinstance(spec, InputSpec):
                make_tensor(spec, torch.Generator().manual_seed(0))


def _jobs(folder: Path, out: Path) -> None:
    """The list, and what its limits come to."""
    for path in folder.iterdir():
        for job in read_jobs(path).jobs:
            assert job.memory_bytes is None or job.memory_bytes > 0


def _results(folder: Path, out: Path) -> None:
    ResultsFile(folder / "results.jsonl").read()


def _with_digests(files: Files) -> None:
    """Put the digest of the metadata, and in it that of the sidecar, right again."""
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
    """Sidecars of tagged models, and one without which nothing would be known of the modules."""
    for seed in seeds.models():
        if SIDECAR in seed.files:
            yield Seed(seed.files, SIDECAR)
    net = seeds.models()[0].files
    yield Seed(Files({MODEL: seeds.net().SerializeToString(), SIDECAR: net[SIDECAR]}), SIDECAR)


def _where(name: str, readers: Mapping[str, Reader]) -> dict[str, Reader]:
    """The same readers, for folders that may lack their file."""

    def only(reader: Reader, folder: Path, out: Path) -> None:
        if (folder / name).exists():
            reader(folder, out)

    return {f"{name} {told}": partial(only, reader) for told, reader in readers.items()}


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


TARGETS = {
    target.name: target
    for target in (
        Target(
            "onnx",
            seeds.models,
            (of_protobuf.in_fields, of_protobuf.in_meaning),
            _ON_MODELS,
            grammars.model,
            _with_digests,
        ),
        Target(
            "sidecar", _sidecars, (of_json.damaged,), _ON_SIDECARS, grammars.sidecar, _with_digests
        ),
        Target("graphml", seeds.drawings, (of_xml.damaged,), _ON_GRAPHML, grammars.graphml),
        Target(
            "onnxdata", seeds.beside, (), _where(GRAPHML, _ON_GRAPHML) | _where(MODEL, _ON_MODELS)
        ),
        Target(
            "specs",
            _specs_seeds,
            (of_json.damaged,),
            {"specs": _specs},
            grammars.specs,
            limits=_FILLED,
        ),
        Target("jobs", _json_jobs, (of_json.damaged,), {"jobs": _jobs}, grammars.jobs),
        Target("toml", _toml_jobs, (of_toml.damaged,), {"jobs": _jobs}),
        Target("results", _results_seeds, (of_json.damaged,), {"results": _results}),
        Target(
            "arrays",
            _arrays_seeds,
            (of_zip.damaged,),
            {"specs": _specs},
            grammars.arrays,
            limits=_FILLED,
        ),
    )
}
