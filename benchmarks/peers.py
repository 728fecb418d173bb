"""What one would use instead of a map: torch's own metadata to find a module, onnx's extractor to cut it out."""

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
from benchmarks.metadata import Survived, Told, survived, told
from benchmarks.rewriting import TOOLS
from benchmarks.table import Row, size
from exports import build

MODEL = "bert"
LAYER = "encoder.layer.0"


def rows() -> Iterator[Row]:
    for exporter, strategy in STRATEGIES.items():
        yield from _metadata_rows(exporter, strategy)
        with tempfile.TemporaryDirectory() as folder:
            path, model, inputs = export(MODEL, strategy, Path(folder))
            for name, tool in TOOLS.items():
                rewritten = path.with_name("rewritten.onnx")
                tool(path, rewritten)
                yield _survival_row(f"{name}, {MODEL}, {exporter}", survived(path, rewritten))
            yield from _extraction_rows(exporter, cut_all(path, model, inputs))


def export(name: str, strategy: str, folder: Path) -> tuple[Path, Any, Any]:
    model, inputs = build(name, strategy)
    path = folder / "model.onnx"
    modelexport.export_model(model, inputs, path, strategy=strategy)
    return path, model, inputs


def tell(name: str, strategy: str) -> Told:
    """What torch's metadata and the map tell of one architecture."""
    with tempfile.TemporaryDirectory() as folder:
        return told(*export(name, strategy, Path(folder)))


def _metadata_rows(exporter: str, strategy: str) -> Iterator[Row]:
    found = {name: tell(name, strategy) for name in ARCHITECTURES}
    total = Told(*map(sum, zip(*found.values(), strict=True)))
    peer = f"torch's {'name_scopes' if exporter == 'dynamo' else 'node names'}"
    where = f"{len(found)} architectures, {exporter}"
    least = min(found, key=lambda name: found[name].same / found[name].judged)
    yield Row(
        f"nodes that are given to a module, {where}",
        f"{peer} {_share(total.named, total.nodes)}",
        _share(total.tagged, total.nodes),
        _verdict(total.named, total.tagged),
    )
    yield Row(
        f"modules whose values are at the nodes said to be theirs, {where}",
        f"{peer} {_share(total.placed_by_torch, total.values)}",
        _share(total.placed_by_map, total.values),
        _verdict(total.placed_by_torch, total.placed_by_map),
    )
    yield Row(
        f"nodes that are given to the right module, {where}",
        f"{peer} {_share(total.same, total.judged)}, least in {least} {_share(found[least].same, found[least].judged)}",
        f"the map is the judge, except at {total.nodes - total.judged} nodes",
        f"torch's wrong or silent at {total.judged - total.same:,}",
    )


def _survival_row(what: str, left: Survived) -> Row:
    peer, own = _share(left.torch, left.nodes), _share(left.doc_strings, left.nodes)
    moved = [
        f", {count} of another module" if count else ""
        for count in (left.torch_moved, left.we_moved)
    ]
    return Row(
        f"nodes that tell their module after {what}",
        f"torch's metadata {peer}{moved[0]}",
        f"doc_string {own}{moved[1]}; with the sidecar {_share(left.with_sidecar, left.nodes)}",
        _verdict(left.torch, left.doc_strings),
    )


class Cuts(NamedTuple):
    """Every module of a file cut out by both extractors, onnx's with the names of tensors that ours found.

    A piece is right if ONNX Runtime runs it and every value that the module made in PyTorch is among its results.
    """

    modules: int
    ours: int
    peers: int
    names: int
    our_size: int
    peer_size: int


def cut_all(path: Path, model: Any, inputs: Any) -> Cuts:
    returned, values = proof.pytorch_values(model, inputs), proof.onnx_values(path, inputs)
    records = modelexport.load(path).modules
    modules = [module for module in returned if module and records[module].status == "nodes"]
    right = {"ours": 0, "peer": 0}
    names, sizes = 0, {}
    for module in modules:
        with tempfile.TemporaryDirectory() as folder:
            pieces = {kind: Path(folder) / kind / "piece.onnx" for kind in right}
            for piece in pieces.values():
                piece.parent.mkdir()
            record = modelexport.extract(path, module, pieces["ours"]).record
            ends = [value.name for value in record.inputs], [value.name for value in record.outputs]
            with suppress(ValueError):  # it refuses a module without inputs
                onnx.utils.extract_model(str(path), str(pieces["peer"]), *ends)
            for kind, piece in pieces.items():
                right[kind] += piece.exists() and _gives(piece, returned[module], values)
            if module == LAYER:
                names = len(ends[0]) + len(ends[1])
                sizes = {
                    kind: sum(f.stat().st_size for f in p.parent.iterdir())
                    for kind, p in pieces.items()
                }
    return Cuts(len(modules), right["ours"], right["peer"], names, sizes["ours"], sizes["peer"])


def _gives(piece: Path, calls: list[proof.Returned], values: dict[str, np.ndarray]) -> bool:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(piece), options, providers=["CPUExecutionProvider"])
    outputs = [value.name for value in session.get_outputs()]
    results = dict(
        zip(
            outputs,
            session.run(None, {v.name: values[v.name] for v in session.get_inputs()}),
            strict=True,
        )
    )
    return all(proof.found(tensor, outputs, results) for call in calls for tensor in call.given)


def _extraction_rows(exporter: str, cuts: Cuts) -> Iterator[Row]:
    peer = "onnx.utils.extract_model"
    yield Row(
        f"modules cut out that run and give PyTorch's values, {MODEL}, {exporter}",
        f"{peer} {_share(cuts.peers, cuts.modules)}, if told the names",
        _share(cuts.ours, cuts.modules),
        _verdict(cuts.peers, cuts.ours),
    )
    yield Row(
        f"names of tensors to find before {LAYER} can be cut out, {MODEL}, {exporter}",
        f"{peer} {cuts.names}",
        "0, the module's path is enough",
        "found by the map",
    )
    yield Row(
        f"size of {LAYER} cut out, all its files, {MODEL}, {exporter}",
        f"{peer} {size(cuts.peer_size)}",
        f"{size(cuts.our_size)}, with tags and sidecar",
        f"{cuts.our_size / cuts.peer_size:.2f}",
    )


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.1%})"


def _verdict(peer: int, ours: int) -> str:
    return (
        "equal"
        if peer == ours
        else f"ours, {ours - peer:,} more"
        if ours > peer
        else f"theirs, {peer - ours:,} more"
    )
