"""What cutting one module out costs, against `onnx.load` of the file and `onnx.utils.extract_model` on the same cut.

onnx's extractor is told the names of the tensors at the border, which ours finds; without that it cannot begin.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import onnx
import onnx.utils

from benchmarks.generated import BLOCK, BLOCKS_A_STAGE, write_graph
from benchmarks.reading import peak_kib, timed
from benchmarks.table import Row, against, growth, size
from modelexport.extraction.extract import extract, list_modules
from modelexport.extraction.partition import partition

SIZES = (10_000, 100_000)
ROUNDS, ROUNDS_OF_PEER = 5, 2
LARGE = 9 << 28
AIM, AIM_GROWTH = 2.0, 12.0


def block(number: int) -> str:
    """The path of a block by its place in the graph."""
    return f"encoder.{number // BLOCKS_A_STAGE}.{number % BLOCKS_A_STAGE}"


class Times(NamedTuple):
    """The best times of loading the file, of ours, and of onnx's extractor.

    `unchecked` is the extractor without ONNX's checker and, where the file has all types, without inferring them.
    """

    load: float
    ours: float
    peer: float
    unchecked: float


def measure(path: Path, module: str, types: bool) -> Times:
    out, peer_out = path.with_name("out.onnx"), path.with_name("peer.onnx")
    record = extract(path, module, out).record
    ends = [value.name for value in record.inputs], [value.name for value in record.outputs]
    peer = partial(onnx.utils.extract_model, str(path), str(peer_out), *ends)
    unchecked = partial(peer, check_model=False, infer_shapes=not types)
    times: dict[Callable[[], object], list[float]] = {
        partial(onnx.load, path): [],
        partial(extract, path, module, out): [],
        peer: [],
        unchecked: [],
    }
    for turn in range(ROUNDS):
        for work, spent in times.items():
            if turn < ROUNDS_OF_PEER or work not in (peer, unchecked):
                spent.append(timed(work))
    theirs = onnx.load(peer_out)
    if len(theirs.graph.node) != record.nodes + len(record.pulled_in):
        raise RuntimeError(
            f"the extractors disagree: {len(theirs.graph.node)} nodes, {record.nodes} ours"
        )
    return Times(*map(min, times.values()))


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.onnx"
        middle: dict[int, float] = {}
        for kind, types in (("", True), (" without types", False)):
            for nodes in SIZES:
                write_graph(path, nodes, types)
                last = nodes // BLOCK - 1
                found = [measure(path, block(number), types) for number in (0, last // 2, last)]
                if types:
                    middle[nodes] = found[1].ours
                what = f"extract one of {nodes // BLOCK:,} blocks, {nodes:,} nodes{kind}"
                worst = max(found, key=lambda times: times.ours / times.load)
                yield against(what, "onnx.load", worst.load, worst.ours, AIM)
                worst = max(found, key=lambda times: times.ours / times.peer)
                yield against(what, "onnx.utils.extract_model", worst.peer, worst.ours)
                worst = max(found, key=lambda times: times.ours / times.unchecked)
                yield against(what, "the same with its checks off", worst.unchecked, worst.ours)
        yield growth("extract a block of the middle", "nodes", middle, AIM_GROWTH)
        for name, work in (
            ("extract --list", list_modules),
            ("partition of the encoder", _take_apart),
        ):
            times = {}
            for nodes in SIZES:
                write_graph(path, nodes, types=True)
                times[nodes] = timed(work, path)
            yield growth(name, "nodes", times)
        yield from _beside_large_weights(path)


def _beside_large_weights(path: Path) -> Iterator[Row]:
    """A small piece of a model whose other weights take more than 2 GiB: time and memory, each in its own process."""
    write_graph(path, SIZES[0] // 10, types=True)
    _add_data_file(path)
    best: dict[str, list[float]] = {}
    for _ in range(ROUNDS_OF_PEER):
        for kind in ("peer", "ours"):
            spent, memory = _in_process(kind, path)
            before = best.get(kind, [spent, memory])
            best[kind] = [min(spent, before[0]), min(memory, before[1])]
    what = f"extract a block of a model with {size(LARGE)} of weights in a data file"
    yield against(what, "onnx.utils.extract_model", best["peer"][0], best["ours"][0])
    yield against(
        f"{what}, peak memory",
        "onnx.utils.extract_model",
        best["peer"][1],
        best["ours"][1],
        show=size,
    )


def _add_data_file(path: Path) -> None:
    """Give the model a weight of another module, in a file without contents that takes no room on disk."""
    data = path.with_name("weights.data")
    with data.open("wb") as file:
        file.truncate(LARGE)
    model = onnx.load(path)
    weight = model.graph.initializer.add(
        name="large", data_type=onnx.TensorProto.FLOAT, dims=[LARGE // 4]
    )
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", data.name), ("offset", "0"), ("length", str(LARGE))):
        weight.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


def _in_process(kind: str, path: Path) -> tuple[float, float]:
    """Seconds and bytes of a process that extracts once."""
    command = [sys.executable, "-m", "benchmarks.extracting", kind, str(path)]
    spent, memory = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    return float(spent), float(memory)


def extract_once(kind: str, path: Path) -> None:
    record = extract(path, block(1), path.with_name("out.onnx")).record
    if kind == "ours":
        spent = timed(extract, path, block(1), path.with_name("out.onnx"))
    else:
        ends = [value.name for value in record.inputs], [value.name for value in record.outputs]
        spent = timed(onnx.utils.extract_model, str(path), str(path.with_name("peer.onnx")), *ends)
    print(spent, peak_kib() << 10)


def _take_apart(path: Path) -> None:
    for _ in partition(path, "encoder"):
        pass


if __name__ == "__main__":
    extract_once(sys.argv[1], Path(sys.argv[2]))
