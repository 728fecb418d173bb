"""Truth without labels: by value, with all names hidden, and by the owner of a changed weight.

Each oracle is independent of the matching: it compares arrays pairwise, on inputs other than those
that `retag` ran on, or changes the original and runs the tool again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

import modelexport
from modelexport.capture.inputs import bind_inputs, in_signature_order, parse_inputs
from modelexport.errors import ArgumentError
from modelexport.onnx_file import wire
from modelexport.tagged.model import TaggedModel
from modelexport.verification.pytorch_run import match_inputs, random_input_sets
from modelexport.verification.runtime import Session
from retag.tools import apply, hide_names

Values = Mapping[str, np.ndarray]

SAME = 1e-3
"""The relative error of values that a float tool leaves unchanged."""
SIMILAR = 0.05
"""The relative error up to which a quantized value is recognised, after scaling and shifting."""
CLEARLY = 3
"""Other values are not the same if their error is so many times larger."""


class Judgement(NamedTuple):
    """How many nodes an oracle could judge, and those that it contradicts."""

    judged: int
    wrong: list[str]


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


def run_all(model: TaggedModel, inputs: Values) -> dict[str, np.ndarray]:
    """Return every value of the main graph of a file."""
    names = [name for node in model.graph.nodes if node.enclosing < 0 for name in node.outputs]
    outputs = {value.name for value in model.proto.graph.output}
    feeds = inputs
    if not set(model.graph.inputs) <= set(inputs):
        feeds = dict(zip(model.graph.inputs, inputs.values(), strict=True))
    data = model.path.read_bytes()
    exposed = wire.with_outputs(data, [name for name in names if name not in outputs])
    return Session(b"".join(exposed), data_folder=model.path.parent).run(feeds)


def owners(model: TaggedModel, names: Collection[str]) -> set[str]:
    """Return the modules of the nodes that produce some values."""
    tags = [model.effective_tags[model.graph.producer[name]] for name in names]
    return {tag.hierarchy_module for tag in tags if tag is not None}


def judge_by_value(original: Path, retagged: Path, inputs: Values) -> Judgement:
    """Judge the nodes of a retagged file whose value is one of the original."""
    tags = modelexport.load(retagged).tags
    return judge_modules(original, retagged, [tag and tag.hierarchy_module for tag in tags], inputs)


def judge_modules(
    original: Path, changed: Path, modules: Sequence[str | None], inputs: Values
) -> Judgement:
    """Judge the modules of nodes whose value is one of the original, in any order of elements."""
    old, new = modelexport.load(original), modelexport.load(changed)
    known: dict[int, list[tuple[str, np.ndarray, np.ndarray]]] = {}
    for name, array in run_all(old, inputs).items():
        values = _sorted_elements(array)
        if values is not None and name in old.graph.producer:
            known.setdefault(values.size, []).append((name, values, array))
    found = run_all(new, inputs)
    judged, wrong = 0, []
    for node, module in zip(new.graph.nodes, modules, strict=True):
        found_array = found.get(node.key)
        values = None if found_array is None else _sorted_elements(found_array)
        if module is None or found_array is None or values is None:
            continue
        candidates = known.get(values.size, ())
        in_order = [(_distance(found_array, other), name) for name, _, other in candidates]
        same = _best(in_order)
        if not same:
            same = _best([(_distance(values, other), name) for name, other, _ in candidates])
        if not same:
            continue
        judged += 1
        right = owners(old, same)
        if module not in right:
            wrong.append(f"{node.op_type} {node.key}: {module!r}, not one of {right}")
    return Judgement(judged, wrong)


def _sorted_elements(array: np.ndarray) -> np.ndarray | None:
    """Return the sorted elements of a tensor that are not zero; None if they are all equal."""
    if array.dtype.kind != "f":
        return None
    values = np.sort(array.reshape(-1).astype(np.float64))
    values = values[np.isfinite(values) & (values != 0)]
    return values if values.size > 1 and values[0] != values[-1] else None


def _distance(first: np.ndarray, second: np.ndarray) -> float:
    """Return the root of the mean squared difference, relative to the second."""
    if first.size != second.size:
        return np.inf
    a, b = (np.nan_to_num(x.reshape(-1).astype(float), posinf=0, neginf=0) for x in (first, second))
    scale = max(float(np.sqrt((b**2).mean())), 1e-12)
    return float(np.sqrt(((a - b) ** 2).mean())) / scale


def _best(errors: list[tuple[float, str]]) -> list[str]:
    least = min(errors, default=(np.inf, ""))[0]
    if least > SAME:
        return []
    return [name for error, name in errors if error <= max(CLEARLY * least, 1e-6)]


def judge_quantized(original: Path, retagged: Path, inputs: Values) -> Judgement:
    """Judge the nodes whose value is one of the original up to scale, shift and 8 bits."""
    old, new = modelexport.load(original), modelexport.load(retagged)
    known: dict[int, list[tuple[str, np.ndarray]]] = {}
    for name, array in run_all(old, inputs).items():
        values = _normalised(array) if array.dtype.kind == "f" else None
        if values is not None and name in old.graph.producer:
            known.setdefault(values.size, []).append((name, values))
    found = run_all(new, inputs)
    judged, wrong = 0, []
    for node, tag in new.items():
        values = _normalised(found[node.key]) if node.key in found else None
        if values is None:
            continue
        errors = [
            (float(np.sqrt(max(0.0, 1 - float(values @ other) ** 2))), name)
            for name, other in known.get(values.size, ())
        ]
        least = min(errors, default=(np.inf, ""))[0]
        limit = max(CLEARLY * least, SAME)
        modules = owners(old, [name for error, name in errors if error <= limit])
        if least > SIMILAR or len(modules) > CLEARLY:  # nothing stands out
            continue
        judged += 1
        assert tag is not None
        if tag.hierarchy_module not in modules:
            wrong.append(
                f"{node.op_type} {node.key}: {tag.hierarchy_module!r} ({tag.hierarchy_method}), "
                f"error {least:.3f} for {modules}"
            )
    return Judgement(judged, wrong)


def _normalised(array: np.ndarray) -> np.ndarray | None:
    """Return the elements with mean 0 and norm 1; None if they are too few, or all equal."""
    if array.dtype.kind not in "fiu" or array.size < 4:
        return None
    values = np.nan_to_num(array.reshape(-1).astype(float), posinf=0, neginf=0)
    values -= values.mean()
    norm = float(np.sqrt((values**2).sum()))
    return values / norm if norm > 1e-9 else None


def judge_without_names(original: Path, changed: Path, inputs: Values, folder: Path) -> Judgement:
    """Hide all names of a changed file, and compare with what the names say."""
    hidden, out = folder / "hidden.onnx", folder / "hidden-tagged.onnx"
    onnx.save(hide_names(onnx.load(changed)), hidden)
    modelexport.retag(original, hidden, out, inputs=inputs)
    old, named, new = (modelexport.load(path) for path in (original, changed, out))
    judged, wrong = 0, []
    for node, tag in zip(named.graph.nodes, new.tags, strict=True):
        origin = old.graph.producer.get(node.key)
        if origin is None or old.graph.nodes[origin].op_type != node.op_type:
            continue
        judged += 1
        (says,) = owners(old, [node.key])
        assert tag is not None
        if tag.hierarchy_module != says:
            wrong.append(f"{node.op_type} {node.key}: {tag.hierarchy_module!r}, not {says!r}")
    return Judgement(judged, wrong)


def judge_by_weight(
    tool: str, original: Path, changed: Path, retagged: Path, inputs: Values, seed: int
) -> Judgement:
    """Change one weight, run the tool again, and judge the nodes that consume changed data."""
    old, new = modelexport.load(original), modelexport.load(retagged)
    model = onnx.load(original)
    weights = [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
        and int(np.prod(tensor.dims)) > 1
        and old.graph.consumers.get(tensor.name)
    ]
    if not weights:
        return Judgement(0, [])
    random = np.random.default_rng(seed)
    weight = weights[int(random.integers(len(weights)))]
    array = numpy_helper.to_array(weight)
    noise = 1 + 0.3 * random.standard_normal(array.shape)
    weight.CopyFrom(numpy_helper.from_array((array * noise).astype(array.dtype), weight.name))
    source, again = changed.with_name("weight.onnx"), changed.with_name("again.onnx")
    onnx.save(model, source)
    if not apply(tool, source, again, inputs):
        return Judgement(0, [])
    tags = (old.effective_tags[index] for index in old.graph.consumers[weight.name])
    right = {tag.hierarchy_module for tag in tags if tag is not None}
    judged, wrong = 0, []
    by_output = dict(zip((node.key for node in new.graph.nodes), new.tags, strict=True))
    for output, names in _changed_inputs(changed, again, weight.name):
        tag = by_output[output]
        judged += 1
        assert tag is not None
        if not right & {tag.hierarchy_module, *tag.hierarchy_covers}:
            wrong.append(f"{output}: {tag.hierarchy_module!r} consumes {names}, of {right}")
    return Judgement(judged, wrong)


def _changed_inputs(first: Path, second: Path, weight: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the nodes of a file that consume constants which differ in another run of the tool."""
    a, b = onnx.load(first), onnx.load(second)
    stored_a, stored_b = _constants(a), _constants(b)
    by_output = {node.output[0]: node for node in b.graph.node if node.output}
    for position, node in enumerate(a.graph.node):
        if not node.output or len(a.graph.node) != len(b.graph.node):
            continue
        # Some tools do not write equal nodes in the same order, others draw names.
        twin = by_output.get(node.output[0], b.graph.node[position])
        names = [
            name
            for name, other in zip(node.input, twin.input, strict=False)
            if name in stored_a
            and other in stored_b
            and _is_weight(stored_a[name], name, weight)
            and stored_a[name].tobytes() != stored_b[other].tobytes()
        ]
        if names:
            yield node.output[0], names


def _is_weight(array: np.ndarray, name: str, weight: str) -> bool:
    """Return whether a constant is data of a weight, not a size or the scale of an activation."""
    # A quantized bias has the scale of the activation, which changes with any weight before it.
    return array.size > 1 and (array.dtype.name not in ("int32", "int64") or weight in name)


def _constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and not node.input:
                constants[node.output[0]] = numpy_helper.to_array(attribute.t)
    return constants
