"""The proof that a map is true: PyTorch's values against ONNX Runtime's, module by module.

`prove` exports a model and checks every promise of the map on it. Its heart is the value test: the
tensors that each module returns in PyTorch are looked for among the values that the nodes of this
module consume and produce in ONNX Runtime. Beside it, the module of every node is compared with the
scope that torch's exporter itself recorded.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import modelexport
from modelexport.modules.tree import is_within
from modelexport.tagged.model import TaggedModel
from scopes import RecordedScopes, differences, recorded_scopes
from values import Returned, found, onnx_values, open_session, pytorch_values, same


@dataclass
class Verdict:
    """The outcome of the value test for one model."""

    checked: int = 0
    absent: int = 0
    """Tensors that no node computes: the exporter fused or folded them."""
    results: int = 0
    failures: list[str] = field(default_factory=list)
    reshaped: bool = False
    """Whether shapes may differ: exporters merge the last reshape of a module with the next one."""


def value_test(
    exported: TaggedModel,
    returned: dict[str, list[Returned]],
    values: dict[str, np.ndarray],
    reshaped: bool = False,
) -> Verdict:
    """Look for every returned tensor among the values of the module's nodes, by module and tag.

    A module's nodes are those that it or a module below it owns, and those that cover one of them.
    An absorbed module has no nodes of its own, so its result is at a node that covers it, if any.
    """
    verdict = Verdict(reshaped=reshaped)
    records = exported.modules
    shown = {path: _shown_tag(records, path) for path in records}
    by_module = _values_by(
        exported, lambda tag: {p for path in _modules(tag) for p in _dotted_prefixes(path)}
    )
    by_tag = _values_by(
        exported, lambda tag: {p for path in _modules(tag) for p in _tag_prefixes(shown[path])}
    )
    tags = [tag for tag in exported.tags if tag is not None]
    owners = {tag.hierarchy_module for tag in tags}
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
        own = [tensor for call in calls for tensor in _own(call)]
        # What the exporter folded into a constant may be computed by another module as well.
        own = [tensor for tensor in own if not found(tensor, folded, values)]
        if not any(name for names in record.results for name in names):
            # No node consumes its result, so an equal value in the file is another module's.
            own = _without(own, _own_outside(returned, path))
        for key, names in ((path, by_module.get(path, [])), (record.tag, by_tag.get(record.tag))):
            if key is not None:
                _check_module(verdict, f"{key!r}", own, names or [], computed, values)
    _check_calls(verdict, exported, returned, by_module, values)
    return verdict


def _own(call: Returned) -> list[np.ndarray]:
    """Return what a module computed: a tensor that it was given and returns does not count."""
    return _without(call.given, call.taken)


def _own_outside(returned: dict[str, list[Returned]], path: str) -> list[np.ndarray]:
    """Return what the modules computed that neither are this one nor contain it."""
    others = [calls for other, calls in returned.items() if not is_within(path, other)]
    return [tensor for calls in others for call in calls for tensor in _own(call)]


def _without(tensors: list[np.ndarray], others: list[np.ndarray]) -> list[np.ndarray]:
    return [tensor for tensor in tensors if not any(same(tensor, other) for other in others)]


def _modules(tag: Any) -> tuple[str, ...]:
    return (tag.hierarchy_module, *tag.hierarchy_covers)


def _shown_tag(records: Any, path: str) -> str:
    """Return the tag of a module, or of the nearest shown one above it."""
    while records[path].tag is None:
        path = path.rpartition(".")[0]
    return records[path].tag


def _check_module(
    verdict: Verdict,
    module: str,
    own: list[np.ndarray],
    names: list[str],
    computed: list[str],
    values: dict[str, np.ndarray],
) -> None:
    """Check that what a module computed, and is still in the graph, is at its nodes."""
    missing = [tensor for tensor in own if not found(tensor, names, values)]
    verdict.checked += len(own)
    if verdict.reshaped:
        flat = {name: values[name].reshape(-1) for name in names if name in values}
        missing = [tensor for tensor in missing if not found(tensor.reshape(-1), names, flat)]
    misplaced = [tensor for tensor in missing if found(tensor, computed, values)]
    if misplaced:
        count = f"{len(misplaced)} of {len(own)} tensors"
        verdict.failures.append(f"{module}: {count} are at other modules' nodes")
    verdict.absent += len(missing) - len(misplaced)


def _check_calls(
    verdict: Verdict,
    exported: TaggedModel,
    returned: dict[str, list[Returned]],
    by_module: dict[Any, list[str]],
    values: dict[str, np.ndarray],
) -> None:
    """Check that what only one of several calls computed is at the nodes of that call."""
    by_call = _values_by(exported, lambda tag: [(tag.hierarchy_module, tag.hierarchy_call)])
    covered = {path for tag in exported.tags if tag is not None for path in tag.hierarchy_covers}
    for path, calls in returned.items():
        record = exported.modules[path]
        if record.children or not record.calls == len(calls) > 1 or path in covered:
            continue
        for number, call in enumerate(calls):
            others = [tensor for other in calls if other is not call for tensor in other.given]
            for tensor in _without(_own(call), others):
                here = found(tensor, by_call.get((path, number), []), values)
                if not here and found(tensor, by_module.get(path, []), values):
                    verdict.failures.append(
                        f"{path!r} call {number}: its result is at the nodes of another call"
                    )


def check_results(
    exported: TaggedModel, returned: dict[str, list[Returned]], values: dict[str, np.ndarray]
) -> int:
    """Check that each value recorded as a module's result has what the module returned."""
    checked = 0
    for path, calls in returned.items():
        recorded = exported.modules[path].results
        assert len(recorded) in (0, len(calls)), (
            f"{path!r}: {len(recorded)} results for {len(calls)} calls"
        )
        for number, (names, call) in enumerate(zip(recorded, calls, strict=False)):
            if len(names) != len(call.results):
                # The exporter may drop outputs of the model itself.
                assert not path, f"{path!r}: {names} for {len(call.results)} results"
                continue
            for name, tensor in zip(names, call.results, strict=True):
                if name is not None and tensor is not None:
                    _check_result(f"{path!r} call {number}: {name}", tensor, values[name])
                    checked += 1
    return checked


