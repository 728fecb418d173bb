"""The proof that a map is true: PyTorch's values against ONNX Runtime's, module by module.

`prove` exports a model and checks every promise of the map on it. Its heart is the value test:
the tensors that each module returns in PyTorch are looked for among the tensors that the nodes
of this module read and write in ONNX Runtime. Beside it, the module of every node is compared with
the scope that torch's exporter itself recorded.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

import modelexport
from modelexport.capture.inputs import parse_inputs
from modelexport.capture.module_tree import read_module_tree
from modelexport.capture.recorder import flatten_leaves, flatten_tensors
from modelexport.modules.tree import is_within
from modelexport.tagged.model import TaggedModel
from scopes import RecordedScopes, differences, recorded_scopes


@dataclass
class Returned:
    """What one call of a module took and gave back, floating-point tensors only."""

    taken: list[np.ndarray]
    given: list[np.ndarray]
    results: list[np.ndarray | None]
    """All tensors that it gave back, of whatever type; None for a number."""


@dataclass
class Verdict:
    """The outcome of the value test for one model."""

    checked: int = 0
    gone: int = 0
    """Tensors that no node computes: the exporter fused or folded them away."""
    results: int = 0
    failures: list[str] = field(default_factory=list)
    reshaped: bool = False
    """Whether a value counts as found in another shape: an exporter merges a last reshape with the next module's."""


def floats(value: object) -> list[np.ndarray]:
    found = [t.detach() for t in flatten_tensors(value) if isinstance(t, torch.Tensor)]
    return [t.float().numpy().copy() for t in found if t.is_floating_point() and t.numel()]


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
                while (call := unfinished.pop())[
                    0
                ] != path:  # cut short by an error that the model caught
                    pass
                results = [
                    t.detach().numpy().copy() if isinstance(t, torch.Tensor) else None
                    for t in flatten_leaves(output)
                ]
                values[path][call[1]] = Returned(floats((args, kwargs)), floats(output), results)

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
    """Let `torch.cond` simply choose, so that hooks see the modules of the branch it takes."""
    original = torch.cond
    torch.cond = lambda pred, yes, no, operands=(): (yes if pred else no)(*operands)
    try:
        yield
    finally:
        torch.cond = original


def onnx_values(path: Path, example_inputs: Any) -> dict[str, np.ndarray]:
    """Run the file with every tensor exposed and optimisation off; keys as in `modelexport.graph.flat`."""
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
    values = _run(proto, feeds, path.parent)
    keys = {name: name for name in values}
    while (found := _branch_to_inline(proto)) is not None:
        condition = {**initializers, **feeds, **values}[found.input[0]]
        node, taken = found, bool(np.asarray(condition).reshape(-1)[0])
        keys.update(_inline(proto, node, "then_branch" if taken else "else_branch"))
        values = _run(proto, feeds, path.parent)
    everything = {**initializers, **feeds, **values}
    return {keys.get(name, name): value for name, value in everything.items()}


def _match_feeds(
    proto: onnx.ModelProto, names: list[str], inputs: Any, given: list[np.ndarray]
) -> dict[str, np.ndarray]:
    """By name where the names are the model's own, else by position (an exporter may drop unused inputs)."""
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


def _run(
    proto: onnx.ModelProto, feeds: dict[str, np.ndarray], folder: Path
) -> dict[str, np.ndarray]:
    exposed = onnx.ModelProto()
    exposed.CopyFrom(proto)
    present = {value.name for value in exposed.graph.output}
    for node in exposed.graph.node:
        for name in node.output:
            if name and name not in present:
                exposed.graph.output.append(onnx.ValueInfoProto(name=name))
                present.add(name)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        exposed.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    outputs = [value.name for value in session.get_outputs()]
    results = session.run(outputs, feeds)
    return {
        name: value
        for name, value in zip(outputs, results, strict=True)
        if isinstance(value, np.ndarray)
    }


def _branch_to_inline(proto: onnx.ModelProto) -> onnx.NodeProto | None:
    for node in proto.graph.node:
        if {attribute.name for attribute in node.attribute} >= {"then_branch", "else_branch"}:
            return node
    return None


