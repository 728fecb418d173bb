"""Compare every module of an ONNX file with PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import nn
from torch.export import ExportedProgram

from modelexport.capture.inputs import ModelInputs, bind_inputs, in_signature_order, parse_inputs
from modelexport.capture.model_state import check_has_weights, unwrap_model
from modelexport.errors import ArgumentError, ArgumentTypeError, ModelRunError, describe_type
from modelexport.exporters import CALL_ORDER_EXPORTERS
from modelexport.extraction.extract import OpenModel, open_tagged
from modelexport.garbage import pause_collector
from modelexport.modules.lookup import Selection
from modelexport.onnx_file.model_file import StrPath, as_path, external_files, require_data_file
from modelexport.options import keyword_aliases
from modelexport.verification.blame import BlameFinder, Suspect, Verdict
from modelexport.verification.pairing import Gaps, Pair, PairedCall, Pairing
from modelexport.verification.pytorch_run import random_input_sets, run_pytorch
from modelexport.verification.records import (
    COMPARED,
    FAILED,
    Array,
    Blame,
    Difference,
    ModuleParity,
    Outcome,
    TensorParity,
    Tolerance,
    Verification,
    make_tolerance,
    measure_difference,
    value_kind,
)
from modelexport.verification.runtime import import_onnxruntime, onnx_inputs, run_with_outputs


@keyword_aliases(onnx_path="path")
def verify(
    model: nn.Module | ExportedProgram,
    example_inputs: Any,
    path: StrPath,
    *,
    atol: float = Tolerance().atol,
    rtol: float = Tolerance().rtol,
    module: str | None = None,
    further_inputs: Sequence[Any] = (),
    random_inputs: int = 0,
    seed: int = 0,
    on_step: Callable[[str], None] | None = None,
) -> Verification:
    """Compare an ONNX file with the PyTorch model, module by module.

    Each runs once: PyTorch with hooks, the file in ONNX Runtime with the modules' results as outputs.
    A value may differ by `atol` and by `rtol` times itself. Modules that differ are run again by
    themselves on PyTorch's own inputs, which tells the one that causes a difference from those that
    inherit it. `module` narrows the answer to a tag, a module path or a glob. The file may have been
    changed since its export, to another precision for example: what is still in it by name is compared.

    `further_inputs` are more sets of inputs, each as `example_inputs` is, and `random_inputs` is a number
    of sets to draw with `seed`, with the names, dtypes, shapes and ranges of the example ones. Each set is
    a run of both, and the answer has the worst of each module.
    """
    tolerance = make_tolerance(atol, rtol)
    path = as_path(path)
    step = on_step or (lambda _: None)
    live = _live(model)
    example = _inputs(model, live, example_inputs)
    given = [example, *(_inputs(model, live, inputs) for inputs in further_inputs)]
    sets = [*given, *random_input_sets(example, random_inputs, seed)]
    import_onnxruntime()
    saved = isinstance(model, ExportedProgram)
    with pause_collector(), open_tagged(path) as file:
        for name in external_files(file.source.proto):
            require_data_file(path, name)
        names = [_name_of(number, len(given), len(sets)) for number in range(len(sets))]
        fed = [_feeds(file, live, inputs, name) for inputs, name in zip(sets, names, strict=True)]
        gaps = Gaps(file)
        run = partial(_run, file, live, saved, gaps, tolerance, step)
        runs = [
            run(inputs, feeds, name) for inputs, feeds, name in zip(sets, fed, names, strict=True)
        ]
        unseen = gaps.unseen({found.module for found in (found for run in runs for found in run)})
        modules = [*worst_records(runs), *(_unseen(file, gaps, path, saved) for path in unseen)]
        wanted = _narrowed(file, [found.module for found in modules], module)
    return _verification(
        path, tolerance, tuple(found for found in modules if found.module in wanted), len(runs)
    )


def _run(
    file: OpenModel,
    live: nn.Module,
    root_only: bool,
    gaps: Gaps,
    tolerance: Tolerance,
    step: Callable[[str], None],
    inputs: ModelInputs,
    feeds: dict[str, Array],
    name: str,
) -> list[ModuleParity]:
    """Run both on one set of inputs, and compare every call that is seen in PyTorch."""
    step(f"run the PyTorch model{name and f', {name}'}")
    try:
        calls = list(Pairing(file).of(run_pytorch(live, inputs, root_only=root_only)))
    except ModelRunError as error:
        raise ModelRunError(
            f"{name}: {error.message}" if name else error.message, hint=error.hint
        ) from error
    step(f"run the ONNX file{name and f', {name}'}")
    names = {name for paired in calls for pair in paired.pairs for name in pair.names}
    names -= {value.name for value in file.source.main.graph.output}
    exposed = sorted(names - feeds.keys())
    values = {**feeds, **run_with_outputs(file.weights.data, file.path.parent, feeds, exposed)}
    compared = [(paired, _compare(paired, values, tolerance)) for paired in calls]
    blames = _blames(file, calls, compared, feeds, tolerance, step)
    return [
        _record(file, gaps, paired, found, blames.get(id(paired))) for paired, found in compared
    ]


def _name_of(number: int, given: int, total: int) -> str:
    """What to call a run in messages; nothing where there is only one."""
    if total == 1:
        return ""
    return f"run {number + 1} of {total}{'' if number < given else ' (random inputs)'}"


def _feeds(file: OpenModel, live: nn.Module, inputs: ModelInputs, name: str) -> dict[str, Array]:
    try:
        return onnx_inputs(file.source.proto.graph, live, _as_exported(live, inputs, file))
    except ArgumentError as error:
        raise ArgumentError(
            f"{name}: {error.message}" if name else error.message, hint=error.hint
        ) from error


def _live(model: object) -> nn.Module:
    if isinstance(model, ExportedProgram):
        return model.module()
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"the model is {describe_type(model)}, not a torch.nn.Module",
            hint="pass the model that was exported",
        )
    model = unwrap_model(model)
    check_has_weights(model)
    return model


def _inputs(model: object, live: nn.Module, example_inputs: Any) -> ModelInputs:
    if isinstance(model, ExportedProgram) and example_inputs is None:
        args, kwargs = model.example_inputs or ((), {})
        return ModelInputs(tuple(args), dict(kwargs))
    return bind_inputs(live, parse_inputs(example_inputs))


def _as_exported(model: nn.Module, inputs: ModelInputs, file: OpenModel) -> ModelInputs:
    """The inputs in the order in which the file's exporter takes them."""
    records = file.source.records
    return (
        inputs
        if records is not None and records.export.exporter in CALL_ORDER_EXPORTERS
        else in_signature_order(model, inputs)
    )


