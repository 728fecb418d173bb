"""Compare with other tools: torch's own metadata, and onnx's extractor."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx.utils
import onnxruntime

import modelexport
import proof
from architectures import ARCHITECTURES
from benchmarks.export_cost import STRATEGIES
from benchmarks.metadata import MetadataCounts, Survival, count_metadata, count_survivors
from benchmarks.rewriting import TOOLS
from benchmarks.table import Row, format_size
from exports import build

MODEL = "bert"
LAYER = "encoder.layer.0"


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    for exporter, strategy in STRATEGIES.items():
        yield from _metadata_rows(exporter, strategy)
        with tempfile.TemporaryDirectory() as folder:
            path, model, inputs = export(MODEL, strategy, Path(folder))
            for name, tool in TOOLS.items():
                rewritten = path.with_name("rewritten.onnx")
                tool(path, rewritten)
                yield _survival_row(
                    f"{name}, {MODEL}, {exporter}", count_survivors(path, rewritten)
                )
            yield from _extraction_rows(exporter, extract_all(path, model, inputs))


def export(name: str, strategy: str, folder: Path) -> tuple[Path, Any, Any]:
    """Export an architecture; return the file, the model and its inputs."""
    model, inputs = build(name, strategy)
    path = folder / "model.onnx"
    modelexport.export_model(model, inputs, path, strategy=strategy)
    return path, model, inputs


def measure(name: str, strategy: str) -> MetadataCounts:
    """Compare torch's metadata with the map for one architecture."""
    with tempfile.TemporaryDirectory() as folder:
        return count_metadata(*export(name, strategy, Path(folder)))


def _metadata_rows(exporter: str, strategy: str) -> Iterator[Row]:
    counts = {name: measure(name, strategy) for name in ARCHITECTURES}
    total = MetadataCounts(*map(sum, zip(*counts.values(), strict=True)))
    peer = f"torch's {'name_scopes' if exporter == 'dynamo' else 'node names'}"
    where = f"{len(counts)} architectures, {exporter}"
    worst, least = min(counts.items(), key=lambda item: item[1].same / item[1].judged)
    yield Row(
        f"nodes with a module, {where}",
        f"{peer} {_share(total.named, total.nodes)}",
        _share(total.tagged, total.nodes),
        _verdict(total.named, total.tagged),
    )
    yield Row(
        f"modules whose results are at their nodes, {where}",
        f"{peer} {_share(total.located_by_torch, total.modules)}",
        _share(total.located_by_map, total.modules),
        _verdict(total.located_by_torch, total.located_by_map),
    )
    same = _share(total.same, total.judged)
    yield Row(
        f"nodes with the right module, {where}",
        f"{peer} {same}, least in {worst} {_share(least.same, least.judged)}",
        f"the map is the reference, except for {total.nodes - total.judged} nodes",
        f"torch wrong or missing at {total.judged - total.same:,}",
    )


def _survival_row(what: str, counts: Survival) -> Row:
    peer = _share(counts.torch, counts.nodes)
    own = _share(counts.doc_strings, counts.nodes)
    with_sidecar = _share(counts.with_sidecar, counts.nodes)
    moved = [
        f", {count} of another module" if count else ""
        for count in (counts.torch_moved, counts.we_moved)
    ]
    return Row(
        f"nodes with a module after {what}",
        f"torch's metadata {peer}{moved[0]}",
        f"doc_string {own}{moved[1]}; with the sidecar {with_sidecar}",
        _verdict(counts.torch, counts.doc_strings),
    )


class Extractions(NamedTuple):
    """Every module of a file extracted by both tools; onnx's is given the names of the values.

    An extracted model is right if ONNX Runtime runs it and returns every value that the module
    returned in PyTorch. `names` and the sizes are those of one layer.
    """

    modules: int
    ours: int
    peers: int
    names: int
    our_size: int
    peer_size: int


def extract_all(path: Path, model: Any, inputs: Any) -> Extractions:
    """Extract every module that has nodes, with both tools."""
    returned, values = proof.pytorch_values(model, inputs), proof.onnx_values(path, inputs)
    records = modelexport.load(path).modules
    modules = [module for module in returned if module and records[module].status == "nodes"]
    right = {"ours": 0, "peer": 0}
    names, sizes = 0, {}
    for module in modules:
        with tempfile.TemporaryDirectory() as folder:
            targets = {kind: Path(folder) / kind / "extracted.onnx" for kind in right}
            for target in targets.values():
                target.parent.mkdir()
            record = modelexport.extract(path, module, targets["ours"]).record
            ends = [value.name for value in record.inputs], [value.name for value in record.outputs]
            with suppress(ValueError):  # it rejects a module without inputs
                onnx.utils.extract_model(str(path), str(targets["peer"]), *ends)
            for kind, target in targets.items():
                right[kind] += target.exists() and _returns_results(
                    target, returned[module], values
                )
            if module == LAYER:
                names = len(ends[0]) + len(ends[1])
                sizes = {
                    kind: sum(f.stat().st_size for f in p.parent.iterdir())
                    for kind, p in targets.items()
                }
    return Extractions(
        len(modules), right["ours"], right["peer"], names, sizes["ours"], sizes["peer"]
    )


def _returns_results(
    path: Path, calls: list[proof.Returned], values: dict[str, np.ndarray]
) -> bool:
    """Return whether a model returns all that a module returned in PyTorch."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    outputs = [value.name for value in session.get_outputs()]
    inputs = {value.name: values[value.name] for value in session.get_inputs()}
    results = dict(zip(outputs, session.run(None, inputs), strict=True))
    return all(proof.found(tensor, outputs, results) for call in calls for tensor in call.given)


def _extraction_rows(exporter: str, counts: Extractions) -> Iterator[Row]:
    peer = "onnx.utils.extract_model"
    yield Row(
        f"extracted modules that return PyTorch's values, {MODEL}, {exporter}",
        f"{peer} {_share(counts.peers, counts.modules)}, given the names",
        _share(counts.ours, counts.modules),
        _verdict(counts.peers, counts.ours),
    )
    yield Row(
        f"names of values needed to extract {LAYER}, {MODEL}, {exporter}",
        f"{peer} {counts.names}",
        "0, only the module path",
        "found in the map",
    )
    yield Row(
        f"size of the extracted {LAYER}, all files, {MODEL}, {exporter}",
        f"{peer} {format_size(counts.peer_size)}",
        f"{format_size(counts.our_size)}, with tags and sidecar",
        f"{counts.our_size / counts.peer_size:.2f}",
    )


def _share(part: int, total: int) -> str:
    return f"{part:,} of {total:,} ({part / total:.1%})"


def _verdict(peer: int, ours: int) -> str:
    if peer == ours:
        return "equal"
    return f"ours, {ours - peer:,} more" if ours > peer else f"theirs, {peer - ours:,} more"