def _inline(proto: onnx.ModelProto, node: onnx.NodeProto, branch: str) -> dict[str, str]:
    """Put a branch's nodes in place of the conditional; returns the keys of the tensors brought up."""
    body = next(attribute.g for attribute in node.attribute if attribute.name == branch)
    prefix = f"{node.output[0]}/{branch}/"
    place = list(proto.graph.node).index(node)
    nodes = list(body.node)
    for result, outer in zip(body.output, node.output, strict=True):
        nodes.append(onnx.helper.make_node("Identity", [result.name], [outer]))
    before, after = list(proto.graph.node)[:place], list(proto.graph.node)[place + 1 :]
    proto.graph.initializer.extend(body.initializer)
    del proto.graph.node[:]
    proto.graph.node.extend([*before, *nodes, *after])
    return {name: prefix + name for inner in body.node for name in inner.output}


def value_test(
    exported: TaggedModel,
    returned: dict[str, list[Returned]],
    values: dict[str, np.ndarray],
    reshaped: bool = False,
) -> Verdict:
    """Look for every returned tensor among the tensors of the module's nodes, by module and by tag.

    A module's nodes are those that it or a module below it owns, and those that cover one of them. A module
    that is called absorbed has none of its own, so what it made is at a node that covers it, or nowhere.
    """
    verdict = Verdict(reshaped=reshaped)
    records = exported.modules
    carried = {path: _carried(records, path) for path in records}
    by_module = _tensors_by(
        exported, lambda tag: {p for path in _modules(tag) for p in _dotted_prefixes(path)}
    )
    by_tag = _tensors_by(
        exported, lambda tag: {p for path in _modules(tag) for p in _tag_prefixes(carried[path])}
    )
    by_call = _tensors_by(exported, lambda tag: [(tag.hierarchy_module, tag.hierarchy_call)])
    covering = {
        path for _, tag in exported.items() if tag is not None for path in tag.hierarchy_covers
    }
    owners = {tag.hierarchy_module for _, tag in exported.items() if tag is not None}
    constant = {name for node, _ in exported.items() if not node.inputs for name in node.outputs}
    constant.update(exported.graph.initializers)
    computed = [name for name in values if name not in constant]
    folded = [name for name in values if name in constant]
    for path, calls in returned.items():
        record = records[path]
        if record.status == "unused":
            verdict.failures.append(f"{path!r} ran, but is called unused")
            continue
        if record.status == "absorbed" and any(is_within(owner, path) for owner in owners):
            verdict.failures.append(f"{path!r} is called absorbed, but has nodes")
        made = [tensor for call in calls for tensor in _made(call)]
        # What the exporter folded into a constant may be computed by another module as well.
        made = [tensor for tensor in made if not found(tensor, folded, values)]
        if not any(
            name for names in record.results for name in names
        ):  # nothing reads it, so it is not in the file
            others = [
                calls
                for other, calls in returned.items()
                if not is_within(path, other) and other != path
            ]
            alike = [tensor for calls in others for call in calls for tensor in _made(call)]
            made = [tensor for tensor in made if not any(same(tensor, other) for other in alike)]
        _check_module(
            verdict, f"{path!r} by module", made, by_module.get(path, []), computed, values
        )
        if record.tag is not None:
            _check_module(
                verdict, f"{path!r} by tag", made, by_tag.get(record.tag, []), computed, values
            )
        if not record.children and record.calls == len(calls) > 1 and path not in covering:
            for number, call in enumerate(calls):
                others = [tensor for other in calls if other is not call for tensor in other.given]
                _check_number(
                    verdict,
                    f"{path!r} call {number}",
                    [
                        tensor
                        for tensor in _made(call)
                        if not any(same(tensor, other) for other in others)
                    ],
                    by_call.get((path, number), []),
                    by_module.get(path, []),
                    values,
                )
    return verdict


def _modules(tag: Any) -> tuple[str, ...]:
    return (tag.hierarchy_module, *tag.hierarchy_covers)


def _carried(records: Any, path: str) -> str:
    """The tag of a module, or of the nearest shown one above it."""
    while records[path].tag is None:
        path = path.rpartition(".")[0]
    return records[path].tag


def _made(call: Returned) -> list[np.ndarray]:
    """What the module made itself: a tensor that it was given and hands on is not its work."""
    return [tensor for tensor in call.given if not any(same(tensor, other) for other in call.taken)]