def _check_result(result: str, expected: np.ndarray, actual: np.ndarray) -> None:
    assert actual.shape == expected.shape, f"{result}: {actual.shape}, not {expected.shape}"
    equal = same if expected.dtype.kind == "f" else np.array_equal
    assert equal(expected, actual), f"{result} is not what the module returned"


def _values_by(exported: TaggedModel, keys: Callable[[Any], Iterable[Any]]) -> dict[Any, list[str]]:
    """Group the values that nodes consume and produce by the keys of the nodes' tags."""
    groups: dict[Any, dict[str, None]] = {}
    for node, tag in exported.items():
        if tag is not None:
            for key in keys(tag):
                groups.setdefault(key, {}).update(dict.fromkeys((*node.inputs, *node.outputs)))
    return {key: list(names) for key, names in groups.items()}


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
    """Write the baseline as anyone would, without the package.

    Where the tracer cannot pass keywords, or would turn the numbers among the defaults of forward
    into inputs, the model is called by position, as people do. Where the export fails with
    gradients, it runs without them.
    """
    named = isinstance(example_inputs, dict)
    args = (
        () if named else example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    )
    if args and isinstance(args[-1], dict):
        args = (*args, {})  # or torch would take it for keywords
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
    """Check that the map is complete and unambiguous, and has every module that ran."""
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
    """Check that a file has no findings and that ONNX Runtime loads it."""
    findings = modelexport.validate(path, check_consistency=True).findings
    assert not findings, findings[0].message
    open_session(str(path))


@contextmanager
def model_unchanged(model: nn.Module) -> Iterator[None]:
    """Check that the block leaves hooks, modes, weights and `forward` of a model as they are."""
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