def _narrowed(file: OpenModel, paths: list[str], module: str | None) -> set[str]:
    """Of the modules that ran those that are asked for."""
    if module is None:
        return set(paths)
    selection = Selection(module, (), dict(file.modules.records))
    wanted = {path for path in paths if selection.has_module(path, file.modules.carried_tag(path))}
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
        names = sorted(
            alike,
            key=lambda name: measure_difference(pair.expected, values[name], tolerance).max_abs,
        )
    told = TensorParity("", expected, "", None, None, None, within=True)
    if not names:
        return told, pair.expected, None
    value = values[names[0]]
    if value.shape != pair.expected.shape or value_kind(value) != value_kind(pair.expected):
        found = TensorParity(names[0], expected, _told(value), None, None, None, within=False)
    else:
        by: Difference = measure_difference(pair.expected, value, tolerance)
        found = TensorParity(
            names[0], expected, _told(value), by.max_abs, by.max_rel, by.cosine, by.within
        )
    if pair.guessed and not found.within:
        return told, pair.expected, None
    return found, pair.expected, names[0]


def _told(value: Array) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _blames(
    file: OpenModel,
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
    verdicts = BlameFinder(file, calls, feeds, tolerance).blame(suspects, step)
    return {id(paired): verdict for (paired, _), verdict in zip(suspects, verdicts, strict=True)}


def _record(
    file: OpenModel, gaps: Gaps, paired: PairedCall, found: Found, verdict: Verdict | None
) -> ModuleParity:
    call = paired.call
    record = file.modules.records.get(call.path)
    tensors = tuple(told for told, _, name in found if name is not None)
    outcome, note = _outcome(gaps, paired, found, tensors)
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
        results=sum(value is not None for value in call.given),
    )


