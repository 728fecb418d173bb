"""Small valid files to mutate, made without torch, so that forking is cheap."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

import modelexport
from graphml.handmade import HANDMADE, model, value
from modelexport.errors import FormatError
from modelexport.generation.records import (
    FORMAT,
    GenerationFile,
    GenerationInput,
    GenerationPart,
    InputRole,
    TokenIds,
    encode_generation,
)
from modelexport.graph.flat import flatten
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.options import PARAMETER_MODES
from modelexport.tagged.hierarchy_map import HierarchyMap, tagged_chunks
from modelexport.tagged.records import ExportRecord, ModelRecord, TensorInfo, encode_sidecar
from modelexport.tagged.tables import complete_sidecar, consumer_tags, tags_of_node

MODEL, SIDECAR, DATA = "m.onnx", "m_hierarchy.json", "m.onnx.data"
GRAPHML, GRAPHML_DATA = "g.graphml", "g.onnxdata"
GENERATION, DECODE = "m_generation.json", "m_decode.onnx"
MODULES = {
    "": "/Net",
    "encoder": "/Net/Encoder",
    "encoder.block": "/Net/Encoder/Block",
    "encoder.block.linear": None,
    "head": "/Net/Head",
    "spare": "/Net/Spare",
}
_OWNERS = ("encoder.block.linear", "encoder.block", "encoder", "head", "")
_HANDMADE_NAMES = (
    *("bodies", "functions", "every_attribute", "odd_types", "sequences"),
    *("weights_as_inputs", "metadata_everywhere"),
)


class Files(dict[str, bytes]):
    """The files of a folder, by name."""

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(content)} bytes in {name}" for name, content in self.items())
        return f"Files of {sizes}"


class Seed(NamedTuple):
    """Files that belong together, and the name of the one to mutate."""

    files: Files
    name: str

    @property
    def content(self) -> bytes:
        """The content of the file to mutate."""
        return self.files[self.name]


def net() -> onnx.ModelProto:
    """Build two linear layers with a shape computation, and an initializer that readers skip."""
    initializers = [
        numpy_helper.from_array(np.arange(400, dtype=np.float32).reshape(20, 20), "w1"),
        numpy_helper.from_array(np.ones(20, np.float32), "b1"),
        numpy_helper.from_array(np.ones((20, 3), np.float32), "w2"),
        numpy_helper.from_array(np.array([0], np.int64), "zero"),
        numpy_helper.from_array(np.array([-1], np.int64), "rest"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["m"], name="matmul"),
        helper.make_node("Add", ["m", "b1"], ["a"], name="add"),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Shape", ["r"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["batch"], axis=0),
        helper.make_node("Concat", ["batch", "rest"], ["sizes"], axis=0),
        helper.make_node("Reshape", ["r", "sizes"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w2"], ["g"], alpha=0.5),
        helper.make_node("Softmax", ["g"], ["y"], axis=-1, doc_string="of its own"),
    ]
    return model(
        nodes, [value("x", shape=["batch", 20])], [value("y", shape=["batch", 3])], initializers
    )


def tag_model(proto: onnx.ModelProto) -> Files:
    """Add a map to a model, as an export does, with the nodes spread over a few modules."""
    graph = flatten(proto)
    owners = [
        _OWNERS[number * len(_OWNERS) // max(len(graph.nodes), 1)]
        for number in range(len(graph.nodes))
    ]
    primary = [MODULES[owner] or MODULES["encoder.block"] for owner in owners]
    consumers = consumer_tags(graph, primary)
    tags = []
    for number, (node, owner, own) in enumerate(zip(graph.nodes, owners, primary, strict=True)):
        names = tags_of_node(node, own, consumers)
        call = number % 2 if owner == "encoder" else None
        doc = graph.protos[number].doc_string or None
        tags.append(NodeTag(names, own, len(names), "scope", owner, call, doc=doc))
    record = ModelRecord("fuzz.Net", "fuzz", MODEL, 21, proto.ir_version)
    export = ExportRecord("htp", "torchscript", "auto", None, 0, (), (), (), {"torch": "0"})
    hierarchy = HierarchyMap(
        tuple(tags), complete_sidecar(graph, tags, record, export, _modules(owners, graph.outputs))
    )
    data = b"".join(tagged_chunks(proto.SerializeToString(), hierarchy))
    return Files({MODEL: data, SIDECAR: encode_sidecar(hierarchy.sidecar)})


def _modules(owners: Sequence[str], results: Sequence[str]) -> dict[str, ModuleRecord]:
    counts = {
        path: sum(owner == path or not path or owner.startswith(f"{path}.") for owner in owners)
        for path in MODULES
    }
    return {
        path: ModuleRecord(
            tag=tag,
            class_=f"fuzz.{(tag or 'Linear').rpartition('/')[2]}",
            shown=tag is not None,
            status="nodes" if counts[path] else "unused",
            calls=2 if path == "encoder" else int(bool(counts[path])),
            execution_order=order if counts[path] else None,
            forward_args=("x",),
            parameters=("w1", "b1") if "linear" in path else (),
            direct_parameters=(),
            children=tuple(
                p.rpartition(".")[2] for p in MODULES if p and p.rpartition(".")[0] == path
            ),
            aliases=(),
            nodes=counts[path],
            results=(tuple(results),) if path in ("", "head") else (),
        )
        for order, (path, tag) in enumerate(MODULES.items())
    }


@functools.cache
def models() -> tuple[Seed, ...]:
    """Return models with and without a sidecar, without a map, and with a data file."""
    files = [tag_model(proto) for proto in (net(), *(HANDMADE[name]() for name in _HANDMADE_NAMES))]
    bare = Files({MODEL: net().SerializeToString()})
    cases = [
        *files,
        bare,
        *(Files({MODEL: files[number][MODEL]}) for number in (0, 1, 2)),
        net_with_data_file(),
    ]
    return tuple(Seed(case, MODEL) for case in cases)


@functools.cache
def net_with_data_file() -> Files:
    """Return the tagged net with its initializers in a data file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MODEL
        onnx.save_model(net(), path, save_as_external_data=True, location=DATA, size_threshold=0)
        proto = onnx.load(path, load_external_data=False)
        return Files({**tag_model(proto), DATA: path.with_name(DATA).read_bytes()})