def _check_module(
    verdict: Verdict,
    place: str,
    made: list[np.ndarray],
    names: list[str],
    computed: list[str],
    values: dict[str, np.ndarray],
) -> None:
    """A module passes when each tensor that it made, and that is still in the graph, is at its nodes."""
    missing = [tensor for tensor in made if not found(tensor, names, values)]
    verdict.checked += len(made)
    if verdict.reshaped:
        flat = {name: values[name].reshape(-1) for name in names if name in values}
        missing = [tensor for tensor in missing if not found(tensor.reshape(-1), names, flat)]
    misplaced = [tensor for tensor in missing if found(tensor, computed, values)]
    if misplaced:
        verdict.failures.append(
            f"{place}: {len(misplaced)} of {len(made)} tensors are at other modules' nodes"
        )
    verdict.gone += len(missing) - len(misplaced)


def _check_number(
    verdict: Verdict,
    place: str,
    made: list[np.ndarray],
    names: list[str],
    all_names: list[str],
    values: dict[str, np.ndarray],
) -> None:
    """What only one of several calls made is at the nodes of that call, not of another."""
    for tensor in made:
        if found(tensor, all_names, values) and not found(tensor, names, values):
            verdict.failures.append(f"{place}: its result is at the nodes of another call")


def check_results(
    exported: TaggedModel, returned: dict[str, list[Returned]], values: dict[str, np.ndarray]
) -> int:
    """Where the record says under which name a module's result is in the file, that tensor has its value."""
    checked = 0
    for path, calls in returned.items():
        recorded = exported.modules[path].results
        assert len(recorded) in (0, len(calls)), (
            f"{path!r}: {len(recorded)} results for {len(calls)} calls"
        )
        for number, (names, call) in enumerate(zip(recorded, calls, strict=False)):
            assert not path or len(names) == len(call.results), (
                f"{path!r}: {names} for {len(call.results)} results"
            )
            for name, tensor in zip(names, call.results, strict=False):
                if (
                    name is not None
                    and tensor is not None
                    and (path or len(names) == len(call.results))
                ):
                    place = f"{path!r} call {number}: {name} is not what the module returned"
                    there = values[name]
                    assert there.shape == tensor.shape, (
                        f"{place}: {there.shape}, not {tensor.shape}"
                    )
                    assert (
                        same(tensor, there)
                        if tensor.dtype.kind == "f"
                        else np.array_equal(tensor, there)
                    ), place
                    checked += 1
    return checked


def found(tensor: np.ndarray, names: list[str], values: dict[str, np.ndarray]) -> bool:
    return any(same(tensor, values[name]) for name in names if name in values)


_SAMPLE = 1024


