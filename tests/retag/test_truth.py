"""The map after real tools: complete, byte for byte what the tool wrote, and true by value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import modelexport
from architectures import ARCHITECTURES
from exports import cases, export
from modelexport.capture.inputs import bind_inputs, in_signature_order, parse_inputs
from modelexport.errors import ArgumentError
from modelexport.onnx_file import wire
from modelexport.verification.pytorch_run import match_inputs, random_input_sets
from modelexport.verification.runtime import Session
from retag.tools import FLOAT_TOOLS, INT_TOOLS, apply

Values = Mapping[str, np.ndarray]

QUICK = ("bert", "resnet")
SAME = 1e-3


def example_values(path: Path, model: Any, inputs: Any, strategy: str) -> tuple[Values, Values]:
    """Return the inputs to match on, and others to judge by, for a file."""
    bound = bind_inputs(model, parse_inputs(inputs))
    if strategy != "fx":
        bound = in_signature_order(model, bound)
    graph = onnx.load(path, load_external_data=False).graph
    try:
        other = random_input_sets(bound, 1, 3)[0]
    except ArgumentError:
        other = bound
    return match_inputs(graph, model, bound), match_inputs(graph, model, other)


def run_all(path: Path, inputs: Values) -> dict[str, np.ndarray]:
    """Return every value of the main graph of a file."""
    model = modelexport.load(path)
    names = [name for node in model.graph.nodes if node.enclosing < 0 for name in node.outputs]
    outputs = {value.name for value in model.proto.graph.output}
    feeds = inputs
    if not set(model.graph.inputs) <= set(inputs):
        feeds = dict(zip(model.graph.inputs, inputs.values(), strict=True))
    data = path.read_bytes()
    exposed = wire.with_outputs(data, [name for name in names if name not in outputs])
    return Session(b"".join(exposed), data_folder=path.parent).run(feeds)


def elements(array: np.ndarray) -> np.ndarray | None:
    """Return the sorted elements of a tensor that are not zero; None if they tell nothing."""
    if array.dtype.kind != "f":
        return None
    values = np.sort(array.reshape(-1).astype(np.float64))
    values = values[np.isfinite(values) & (values != 0)]
    return values if values.size > 1 and values[0] != values[-1] else None


def distance(first: np.ndarray, second: np.ndarray) -> float:
    scale = max(float(np.sqrt((second**2).mean())), 1e-12)
    return float(np.sqrt(((first - second) ** 2).mean())) / scale


def contradictions(original: Path, retagged: Path, inputs: Values) -> Iterator[str]:
    """Yield the nodes whose value is that of original nodes of other modules."""
    old, new = modelexport.load(original), modelexport.load(retagged)
    known: dict[int, list[tuple[str, np.ndarray, np.ndarray]]] = {}
    for name, array in run_all(original, inputs).items():
        values = elements(array)
        if values is not None and name in old.graph.producer:
            known.setdefault(values.size, []).append((name, values, array))
    found = run_all(retagged, inputs)
    for node, tag in new.items():
        values = elements(found[node.key]) if node.key in found else None
        if values is None:
            continue
        errors = []
        for name, other, array in known.get(values.size, ()):
            error = 1 + distance(values, other)
            if array.size == found[node.key].size:
                flat = found[node.key].reshape(-1).astype(np.float64)
                in_order = distance(
                    np.nan_to_num(flat, posinf=0, neginf=0),
                    np.nan_to_num(array.reshape(-1).astype(np.float64), posinf=0, neginf=0),
                )
                error = in_order if in_order <= SAME else error
            errors.append((error, name))
        best = min(errors, default=(9.0, ""))[0]
        if best > 1 + SAME or SAME < best < 1:
            continue
        base = 1 if best >= 1 else 0
        limit = base + max(3 * (best - base), 1e-6)
        owners = {
            old.effective_tags[old.graph.producer[name]].hierarchy_module
            for error, name in errors
            if error <= limit
        }
        assert tag is not None
        if tag.hierarchy_module not in owners:
            yield f"{node.op_type} {node.key}: {tag.hierarchy_module!r}, not one of {owners}"


@pytest.mark.parametrize(("name", "strategy"), cases(*ARCHITECTURES))
def test_architectures(name: str, strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export(name, strategy, tmp_path)
    matched, judged = example_values(path, model, inputs, strategy)
    handled = 0
    for tool in (*FLOAT_TOOLS, *INT_TOOLS):
        changed, out = tmp_path / f"{tool}.onnx", tmp_path / f"{tool}-tagged.onnx"
        if not apply(tool, path, changed, matched):
            continue
        handled += 1
        report = modelexport.retag(path, changed, out, inputs=matched)
        retagged = modelexport.load(out)
        assert all(tag is not None for tag in retagged.tags), tool
        assert report.nodes == len(retagged.tags)
        back = modelexport.strip(out, tmp_path / "back.onnx")
        assert back.read_bytes() == changed.read_bytes(), tool
        checks = modelexport.validate(out, check_consistency=True).checks
        assert checks == {
            "onnx": modelexport.validate(changed).checks["onnx"],  # not every tool sorts its nodes
            "tags": "passed",
            "consistency": "passed",
        }
        assert [*contradictions(path, out, judged)] == [], tool
    assert handled >= len(FLOAT_TOOLS)
