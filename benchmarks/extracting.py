"""Compare extracting one module with `onnx.load` and with `onnx.utils.extract_model`.

onnx's extractor is given the names of the module's inputs and outputs, which `extract` finds.
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
from benchmarks.reading import measure_seconds, peak_memory_kib
from benchmarks.shares import profile_row
from benchmarks.table import Row, format_size, growth_row, ratio_row
from modelexport.extraction.extract import extract, list_modules
from modelexport.extraction.partition import partition

SIZES = (10_000, 100_000)
ROUNDS, ROUNDS_OF_PEER = 5, 2
LARGE = 9 << 28
AIM, AIM_GROWTH = 2.0, 12.0


def block_path(number: int) -> str:
    """Return the module path of a block by its index."""
    return f"encoder.{number // BLOCKS_A_STAGE}.{number % BLOCKS_A_STAGE}"


class Times(NamedTuple):
    """The times of loading the file, of ours, and of onnx's extractor, in each round.

    `unchecked` is the extractor without ONNX's checker and, if the file has all types, without type
    inference.
    """

    load: list[float]
    ours: list[float]
    peer: list[float]
    unchecked: list[float]

    def ratio_to(self, peer: str) -> float:
        """Return the ratio of our best time to that of a peer."""
        return min(self.ours) / min(getattr(self, peer))


def measure(path: Path, module: str, types: bool) -> Times:
    """Measure the extraction of one module."""
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
                spent.append(measure_seconds(work))
    theirs = onnx.load(peer_out)
    if len(theirs.graph.node) != record.nodes + len(record.pulled_in):
        raise RuntimeError(
            f"the extractors disagree: {len(theirs.graph.node)} nodes, {record.nodes} ours"
        )
    return Times(*times.values())


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.onnx"
        middle: dict[int, float] = {}
        for kind, types in (("", True), (" without types", False)):
            for nodes in SIZES:
                write_graph(path, nodes, types)
                last = nodes // BLOCK - 1
                times = [
                    measure(path, block_path(number), types) for number in (0, last // 2, last)
                ]
                if types:
                    middle[nodes] = min(times[1].ours)
                what = f"extract one of {nodes // BLOCK:,} blocks, {nodes:,} nodes{kind}"
                worst = max(times, key=lambda time: time.ratio_to("load"))
                yield ratio_row(what, "onnx.load", worst.load, worst.ours, AIM)
                if nodes == SIZES[-1] and worst.ratio_to("load") > AIM:
                    out = path.with_name("out.onnx")
                    yield profile_row(what, partial(extract, path, block_path(last), out))
                worst = max(times, key=lambda time: time.ratio_to("peer"))
                yield ratio_row(what, "onnx.utils.extract_model", worst.peer, worst.ours)
                worst = max(times, key=lambda time: time.ratio_to("unchecked"))
                yield ratio_row(
                    what, "onnx.utils.extract_model without checks", worst.unchecked, worst.ours
                )
        yield growth_row("extract a block in the middle", "nodes", middle, AIM_GROWTH)
        for name, work in (
            ("extract --list", list_modules),
            ("partition of the encoder", _partition),
        ):
            times = {}
            for nodes in SIZES:
                write_graph(path, nodes, types=True)
                times[nodes] = measure_seconds(work, path)
            yield growth_row(name, "nodes", times)
        yield from _large_data_file_rows(path)


def _large_data_file_rows(path: Path) -> Iterator[Row]:
    """Measure time and memory of a small module in a model with more than 2 GiB of other data."""
    write_graph(path, SIZES[0] // 10, types=True)
    _add_data_file(path)
    peer, ours = zip(
        *(
            [_measure_in_process(kind, path) for kind in ("peer", "ours")]
            for _ in range(ROUNDS_OF_PEER)
        ),
        strict=True,
    )
    what = f"extract a block of a model with {format_size(LARGE)} of initializers in a data file"
    seconds, memory = zip(zip(*peer, strict=True), zip(*ours, strict=True), strict=True)
    yield ratio_row(what, "onnx.utils.extract_model", *seconds)
    yield ratio_row(f"{what}, peak memory", "onnx.utils.extract_model", *memory, show=format_size)


def _add_data_file(path: Path) -> None:
    """Add an initializer in a sparse data file, which takes no space on disk."""
    data = path.with_name("weights.data")
    with data.open("wb") as file:
        file.truncate(LARGE)
    model = onnx.load(path)
    tensor = model.graph.initializer.add(
        name="large", data_type=onnx.TensorProto.FLOAT, dims=[LARGE // 4]
    )
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", data.name), ("offset", "0"), ("length", str(LARGE))):
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


def _measure_in_process(kind: str, path: Path) -> tuple[float, float]:
    """Return the seconds and bytes of a process that extracts once."""
    command = [sys.executable, "-m", "benchmarks.extracting", kind, str(path)]
    spent, memory = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    return float(spent), float(memory)


def extract_once(kind: str, path: Path) -> None:
    """Child process: extract once, and print seconds and bytes."""
    record = extract(path, block_path(1), path.with_name("out.onnx")).record
    if kind == "ours":
        spent = measure_seconds(extract, path, block_path(1), path.with_name("out.onnx"))
    else:
        ends = [value.name for value in record.inputs], [value.name for value in record.outputs]
        spent = measure_seconds(
            onnx.utils.extract_model, str(path), str(path.with_name("peer.onnx")), *ends
        )
    print(spent, peak_memory_kib() << 10)


def _partition(path: Path) -> None:
    for _ in partition(path, "encoder"):
        pass


if __name__ == "__main__":
    extract_once(sys.argv[1], Path(sys.argv[2]))