def _unseen(file: OpenModel, gaps: Gaps, path: str, saved_program: bool) -> ModuleParity:
    """A module that ran in the export and whose calls in PyTorch cannot be observed."""
    record = file.modules.records.get(path)
    return ModuleParity(
        module=path,
        tag=file.modules.tags.get(path),
        class_="" if record is None else record.class_,
        execution_order=None if record is None else record.execution_order,
        call=None,
        outcome=Outcome.ABSORBED if gaps.is_absorbed(path) else Outcome.UNSEEN,
        blame=None,
        max_abs=None,
        max_rel=None,
        cosine=None,
        own_abs=None,
        note="a saved program is compared by its outputs only"
        if saved_program
        else gaps.why_unseen(path),
        tensors=(),
        results=0,
    )


def _outcome(
    gaps: Gaps, paired: PairedCall, found: Found, tensors: tuple[TensorParity, ...]
) -> tuple[Outcome, str | None]:
    if paired.absorbed:
        return Outcome.ABSORBED, gaps.why(paired.call.path, paired.call.index)
    if not found:
        return Outcome.NOTHING, "it returns no tensor"
    if not tensors:
        return Outcome.UNKNOWN, gaps.why(paired.call.path, paired.call.index)
    odd = next((told for told in tensors if told.max_abs is None), None)
    if odd is not None:
        same_shape = odd.expected.partition("[")[2] == odd.found.partition("[")[2]
        return (Outcome.DTYPE if same_shape else Outcome.SHAPE), f"{odd.found}, not {odd.expected}"
    return (Outcome.AGREES if all(told.within for told in tensors) else Outcome.DIFFERS), _note(
        found, tensors
    )


def _note(found: Found, tensors: tuple[TensorParity, ...]) -> str | None:
    notes = []
    other = next((told for told in tensors if told.found != told.expected), None)
    if other is not None:
        notes.append(f"{other.found.partition('[')[0]} for {other.expected.partition('[')[0]}")
    if len(tensors) < len(found):
        notes.append(f"{len(tensors)} of {len(found)} results compared")
    return ", ".join(notes) or None


def _verification(
    path: Path, tolerance: Tolerance, modules: tuple[ModuleParity, ...], runs: int
) -> Verification:
    failed = [found for found in modules if found.outcome in FAILED]
    compared = {found.module for found in modules if found.outcome in COMPARED}
    return Verification(
        file=path.name,
        runs=runs,
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        agrees=not failed and bool(compared),
        first=failed[0].module if failed else None,
        causes=_causes(failed),
        outcomes=dict(Counter(str(found.outcome) for found in modules)),
        modules=modules,
        modules_total=len({found.module for found in modules}),
        modules_compared=len(compared),
        partly_compared=tuple(
            dict.fromkeys(f.module for f in modules if f.module in compared and _lacks(f))
        ),
        not_compared={
            found.module: found.note or "" for found in modules if found.module not in compared
        },
    )


def _lacks(found: ModuleParity) -> bool:
    """Whether a call has results that were not compared."""
    return found.outcome not in COMPARED or len(found.tensors) < found.results


def _causes(failed: list[ModuleParity]) -> tuple[str, ...]:
    """The modules that cause a difference, the worst first."""
    here = [found for found in failed if found.blame == Blame.HERE]
    worst = sorted(
        here,
        key=lambda found: float("inf") if found.own_abs is None else found.own_abs,
        reverse=True,
    )
    return tuple(dict.fromkeys(found.module for found in worst))


_Key = tuple[str, int]


def worst_records(runs: Sequence[Sequence[ModuleParity]]) -> list[ModuleParity]:
    """Take for each call the record of the run where it did worst, in the order of the first run."""
    worst: dict[_Key, ModuleParity] = {}
    for number, run in enumerate(runs):
        calls: Counter[str] = Counter()
        for found in run:
            key = (found.module, calls[found.module])
            calls[found.module] += 1
            before = worst.get(key)
            if before is None or _badness(found) > _badness(before):
                worst[key] = msgspec.structs.replace(found, run=number)
    return list(worst.values())


def _badness(found: ModuleParity) -> tuple[bool, bool, bool, float]:
    """Failed is worse than not compared, which is worse than agreeing: a run without an answer takes nothing back."""
    size = float("inf") if found.max_abs is None else found.max_abs
    return found.outcome in FAILED, found.outcome not in COMPARED, found.blame == Blame.HERE, size
