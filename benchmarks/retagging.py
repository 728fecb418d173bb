"""Measure retag: what it restores after three tools, and its cost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx

import modelexport
from architectures import ARCHITECTURES
from benchmarks.models import bert
from benchmarks.reading import SIZES, measure_seconds, write_files
from benchmarks.table import Row, growth_row, ratio_row
from exports import build
from modelexport.tagged.model import TaggedModel
from modelexport.verification.runtime import Session
from retag.oracles import Values, example_values, judge_modules
from retag.tools import apply

TOOLS = {
    "ort-all": "ONNX Runtime's optimiser",
    "int8-dynamic": "quantize_dynamic",
    "onnxslim": "onnxslim",
}
WAYS = ("doc_string", "names", "retag")
ROUNDS = 3
AIM, AIM_GROWTH, AIM_RUN = 5.0, 12.0, 1.0


class Counts(NamedTuple):
    """Nodes of changed files, those with a module, and those whose module the values contradict."""

    nodes: int
    known: int
    wrong: int


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    yield from _cost_rows()
    yield from _base_rows()
    yield from _coverage_rows()


def _cost_rows() -> Iterator[Row]:
    times: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for nodes in SIZES:
            files = write_files(Path(folder), nodes)
            for kind in ("stripped", "renamed"):
                paths = files["tagged"], files[kind]
                out = Path(folder) / "out.onnx"
                loads, runs = [], []
                for _ in range(ROUNDS):
                    loads.append(sum(measure_seconds(onnx.load, path) for path in paths))
                    runs.append(
                        measure_seconds(lambda: modelexport.retag(*paths, out, run=False))  # noqa: B023
                    )
                what = f"retag --no-run, {'names kept' if kind == 'stripped' else 'all renamed'}"
                times.setdefault(what, {})[nodes] = min(runs)
                aim = AIM if kind == "stripped" else None
                yield ratio_row(f"{what}, {nodes:,} nodes", "onnx.load of both", loads, runs, aim)
    for what, seconds in times.items():
        yield growth_row(what, "nodes", seconds, AIM_GROWTH)


def _base_rows() -> Iterator[Row]:
    """Compare retag on a BERT base with loading and running both files."""
    with tempfile.TemporaryDirectory() as folder:
        path, changed = Path(folder) / "base.onnx", Path(folder) / "optimized.onnx"
        model, inputs = bert("bert-base")
        modelexport.export_model(model, inputs, path, strategy="htp")
        names = modelexport.load(path).graph.inputs
        feeds = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        assert apply("ort-all", path, changed, feeds)
        runs, retags = [], []
        for number in range(ROUNDS):
            runs.append(
                sum(measure_seconds(_load_and_run, file, feeds) for file in (path, changed))
            )
            out = Path(folder) / f"out{number}.onnx"
            retags.append(
                measure_seconds(lambda: modelexport.retag(path, changed, out, inputs=feeds))  # noqa: B023
            )
            out.unlink()
        yield ratio_row(
            "retag, bert-base after ONNX Runtime's optimiser",
            "loading and running both files",
            runs,
            retags,
            AIM_RUN,
        )


def _load_and_run(path: Path, feeds: Values) -> None:
    Session(path).run(feeds)


def _coverage_rows() -> Iterator[Row]:
    totals = {(tool, way): Counts(0, 0, 0) for tool in TOOLS for way in WAYS}
    files = dict.fromkeys(TOOLS, 0)
    for architecture in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            model, inputs = build(architecture, "fx")
            modelexport.export_model(model, inputs, path, strategy="fx")
            matched, others = example_values(path, model, inputs, "fx")
            for tool in TOOLS:
                changed = Path(folder) / "changed.onnx"
                if apply(tool, path, changed, matched):
                    files[tool] += 1
                    for way, counts in count_ways(path, changed, matched, others).items():
                        added = np.add(totals[tool, way], counts)
                        totals[tool, way] = Counts(*added.tolist())
    for tool, name in TOOLS.items():
        doc_string, names, ours = (totals[tool, way] for way in WAYS)
        yield Row(
            f"nodes with a module after {name}, {files[tool]} architectures, dynamo",
            f"doc_string only {_share(doc_string)}; names only {_share(names)}",
            f"retag {_share(ours)}",
            f"ours, {ours.known - names.known:,} more than names",
        )


def count_ways(original: Path, changed: Path, matched: Values, others: Values) -> dict[str, Counts]:
    """Count what the surviving doc_strings, the names, and retag know of a changed file."""
    out = changed.with_name("out.onnx")
    modelexport.retag(original, changed, out, inputs=matched)
    found = (
        _modules(modelexport.load(changed)),
        modules_by_name(modelexport.load(original), modelexport.load(changed)),
        _modules(modelexport.load(out)),
    )
    return {
        way: Counts(
            len(modules),
            sum(module is not None for module in modules),
            len(judge_modules(original, changed, modules, others).wrong),
        )
        for way, modules in zip(WAYS, found, strict=True)
    }


def _modules(model: TaggedModel) -> list[str | None]:
    return [None if tag is None else tag.hierarchy_module for tag in model.tags]


def modules_by_name(old: TaggedModel, new: TaggedModel) -> Sequence[str | None]:
    """Return the module of the original node with the same output, or the same name."""
    by_name = {node.name: index for index, node in enumerate(old.graph.nodes) if node.name}
    modules: list[str | None] = []
    for node in new.graph.nodes:
        index = old.graph.producer.get(node.key, by_name.get(node.name))
        tag = None if index is None else old.effective_tags[index]
        modules.append(None if tag is None else tag.hierarchy_module)
    return modules


def _share(counts: Counts) -> str:
    wrong = f", {counts.wrong} wrong" if counts.wrong else ", none wrong"
    return f"{counts.known:,} of {counts.nodes:,} ({counts.known / counts.nodes:.1%}){wrong}"