def _sample(values: np.ndarray) -> np.ndarray:
    """Some values from all over an array: comparing them first is quicker than comparing all."""
    return values.reshape(-1)[:: values.size // _SAMPLE + 1]


def same(first: np.ndarray, second: np.ndarray) -> bool:
    if first.shape != second.shape or second.dtype.kind != "f":
        return False
    if first.size > _SAMPLE and not same(_sample(first), _sample(second)):
        return False
    absolute = 1e-4 * max(1.0, float(np.nanmax(np.abs(first), initial=0.0)))
    return np.allclose(first, second.astype(np.float32), rtol=2e-3, atol=absolute, equal_nan=True)


def _tensors_by(exported: TaggedModel, prefixes: Any) -> dict[str, list[str]]:
    groups: dict[str, dict[str, None]] = {}
    for node, tag in exported.items():
        if tag is not None:
            for prefix in prefixes(tag):
                groups.setdefault(prefix, {}).update(dict.fromkeys((*node.inputs, *node.outputs)))
    return {prefix: list(names) for prefix, names in groups.items()}


def _dotted_prefixes(path: str) -> Iterator[str]:
    yield ""
    parts = path.split(".") if path else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _tag_prefixes(tag: str) -> Iterator[str]:
    parts = tag.split("/")
    for end in range(2, len(parts) + 1):
        yield "/".join(parts[:end])


def plain_export(
    model: nn.Module, example_inputs: Any, path: Path, exporter: str, **options: Any
) -> None:
    """The baseline as anyone would write it, with nothing of ours.

    Where the tracer cannot pass keywords, or would make inputs of the numbers that forward has as
    defaults, the model is called by position, as people do. Where it fails with gradients, it is
    done without.
    """
    named = isinstance(example_inputs, dict)
    args = (
        () if named else example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    )
    if args and isinstance(args[-1], dict):
        args = (*args, {})  # else torch takes it for keywords
    options = {"dynamo": exporter == "dynamo", "verbose": False, **options}
    names = (
        [name for name, value in example_inputs.items() if isinstance(value, torch.Tensor)]
        if named
        else []
    )
    if named:
        options |= {"kwargs": example_inputs, "input_names": names}
    if named and exporter == "torchscript":  # which goes by the order of forward's arguments
        rank = list(inspect.signature(model.forward).parameters)
        options["input_names"] = sorted(names, key=lambda name: (*rank, name).index(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        defaults = [item.default for item in inspect.signature(model.forward).parameters.values()]
        numbers = any(
            isinstance(value, int | float) and not isinstance(value, bool) for value in defaults
        )
        try:
            if named and numbers and exporter == "torchscript":
                raise TypeError
            try:
                torch.onnx.export(model, args, str(path), **options)
            except torch.onnx.OnnxExporterError:
                with torch.no_grad():
                    torch.onnx.export(model, args, str(path), **options)
        except TypeError:
            forward = model.forward
            options["input_names"] = names
            model.forward = lambda *tensors: forward(**dict(zip(names, tensors, strict=True)))
            try:
                torch.onnx.export(
                    model, tuple(options.pop("kwargs").values()), str(path), **options
                )
            finally:
                del model.forward


def strip_bytes(path: Path) -> bytes:
    target = path.with_name("stripped.onnx")
    modelexport.strip(path, target)
    return target.read_bytes()


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def check_map(exported: TaggedModel, returned: dict[str, list[Returned]]) -> None:
    """Completeness, unambiguity, and that every module that ran is accounted for."""
    modules = exported.modules
    for node, tag in exported.items():
        assert tag is not None, f"{node.key} has no tag"
        assert tag.hierarchy_module in modules, f"{node.key}: no module {tag.hierarchy_module!r}"
        assert tag.hierarchy_method in ("scope", "parameter", "dataflow", "root")
        assert tag.hierarchy_tags[0] == tag.hierarchy_path
        assert tag.hierarchy_count == len(tag.hierarchy_tags) == len(set(tag.hierarchy_tags))
        assert list(tag.hierarchy_tags[1:]) == sorted(tag.hierarchy_tags[1:])
        covers = tag.hierarchy_covers
        assert list(covers) == sorted(set(covers) & set(modules)), f"{node.key} covers {covers}"
        assert not covers or (len(covers) > 1 and tag.hierarchy_module in covers), (
            f"{node.key} covers {covers}"
        )
    tags = [record.tag for record in modules.values() if record.tag is not None]
    assert len(tags) == len(set(tags)), "two modules share a tag"
    for path in returned:
        assert modules[path].status in ("nodes", "absorbed"), (
            f"{path!r} ran but is {modules[path].status}"
        )


def check_valid(path: Path) -> None:
    findings = modelexport.validate(path, check_consistency=True).findings
    assert not findings, findings[0].message
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextmanager
def model_unchanged(model: nn.Module) -> Iterator[None]:
    """Check that the block leaves the hooks, modes, weights and `forward` of a model as they are."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    training = [module.training for module in model.modules()]
    hooks = hooks_of(model)
    yield
    assert hooks_of(model) == hooks
    assert [module.training for module in model.modules()] == training
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert "forward" not in vars(model)


def prove(
    model: nn.Module, example_inputs: Any, folder: Path, strategy: str, **options: Any
) -> Verdict:
    """Export a model and check every promise of the map; the first that is broken is an error."""
    path = folder / "model.onnx"
    with recorded_scopes(model) as recorded, model_unchanged(model):
        modelexport.export_model(model, example_inputs, path, strategy=strategy, **options)
    return prove_file(path, model, example_inputs, recorded)


def prove_file(
    path: Path, model: nn.Module, example_inputs: Any, recorded: RecordedScopes
) -> Verdict:
    """Check every promise of the map on the file of a model that was exported before."""
    exported = modelexport.load(path)
    returned = pytorch_values(model, example_inputs)
    check_map(exported, returned)
    wrong = differences(exported, model, recorded)
    assert not wrong, "\n".join(wrong)
    check_valid(path)
    values = onnx_values(path, example_inputs)
    verdict = value_test(exported, returned, values)
    assert not verdict.failures, "\n".join(verdict.failures)
    verdict.results = check_results(exported, returned, values)
    return verdict
