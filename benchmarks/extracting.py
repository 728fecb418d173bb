"""What cutting one module out costs, against `onnx.load` of the file and `onnx.utils.extract_model` on the same cut."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import onnx
import onnx.utils

from benchmarks.generated import BLOCK, BLOCKS_A_STAGE, write_graph
from benchmarks.reading import timed
from modelexport.pieces.extract import extract
from modelexport.pieces.listing import extractable
from modelexport.pieces.partition import partition

SIZES = (10_000, 100_000)
ROUNDS = 5
AIM, AIM_GROWTH = 2.0, 12.0


def block(number: int) -> str:
    """The path of a block by its place in the graph."""
    return f"encoder.{number // BLOCKS_A_STAGE}.{number % BLOCKS_A_STAGE}"


def measure(path: Path, module: str) -> tuple[float, float, float]:
    """The best times of loading, of ours, and of onnx's extractor, in turn."""
    out, peer_out = path.with_name("out.onnx"), path.with_name("peer.onnx")
    record = extract(path, module, out).record
    ends = [value.name for value in record.inputs], [value.name for value in record.outputs]
    loads, ours, peers = [], [], []
    for turn in range(ROUNDS):
        loads.append(timed(onnx.load, path))
        ours.append(timed(extract, path, module, out))
        if turn < 2:
            peers.append(timed(onnx.utils.extract_model, str(path), str(peer_out), *ends))
    theirs = onnx.load(peer_out)
    if len(theirs.graph.node) != record.nodes + len(record.pulled_in):
        raise RuntimeError(f"the extractors disagree: {len(theirs.graph.node)} nodes, {record.nodes} ours")
    return min(loads), min(ours), min(peers)


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        print("extract, against onnx.load of the file and onnx.utils.extract_model of the same cut", flush=True)
        middle: dict[int, float] = {}
        for kind, types in (("with types", True), ("without types", False)):
            for nodes in SIZES:
                path = Path(folder) / "graph.onnx"
                write_graph(path, nodes, types)
                last = nodes // BLOCK - 1
                for place, number in (("first", 0), ("middle", last // 2), ("last", last)):
                    load, ours, peer = measure(path, block(number))
                    if types and place == "middle":
                        middle[nodes] = ours
                    print(
                        f"  {kind:13} {nodes:7,} nodes   {place:6} block   onnx.load {load:6.3f} s   ours {ours:6.3f} s"
                        f"   ratio {ours / load:5.2f}   aim at most {AIM:.0f}   onnx's extractor {peer:6.3f} s",
                        flush=True,
                    )
        growth = middle[SIZES[1]] / middle[SIZES[0]]
        print(f"growth from {SIZES[0]:,} to {SIZES[1]:,} nodes: {growth:.2f}   aim at most {AIM_GROWTH:.0f}")
        for name, work in (("--list", extractable), ("partition of the encoder", _take_apart)):
            times = []
            for nodes in SIZES:
                write_graph(path, nodes, types=True)
                times.append(timed(work, path))
            print(
                f"  {name:25} {times[0]:6.2f} s and {times[1]:6.2f} s   growth {times[1] / times[0]:5.2f}", flush=True
            )


def _take_apart(path: Path) -> None:
    for _ in partition(path, "encoder"):
        pass
