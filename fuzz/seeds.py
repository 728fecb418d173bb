"""Small files that are whole: what the damage is done to. They are made without torch, so that forking is cheap."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

import modelexport
from graphml.handmade import HANDMADE, model, value
from modelexport.attribution.module_records import HierarchyMap, tagged_chunks
from modelexport.graph.flat import flatten
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.options import PARAMETER_MODES
from modelexport.tagged.records import ExportRecord, ModelRecord, encode_sidecar
from modelexport.tagged.tables import complete_sidecar, consumer_tags, tags_of_node

MODEL, SIDECAR, DATA, GRAPHML, GRAPHML_DATA = (
    "m.onnx",
    "m_hierarchy.json",
    "m.onnx.data",
    "g.graphml",
    "g.onnxdata",
)
MODULES = {
    "": "/Net",
    "encoder": "/Net/Encoder",
    "encoder.block": "/Net/Encoder/Block",
    "encoder.block.linear": None,
    "head": "/Net/Head",
    "spare": "/Net/Spare",
}
_HOMES = ("encoder.block.linear", "encoder.block", "encoder", "head", "")
_FROM_HAND = (
    "bodies",
    "functions",
    "every_attribute",
    "odd_types",
    "sequences",
    "weights_as_inputs",
    "metadata_everywhere",
)


class Files(dict[str, bytes]):
    """What lies in a folder, by name."""

    def __repr__(self) -> str:
        return f"Files of {', '.join(f'{len(content)} bytes in {name}' for name, content in self.items())}"


class Seed(NamedTuple):
    """Files that belong together, and the one that is damaged."""

    files: Files
    damaged: str

    @property
    def content(self) -> bytes:
        return self.files[self.damaged]


def net() -> onnx.ModelProto:
    """Two linear layers with sizes that follow from shapes, and a weight that is large enough to be stepped over."""
    weights = [
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
        nodes, [value("x", shape=["batch", 20])], [value("y", shape=["batch", 3])], weights
    )


def tagged(proto: onnx.ModelProto) -> Files:
    """A model with a map, as an export writes it: nodes take turns to belong to a few modules."""
    graph = flatten(proto)
    homes = [
        _HOMES[number * len(_HOMES) // max(len(graph.nodes), 1)]
        for number in range(len(graph.nodes))
    ]
    primary = [MODULES[home] or MODULES["encoder.block"] for home in homes]
    consumers = consumer_tags(graph, primary)
    tags = []
    for number, (node, home, own) in enumerate(zip(graph.nodes, homes, primary, strict=True)):
        told = tags_of_node(node, own, consumers)
        doc = graph.protos[number].doc_string or None
        tags.append(
            NodeTag(
                told,
                own,
                len(told),
                "scope",
                home,
                number % 2 if home == "encoder" else None,
                doc=doc,
            )
        )
    record = ModelRecord("fuzz.Net", "fuzz", MODEL, 21, proto.ir_version)
    export = ExportRecord("htp", "torchscript", "auto", None, 0, (), (), (), {"torch": "0"})
    hierarchy = HierarchyMap(
        tuple(tags), complete_sidecar(graph, tags, record, export, _modules(homes, graph.outputs))
    )
    data = b"".join(tagged_chunks(proto.SerializeToString(), hierarchy))
    return Files({MODEL: data, SIDECAR: encode_sidecar(hierarchy.sidecar)})


def _modules(homes: Sequence[str], results: Sequence[str]) -> dict[str, ModuleRecord]:
    counts = {
        path: sum(home == path or not path or home.startswith(f"{path}.") for home in homes)
        for path in MODULES
    }
    return {
        path: ModuleRecord(
            tag=tag,
            class_=f"fuzz.{(tag or 'Linear').rpartition('/')[2]}",
            shown=tag is not None,
            status="nodes" if counts[path] else "unused",
            calls=2 if path == "encoder" else int(bool(counts[path])),
            execution_order=place if counts[path] else None,
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
        for place, (path, tag) in enumerate(MODULES.items())
    }


@functools.cache
def models() -> tuple[Seed, ...]:
    """Tagged models: with and without sidecar, without a map, with weights in a data file."""
    files = [tagged(made) for made in (net(), *(HANDMADE[name]() for name in _FROM_HAND))]
    bare = Files({MODEL: net().SerializeToString()})
    found = [*files, bare, *(Files({MODEL: files[number][MODEL]}) for number in (0, 1, 2)), apart()]
    return tuple(Seed(each, MODEL) for each in found)


@functools.cache
def apart() -> Files:
    """The net with its weights in a data file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MODEL
        onnx.save_model(net(), path, save_as_external_data=True, location=DATA, size_threshold=0)
        proto = onnx.load(path, load_external_data=False)
        return Files({**tagged(proto), DATA: path.with_name(DATA).read_bytes()})


def drawn(files: Files, mode: str) -> Files:
    """The same as GraphML, with all that has to lie beside it."""
    with tempfile.TemporaryDirectory() as folder:
        path = written(files, Path(folder)) / MODEL
        made = modelexport.export_graphml(path, path.with_name(GRAPHML), parameters=mode)
        wanted = [made.graphml, path.with_name(GRAPHML_DATA)]
        if mode == "reference":
            wanted += [path, path.with_name(DATA)]
        return Files({found.name: found.read_bytes() for found in wanted if found.exists()})


@functools.cache
def drawings() -> tuple[Seed, ...]:
    """GraphML of a few models, with weights kept in each of the ways."""
    small = [models()[number].files for number in (0, 1, 2)]
    found = [drawn(files, mode) for files in (*small, apart()) for mode in PARAMETER_MODES]
    for name in ("odd_types", "many_outputs"):
        found.append(drawn(Files({MODEL: HANDMADE[name]().SerializeToString()}), "sidecar"))
    return tuple(Seed(files, GRAPHML) for files in found)


def beside() -> Iterator[Seed]:
    """Files with weights, beside what refers to them."""
    for seed in drawings():
        for name in seed.files:
            if name != GRAPHML:
                yield Seed(seed.files, name)
    yield Seed(apart(), DATA)


def written(files: Files, folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
