"""verify(): one run of PyTorch, one of ONNX Runtime, and what each module returned in both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from modelexport.analysis.selection import Selection
from modelexport.baseline.calling import (
    ModelInputs,
    as_called,
    check_weights,
    in_signature_order,
    read_inputs,
    unwrapped,
)
from modelexport.collector import collector_paused
from modelexport.errors import ArgumentError, ArgumentTypeError, a_kind
from modelexport.parity.eager import run_eagerly
from modelexport.parity.feeds import feeds_for
from modelexport.parity.measure import Array, Difference, Tolerance, checked_tolerance, difference, kind
from modelexport.parity.pairs import Pair, PairedCall, Pairing
from modelexport.parity.records import FAILED, Blame, ModuleParity, Outcome, TensorParity, Verification
from modelexport.parity.runtime import check_runtime, run_exposed
from modelexport.parity.suspects import Judge, Suspect, Verdict
from modelexport.pieces.extract import TaggedFile, opened
from modelexport.tagged.files import StrPath, as_path


def verify(
    model: nn.Module | ExportedProgram,
    example_inputs: Any,
    onnx_path: StrPath,
    *,
    atol: float = Tolerance().atol,
    rtol: float = Tolerance().rtol,
    module: str | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Verification:
    """Compare an ONNX file with the PyTorch model, module by module.

    Each runs once: PyTorch with hooks, the file in ONNX Runtime with the modules' results as outputs.
    A value may differ by `atol` and by `rtol` times itself. Modules that differ are run again by
    themselves on PyTorch's own inputs, which tells the one that causes a difference from those that
    inherit it. `module` narrows the answer to a tag, a module path or a glob. The file may have been
    changed since its export, to another precision for example: what is still in it by name is compared.
    """
    tolerance = checked_tolerance(atol, rtol)
    path = as_path(onnx_path)
    step = on_step or (lambda _: None)
    live, inputs = _check(model, example_inputs)
    check_runtime()
    with collector_paused(), opened(path) as file:
        step("run the PyTorch model")
        feeds = feeds_for(file.source.proto.graph, live, _as_exported(live, inputs, file))
        calls = list(Pairing(file).of(run_eagerly(live, inputs, root_only=isinstance(model, ExportedProgram))))
        wanted = {id(paired) for paired in _narrowed(file, calls, module)}
        step("run the ONNX file")
        names = {name for paired in calls for pair in paired.pairs for name in pair.names}
        names -= {value.name for value in file.source.main.graph.output}
        values = {**feeds, **run_exposed(file.weights.data, path.parent, feeds, sorted(names - feeds.keys()))}
        compared = [(paired, _compare(paired, values, tolerance)) for paired in calls]
        blames = _blames(file, calls, compared, feeds, tolerance, step)
    modules = tuple(
        _record(file, paired, found, blames.get(id(paired))) for paired, found in compared if id(paired) in wanted
    )
    return _verification(path, tolerance, modules)


def _check(model: object, example_inputs: Any) -> tuple[nn.Module, ModelInputs]:
    if isinstance(model, ExportedProgram):
        live = model.module()
        if example_inputs is not None:
            return live, as_called(live, read_inputs(example_inputs))
        args, kwargs = model.example_inputs or ((), {})
        return live, ModelInputs(tuple(args), dict(kwargs))
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"the model is {a_kind(model)}, not a torch.nn.Module", hint="pass the model that was exported"
        )
    model = unwrapped(model)
    check_weights(model)
    return model, as_called(model, read_inputs(example_inputs))


def _as_exported(model: nn.Module, inputs: ModelInputs, file: TaggedFile) -> ModelInputs:
    """The inputs in the order in which the file's exporter takes them."""
    records = file.source.records
    return in_signature_order(model, inputs) if records is None or records.export.exporter != "dynamo" else inputs


def _narrowed(file: TaggedFile, calls: list[PairedCall], module: str | None) -> list[PairedCall]:
    if module is None:
        return calls
    selection = Selection(module, (), dict(file.modules.records))
    wanted = [p for p in calls if selection.has_module(p.call.path, file.modules.carried_tag(p.call.path))]
    if not wanted:
        file.modules.find(module)  # says what is near, if nothing is called so
        raise ArgumentError(f"{module!r} did not run", hint="leave --module out")
    return wanted


Found = list[tuple[TensorParity, Array, str | None]]
"""For each tensor of a call the comparison, PyTorch's value, and the name in the file."""


def _compare(paired: PairedCall, values: Mapping[str, Array], tolerance: Tolerance) -> Found:
    return [_compare_one(pair, values, tolerance) for pair in paired.pairs]


