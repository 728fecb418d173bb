"""The targets: for each format the origin of its cases, and every reader of such files.

To add a format, add an entry to TARGETS: seeds, mutations, a grammar and readers.
"""

from __future__ import annotations

import io
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np
import onnx
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from fuzz import (
    grammars,
    mutate_bytes,
    mutate_json,
    mutate_protobuf,
    mutate_toml,
    mutate_xml,
    mutate_zip,
    readers,
    seeds,
)
from fuzz.limits import Limits, Reader
from fuzz.mutate_bytes import Draw
from fuzz.seeds import GRAPHML, MODEL, SIDECAR, Files, Seed
from modelexport.batch.results import JobResult
from modelexport.errors import FormatError
from modelexport.tagged.records import METADATA_KEY, decode_embedded, encode_embedded, text_digest

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
        readers.ON_MODELS,
        grammars.generate_model,
        _correct_digests,
    ),
    Target(
        "functions",
        seeds.function_files,
        (mutate_protobuf.mutate_fields, mutate_protobuf.mutate_message),
        {
            "inline": readers.inline,
            "analyze": readers.ON_MODELS["analyze"],
            "validate": readers.ON_MODELS["validate"],
        },
    ),
    Target(
        "sidecar",
        _sidecars,
        (mutate_json.mutate,),
        readers.ON_SIDECARS,
        grammars.generate_sidecar,
        _correct_digests,
    ),
    Target(
        "graphml",
        seeds.graphml_files,
        (mutate_xml.mutate,),
        readers.ON_GRAPHML,
        grammars.generate_graphml,
    ),
    Target(
        "onnxdata",
        seeds.data_files,
        (),
        readers.if_present(GRAPHML, readers.ON_GRAPHML)
        | readers.if_present(MODEL, readers.ON_MODELS),
    ),
    Target(
        "specs",
        _specs_seeds,
        (mutate_json.mutate,),
        {"specs": readers.read_input_specs},
        grammars.generate_specs,
        limits=_INPUT_LIMITS,
    ),
    Target(
        "jobs",
        _json_jobs,
        (mutate_json.mutate,),
        {"jobs": readers.read_job_files},
        grammars.generate_jobs,
    ),
    Target("toml", _toml_jobs, (mutate_toml.mutate,), {"jobs": readers.read_job_files}),
    Target("overlay", _overlay_seeds, (mutate_json.mutate,), {"view": readers.show_overlay}),
    Target(
        "generation",
        seeds.generation_files,
        (mutate_json.mutate,),
        {"generate": readers.generate, "cache": readers.shapes_of_cache},
    ),
    Target("results", _results_seeds, (mutate_json.mutate,), {"results": readers.read_results}),
    Target(
        "arrays",
        _arrays_seeds,
        (mutate_zip.mutate,),
        {"specs": readers.read_input_specs},
        grammars.generate_arrays,
        limits=_INPUT_LIMITS,
    ),
)
TARGETS = {target.name: target for target in _ALL}