def convert_to_graphml(files: Files, mode: str) -> Files:
    """Convert a model to GraphML, with all files that the GraphML needs."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(files, Path(folder))
        path = Path(folder) / MODEL
        export = modelexport.export_graphml(path, path.with_name(GRAPHML), parameters=mode)
        outputs = [export.graphml, path.with_name(GRAPHML_DATA)]
        if mode == "reference":
            outputs += [path, path.with_name(DATA)]
        return Files({file.name: file.read_bytes() for file in outputs if file.exists()})


@functools.cache
def graphml_files() -> tuple[Seed, ...]:
    """Return GraphML of a few models, in each parameter mode."""
    small = [models()[number].files for number in (0, 1, 2)]
    cases = [
        convert_to_graphml(files, mode)
        for files in (*small, net_with_data_file())
        for mode in PARAMETER_MODES
    ]
    for name in ("odd_types", "many_outputs"):
        files = Files({MODEL: HANDMADE[name]().SerializeToString()})
        cases.append(convert_to_graphml(files, "sidecar"))
    return tuple(Seed(files, GRAPHML) for files in cases)


@functools.cache
def function_files() -> tuple[Seed, ...]:
    """Return tagged models whose modules are functions."""
    cases = []
    for seed in (*models()[:4], models()[-1]):
        with tempfile.TemporaryDirectory() as folder:
            write_files(seed.files, Path(folder))
            path = Path(folder) / "functions.onnx"
            with suppress(FormatError):  # not every model has tags
                modelexport.to_functions(Path(folder) / MODEL, path, all_modules=True)
                cases.append(Files(seed.files, **{MODEL: path.read_bytes()}))
    return tuple(Seed(files, MODEL) for files in cases)


def data_files() -> Iterator[Seed]:
    """Yield files with the data of initializers, beside the files that refer to them."""
    for seed in graphml_files():
        for name in seed.files:
            if name != GRAPHML:
                yield Seed(seed.files, name)
    yield Seed(net_with_data_file(), DATA)


def generation_files() -> Iterator[Seed]:
    """Yield a language model of one part, which adds the embedding of each token to its cache."""
    table = np.arange(20, dtype=np.float32).reshape(5, 4) / 20
    initializers = [
        numpy_helper.from_array(table, "table"),
        numpy_helper.from_array(table.T.copy(), "head"),
    ]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["embedded"]),
        helper.make_node("Concat", ["past", "embedded"], ["present"], axis=1),
        helper.make_node("MatMul", ["embedded", "head"], ["logits"]),
    ]
    ids = value("input_ids", onnx.TensorProto.INT64, ["batch", "sequence"])
    states = [value(name, shape=["batch", name, 4]) for name in ("past", "present")]
    scores = value("logits", shape=["batch", "sequence", 5])
    decode = model(nodes, [ids, states[0]], [scores, states[1]], initializers)
    record = GenerationFile(
        format=FORMAT,
        source="fuzz",
        parts={
            "decode": GenerationPart(
                onnx=DECODE,
                inputs={
                    "input_ids": GenerationInput(InputRole.TOKENS),
                    "past": GenerationInput(InputRole.STATE, "present", empty=(1, 0, 4)),
                },
                outputs=("logits", "present"),
                logits="logits",
                class_="fuzz.Net",
            )
        },
        cache=(TensorInfo("past", "float32", ("batch", "past", 4)),),
        max_cache_length=None,
        tokens=TokenIds(eos=(4,)),
        tokenizer=None,
        data=(),
    )
    files = {GENERATION: encode_generation(record), DECODE: decode.SerializeToString()}
    yield Seed(Files(files), GENERATION)


def write_files(files: Files, folder: Path) -> None:
    """Write files to a folder."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