def _compare_one(
    pair: Pair, values: Mapping[str, Array], tolerance: Tolerance
) -> tuple[TensorParity, Array, str | None]:
    expected = _told(pair.expected)
    names = [name for name in pair.names if name in values]
    if len(names) > 1:  # not recorded, only what leaves the module: the one that is closest
        alike = [name for name in names if values[name].shape == pair.expected.shape]
        names = sorted(alike, key=lambda name: difference(pair.expected, values[name], tolerance).max_abs)
    told = TensorParity("", expected, "", None, None, None, within=True)
    if not names:
        return told, pair.expected, None
    value = values[names[0]]
    if value.shape != pair.expected.shape or kind(value) != kind(pair.expected):
        found = TensorParity(names[0], expected, _told(value), None, None, None, within=False)
    else:
        by: Difference = difference(pair.expected, value, tolerance)
        found = TensorParity(names[0], expected, _told(value), by.max_abs, by.max_rel, by.cosine, by.within)
    if pair.guessed and not found.within:
        return told, pair.expected, None
    return found, pair.expected, names[0]


def _told(value: Array) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _blames(
    file: TaggedFile,
    calls: list[PairedCall],
    compared: list[tuple[PairedCall, Found]],
    feeds: Mapping[str, Array],
    tolerance: Tolerance,
    step: Callable[[str], None],
) -> dict[int, Verdict]:
    suspects: list[Suspect] = []
    for paired, found in compared:
        wrong = {name: value for told, value, name in found if name is not None and not told.within}
        if wrong:
            suspects.append((paired, wrong))
    if not suspects:
        return {}
    verdicts = Judge(file, calls, feeds, tolerance).blame(suspects, step)
    return {id(paired): verdict for (paired, _), verdict in zip(suspects, verdicts, strict=True)}


def _record(file: TaggedFile, paired: PairedCall, found: Found, verdict: Verdict | None) -> ModuleParity:
    call = paired.call
    record = file.modules.records.get(call.path)
    tensors = tuple(told for told, _, name in found if name is not None)
    outcome, note = _outcome(paired, found, tensors)
    numbers = [told for told in tensors if told.max_abs is not None]
    return ModuleParity(
        module=call.path,
        tag=file.modules.tags.get(call.path),
        class_="" if record is None else record.class_,
        execution_order=None if record is None else record.execution_order,
        call=call.index if record is not None and record.calls > 1 else None,
        outcome=outcome,
        blame=None if verdict is None else verdict.blame,
        max_abs=max((told.max_abs for told in numbers if told.max_abs is not None), default=None),
        max_rel=max((told.max_rel for told in numbers if told.max_rel is not None), default=None),
        cosine=min((told.cosine for told in numbers if told.cosine is not None), default=None),
        own_abs=None if verdict is None else verdict.own_abs,
        note=note,
        tensors=tensors,
    )


def _outcome(paired: PairedCall, found: Found, tensors: tuple[TensorParity, ...]) -> tuple[Outcome, str | None]:
    if paired.absorbed:
        return Outcome.ABSORBED, None
    if not found:
        return Outcome.NOTHING, None
    if not tensors:
        return Outcome.UNKNOWN, "its result is not in the file, or not by a name that is known"
    odd = next((told for told in tensors if told.max_abs is None), None)
    if odd is not None:
        same_shape = odd.expected.partition("[")[2] == odd.found.partition("[")[2]
        return (Outcome.DTYPE if same_shape else Outcome.SHAPE), f"{odd.found}, not {odd.expected}"
    other = next((told for told in tensors if told.found != told.expected), None)
    note = None if other is None else f"{other.found.partition('[')[0]} for {other.expected.partition('[')[0]}"
    return (Outcome.AGREES if all(told.within for told in tensors) else Outcome.DIFFERS), note


def _verification(path: Path, tolerance: Tolerance, modules: tuple[ModuleParity, ...]) -> Verification:
    failed = [found for found in modules if found.outcome in FAILED]
    return Verification(
        file=path.name,
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        agrees=not failed and any(found.outcome == Outcome.AGREES for found in modules),
        first=failed[0].module if failed else None,
        causes=_causes(failed),
        outcomes=dict(Counter(str(found.outcome) for found in modules)),
        modules=modules,
    )


def _causes(failed: list[ModuleParity]) -> tuple[str, ...]:
    """The modules that cause a difference, the worst first."""
    here = [found for found in failed if found.blame == Blame.HERE]
    worst = sorted(here, key=lambda found: float("inf") if found.own_abs is None else found.own_abs, reverse=True)
    return tuple(dict.fromkeys(found.module for found in worst))
