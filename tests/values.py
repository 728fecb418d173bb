"""The values of a model in PyTorch, by module, and of its file in ONNX Runtime, by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from modelexport.capture.hooks import flatten_leaves, flatten_tensors
from modelexport.capture.inputs import parse_inputs
from modelexport.capture.module_tree import read_module_tree


@dataclass
class Returned:
    """The floating-point tensors that one call of a module was given and returned."""

    taken: list[np.ndarray]
    given: list[np.ndarray]
    results: list[np.ndarray | None]
    """All tensors that it returned, of whatever type; None for a number."""


def names(values: Any) -> list[str]:
    """Return the names of inputs or outputs, of a file, a session or a report."""
    return [value.name for value in values]


def floats(value: object) -> list[np.ndarray]:
    """Copy the floating-point tensors in a nested value."""
    tensors = [t.detach() for t in flatten_tensors(value) if isinstance(t, torch.Tensor)]
    return [t.float().numpy().copy() for t in tensors if t.is_floating_point() and t.numel()]


def pytorch_values(model: nn.Module, example_inputs: Any) -> dict[str, list[Returned]]:
    """Run the model once and keep what each module returned, by module path and call."""
    inputs = parse_inputs(example_inputs)
    values: dict[str, list[Returned]] = {}
    unfinished: list[tuple[str, int]] = []
    handles = []
    try:
        for path in read_module_tree(model):

            def begin(module: nn.Module, args: Any, path: str = path) -> None:
                values.setdefault(path, []).append(Returned([], [], []))
                unfinished.append((path, len(values[path]) - 1))

            def keep(
                module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path
            ) -> None:
                called, number = unfinished.pop()
                while called != path:  # it ended in an error that the model caught
                    called, number = unfinished.pop()
                results = [
                    t.detach().numpy().copy() if isinstance(t, torch.Tensor) else None
                    for t in flatten_leaves(output)
                ]
                values[path][number] = Returned(floats((args, kwargs)), floats(output), results)

            module = model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(begin, prepend=True))
            handles.append(module.register_forward_hook(keep, with_kwargs=True))
        training = [(module, module.training) for module in model.modules()]
        model.eval()
        with torch.no_grad(), warnings.catch_warnings(), eager_conditions():
            warnings.simplefilter("ignore")
            model(*copy.deepcopy(inputs.args), **copy.deepcopy(inputs.kwargs))
        for module, was in training:
            module.training = was
    finally:
        for handle in handles:
            handle.remove()
    return values


@contextmanager
def eager_conditions() -> Iterator[None]:
    """Run only the branch that `torch.cond` selects, so that hooks see its modules."""
    original = torch.cond
    torch.cond = lambda pred, yes, no, operands=(): (yes if pred else no)(*operands)
    try:
        yield
    finally:
        torch.cond = original


def onnx_values(path: Path, example_inputs: Any) -> dict[str, np.ndarray]:
    """Run a file unoptimised and return all values, with the keys of `modelexport.graph.flat`."""
    proto = onnx.load(path)
    inputs = parse_inputs(example_inputs)
    given = [
        t.detach().numpy() for t in flatten_tensors((inputs.args, list(inputs.kwargs.values())))
    ]
    initializers = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer
    }
    names = [value.name for value in proto.graph.input if value.name not in initializers]
    feeds = _match_feeds(proto, names, inputs, given)
    values = _run(proto, feeds)
    keys = {name: name for name in values}
    while (node := _branch_to_inline(proto)) is not None:
        condition = {**initializers, **feeds, **values}[node.input[0]]
        taken = bool(np.asarray(condition).reshape(-1)[0])
        key = keys.get(node.output[0], node.output[0])
        keys.update(_inline(proto, node, key, "then_branch" if taken else "else_branch"))
        values = _run(proto, feeds)
    everything = {**initializers, **feeds, **values}
    return {keys.get(name, name): value for name, value in everything.items()}


def _match_feeds(
    proto: onnx.ModelProto, names: list[str], inputs: Any, given: list[np.ndarray]
) -> dict[str, np.ndarray]:
    """Match inputs by name, else by position, else by shape: exporters may drop unused ones."""
    by_name = {
        name: value.numpy()
        for name, value in inputs.kwargs.items()
        if isinstance(value, torch.Tensor)
    }
    if names and all(name in by_name for name in names):
        return {name: by_name[name] for name in names}
    if len(names) == len(given):
        return dict(zip(names, given, strict=True))
    feeds: dict[str, np.ndarray] = {}
    remaining = list(given)
    for value in proto.graph.input:
        shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        fit = next(i for i, array in enumerate(remaining) if array.shape == shape)
        feeds[value.name] = remaining.pop(fit)
    return feeds


def _run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a model with every value of its main graph as an output."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(proto)
    present = {value.name for value in exposed.graph.output}
    for node in exposed.graph.node:
        for name in node.output:
            if name and name not in present:
                exposed.graph.output.append(onnx.ValueInfoProto(name=name))
                present.add(name)
    session = open_session(exposed.SerializeToString(), optimize=False)
    outputs = [value.name for value in session.get_outputs()]
    results = session.run(outputs, feeds)
    return {
        name: value
        for name, value in zip(outputs, results, strict=True)
        if isinstance(value, np.ndarray)
    }


def open_session(model: bytes | str, optimize: bool = True) -> onnxruntime.InferenceSession:
    """Open a quiet session with one thread: more only wait for each other on small models."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _branch_to_inline(proto: onnx.ModelProto) -> onnx.NodeProto | None:
    for node in proto.graph.node:
        if {attribute.name for attribute in node.attribute} >= {"then_branch", "else_branch"}:
            return node
    return None


def _inline(proto: onnx.ModelProto, node: onnx.NodeProto, key: str, branch: str) -> dict[str, str]:
    """Replace a conditional by the nodes of a branch; return the keys of their values."""
    subgraph = next(attribute.g for attribute in node.attribute if attribute.name == branch)
    prefix = f"{key}/{branch}/"
    index = list(proto.graph.node).index(node)
    nodes = list(subgraph.node)
    for result, outer in zip(subgraph.output, node.output, strict=True):
        nodes.append(onnx.helper.make_node("Identity", [result.name], [outer]))
    before, after = list(proto.graph.node)[:index], list(proto.graph.node)[index + 1 :]
    proto.graph.initializer.extend(subgraph.initializer)
    del proto.graph.node[:]
    proto.graph.node.extend([*before, *nodes, *after])
    return {name: prefix + name for inner in subgraph.node for name in inner.output}


def found(tensor: np.ndarray, names: list[str], values: dict[str, np.ndarray]) -> bool:
    """Return whether a tensor is among the named values."""
    return any(same(tensor, values[name]) for name in names if name in values)


_SAMPLE = 1024


def _sample(values: np.ndarray) -> np.ndarray:
    """Return some values from all over an array: they are quicker to compare than all."""
    return values.reshape(-1)[:: values.size // _SAMPLE + 1]


def same(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if first.shape != second.shape or second.dtype.kind != "f":
        return False
    if first.size > _SAMPLE and not same(_sample(first), _sample(second)):
        return False
    absolute = 1e-4 * max(1.0, float(np.nanmax(np.abs(first), initial=0.0)))
    return np.allclose(first, second.astype(np.float32), rtol=2e-3, atol=absolute, equal_nan=True)
