"""Compare every module of an ONNX file with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from torch import nn
from torch.export import ExportedProgram

from modelexport.capture.graph_inputs import match_inputs
from modelexport.capture.inputs import ModelInputs, bind_inputs, in_signature_order, parse_inputs
from modelexport.capture.model_state import check_has_weights, unwrap_model
from modelexport.capture.pytrees import register_caches
from modelexport.errors import ArgumentError, ArgumentTypeError, ModelRunError, describe_type
from modelexport.exporters import CALL_ORDER_EXPORTERS
from modelexport.extraction.boundary import OpenModel
from modelexport.extraction.extract import open_tagged
from modelexport.graph.flat import pause_collector
from modelexport.modules.lookup import Selection
from modelexport.onnx_file.model_file import StrPath, as_path, external_files, require_data_file
from modelexport.option_values import spell_option
from modelexport.options import keyword_aliases
from modelexport.verification.blame import BlameFinder, Values, Verdict
from modelexport.verification.pairing import Gaps, Pair, PairedCall, Pairing
from modelexport.verification.pytorch_run import random_input_sets, run_pytorch
from modelexport.verification.records import (
    Array,
    ModuleParity,
    Outcome,
    TensorParity,
    Tolerance,
    Verification,
    is_comparable,
    make_tolerance,
    measure_difference,
    summarize,
    worst_calls,
)
from modelexport.verification.runtime import Session, import_onnxruntime


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

    PyTorch runs once with hooks, and the file runs once in ONNX Runtime with the modules' results
    as outputs. Modules that differ are run again by themselves on PyTorch's own inputs, which
    separates the module that causes a difference from those that inherit it. In a file that was
    changed since its export, values that kept their names are compared; `retag` finds renamed ones.

    Args:
        model: The model that was exported, or a program of `torch.export`.
        example_inputs: Inputs as `export_model` takes them; None for a program's own.
        path: The tagged file.
        atol: Absolute tolerance of a value.
        rtol: Relative tolerance of a value, added to `atol`.
        module: Only compare modules that match this tag, module path or glob, and those below.
        further_inputs: More sets of inputs, each like `example_inputs`; each is a run.
        random_inputs: Number of sets to draw with the names, dtypes, shapes and ranges of
            `example_inputs`; each is a run.
        seed: Seed of the random inputs.
        on_step: Called with a line of progress.

    Returns:
        The comparison of each call; with several runs, the worst of them.

    Raises:
        ArgumentError: If an argument cannot work, such as inputs of another shape.
        FileError: If the file or its data cannot be read.
        FormatError: If the file has no tags, or ONNX Runtime rejects it.
        ModelRunError: If the model does not run on the inputs.
    """
    tolerance = make_tolerance(atol, rtol)
    path = as_path(path)
    runnable = _runnable(model)
    sets = [_bind(model, runnable, inputs) for inputs in (example_inputs, *further_inputs)]
    sets += random_input_sets(sets[0], random_inputs, seed)
    import_onnxruntime()  # fail early, before the model runs
    with pause_collector(), open_tagged(path) as file:
        if module is not None:
            file.modules.require_match(module)
        for name in external_files(file.proto):
            require_data_file(path, name)
        step, is_program = on_step or (lambda _: None), isinstance(model, ExportedProgram)
        verifier = _Verifier(file, runnable, is_program, Gaps(file), tolerance, step)
        runs = verifier.prepare(sets, 1 + len(further_inputs))
        modules = verifier.compare_all(runs)
        wanted = _select(file, {parity.module for parity in modules}, module)
    compared = tuple(parity for parity in modules if parity.module in wanted)
    return summarize(path.name, tolerance, compared, len(runs))


def _runnable(model: object) -> nn.Module:
    """Return the module to run for what the caller passed as the model."""
    if isinstance(model, ExportedProgram):
        return model.module()
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"the model is {describe_type(model)}, not a torch.nn.Module",
            hint="pass the model that was exported",
        )
    model = unwrap_model(model)
    check_has_weights(model)
    register_caches(model)
    return model


def _bind(model: object, runnable: nn.Module, example_inputs: Any) -> ModelInputs:
    """Read one set of inputs."""
    if isinstance(model, ExportedProgram) and example_inputs is None:
        args, kwargs = model.example_inputs or ((), {})
        return ModelInputs(tuple(args), dict(kwargs))
    return bind_inputs(runnable, parse_inputs(example_inputs))


def _select(file: OpenModel, paths: set[str], module: str | None) -> set[str]:
    """Select the modules that the caller asks for."""
    if module is None:
        return paths
    selection = Selection(module, (), dict(file.modules.records))
    wanted = {path for path in paths if selection.has_module(path, file.modules.carried_tag(path))}
    if not wanted:
        raise ArgumentError(f"{module!r} did not run", hint=f"leave {spell_option('module')} out")
    return wanted


_Parities = list[TensorParity | None]
"""The comparison of each pair of a call; None for tensors that the file does not have."""


class _Run(NamedTuple):
    """One set of inputs, for PyTorch and for the file, and its name in messages."""

    inputs: ModelInputs
    feeds: Values
    name: str


class _Verifier(NamedTuple):
    """Runs both models on sets of inputs and compares their values."""

    file: OpenModel
    model: nn.Module
    is_program: bool
    gaps: Gaps
    tolerance: Tolerance
    step: Callable[[str], None]

    def prepare(self, sets: Sequence[ModelInputs], given: int) -> list[_Run]:
        """Name the runs, and match their inputs to those of the file before anything runs."""
        records, graph = self.file.records, self.file.proto.graph
        # dynamo keeps the order in which keywords are passed, torchscript uses forward's.
        in_call_order = records is not None and records.export.exporter in CALL_ORDER_EXPORTERS
        runs = []
        for number, inputs in enumerate(sets, 1):
            drawn = " (random inputs)" if number > given else ""
            run = _Run(inputs, {}, f"run {number} of {len(sets)}{drawn}" if len(sets) > 1 else "")
            ordered = inputs if in_call_order else in_signature_order(self.model, inputs)
            try:
                runs.append(run._replace(feeds=match_inputs(graph, self.model, ordered)))
            except ArgumentError as error:
                message = ": ".join(filter(None, (run.name, error.message)))
                raise ArgumentError(message, hint=error.hint) from error
        return runs

    def compare_all(self, runs: Sequence[_Run]) -> list[ModuleParity]:
        """Compare the calls of every run, and add the modules that PyTorch does not show."""
        compared = worst_calls([self._compare_run(run) for run in runs])
        observed = {parity.module for parity in compared}
        return [*compared, *map(self._unobserved, self.gaps.unobserved(observed))]

    def _compare_run(self, run: _Run) -> list[ModuleParity]:
        """Run both models on one set of inputs and compare every call."""
        suffix = f", {run.name}" if run.name else ""
        self.step(f"run the PyTorch model{suffix}")
        try:
            calls = run_pytorch(self.model, run.inputs, root_only=self.is_program)
        except ModelRunError as error:
            message = ": ".join(filter(None, (run.name, error.message)))
            raise ModelRunError(message, hint=error.hint) from error
        pairing = Pairing(self.file)
        paired = pairing.pair(calls)
        self.step(f"run the ONNX file{suffix}")
        values = self._run_file(paired, run.feeds)
        paired = self._number_as_in_file(pairing, paired, values)
        parities = [
            [_compare(pair, values, self.tolerance) for pair in call.pairs] for call in paired
        ]
        verdicts = self._judge(paired, parities, run.feeds)
        return [
            self._record(call, tensors, verdicts.get(index))
            for index, (call, tensors) in enumerate(zip(paired, parities, strict=True))
        ]

    def _number_as_in_file(
        self, pairing: Pairing, paired: list[PairedCall], values: Values
    ) -> list[PairedCall]:
        """Give the calls of a module the numbers that they have in the file, where those differ.

        A model that iterates over a set runs in another order in another process. The calls of a
        module are renumbered only if each of them agrees with another one of the file.
        """
        renumbered = list(paired)
        for indexes in _indexes_by_module(paired):
            if all(self._agrees(paired[index], values) for index in indexes):
                continue
            free = [paired[index].call.number for index in indexes]
            found: dict[int, PairedCall] = {}
            for index in indexes:
                options = (paired[index].call._replace(number=number) for number in free)
                agreeing = (one for one in pairing.pair(options) if self._agrees(one, values))
                match = next(agreeing, None)
                if match is None:
                    break
                free.remove(match.call.number)
                found[index] = match
            if not free:
                for index, match in found.items():
                    renumbered[index] = match
        return renumbered

    def _agrees(self, paired: PairedCall, values: Values) -> bool:
        """Return whether the file has every result of a call, each within the tolerance."""
        parities = [_compare(pair, values, self.tolerance) for pair in paired.pairs]
        return all(parity is not None and parity.within for parity in parities)

    def _judge(
        self, paired: list[PairedCall], parities: list[_Parities], feeds: Values
    ) -> dict[int, Verdict]:
        """Find out where the differences come from, by the index of the call."""
        wrong: dict[int, Values] = {}
        for index, (call, tensors) in enumerate(zip(paired, parities, strict=True)):
            for pair, parity in zip(call.pairs, tensors, strict=True):
                if parity is not None and not parity.within:
                    wrong.setdefault(index, {})[parity.tensor] = pair.expected
        if not wrong:
            return {}
        return BlameFinder(self.file, paired, feeds, self.tolerance).judge(wrong, self.step)

    def _run_file(self, calls: Sequence[PairedCall], feeds: Values) -> Values:
        """Run the file with the values of all pairs as outputs."""
        names = {name for call in calls for pair in call.pairs for name in pair.names}
        names -= {value.name for value in self.file.main.graph.output}
        session = Session.with_outputs(self.file.data, self.file.path, sorted(names - feeds.keys()))
        return {**feeds, **session.run(feeds)}

    def _record(
        self, paired: PairedCall, tensors: _Parities, verdict: Verdict | None
    ) -> ModuleParity:
        """Build the record of a call in PyTorch."""
        call = paired.call
        record = self.file.modules.records.get(call.path)
        compared = tuple(parity for parity in tensors if parity is not None)
        return msgspec.structs.replace(
            self._blank(call.path, *self._outcome(paired, compared)),
            call=call.number if record is not None and record.calls > 1 else None,
            blame=None if verdict is None else verdict.blame,
            max_abs=max((p.max_abs for p in compared if p.max_abs is not None), default=None),
            max_rel=max((p.max_rel for p in compared if p.max_rel is not None), default=None),
            cosine=min((p.cosine for p in compared if p.cosine is not None), default=None),
            own_abs=None if verdict is None else verdict.own_abs,
            tensors=compared,
            results=sum(array is not None for array in call.outputs),
        )

    def _unobserved(self, path: str) -> ModuleParity:
        """Build the record of a module that ran in the export and has no call in PyTorch."""
        outcome = Outcome.ABSORBED if self.gaps.is_absorbed(path) else Outcome.UNSEEN
        note = "a saved program is compared by its outputs only"
        return self._blank(
            path, outcome, note if self.is_program else self.gaps.explain_unobserved(path)
        )

    def _blank(self, path: str, outcome: Outcome, note: str | None) -> ModuleParity:
        """Build a record without measurements."""
        record = self.file.modules.records.get(path)
        return ModuleParity(
            module=path,
            tag=self.file.modules.tags.get(path),
            class_="" if record is None else record.class_,
            execution_order=None if record is None else record.execution_order,
            call=None,
            outcome=outcome,
            blame=None,
            max_abs=None,
            max_rel=None,
            cosine=None,
            own_abs=None,
            note=note,
            tensors=(),
            results=0,
        )

    def _outcome(
        self, paired: PairedCall, compared: tuple[TensorParity, ...]
    ) -> tuple[Outcome, str | None]:
        """Decide the outcome of a call, and what to say about it."""
        if not paired.absorbed and not paired.pairs:
            return Outcome.NOTHING, "it returns no tensor"
        if not compared:
            path, number = paired.call.path, paired.call.number
            absorbed = paired.absorbed or self.gaps.is_removed(path, number)
            outcome = Outcome.ABSORBED if absorbed else Outcome.UNKNOWN
            return outcome, self.gaps.explain(path, number)
        notes: list[str] = []
        for parity in compared:
            expected, _, shape = parity.expected.partition("[")
            dtype, _, actual_shape = parity.found.partition("[")
            if parity.max_abs is None:
                outcome = Outcome.DTYPE if shape == actual_shape else Outcome.SHAPE
                return outcome, f"{parity.found}, not {parity.expected}"
            if dtype != expected and not notes:
                notes.append(f"{dtype} for {expected}")
        if len(compared) < len(paired.pairs):
            notes.append(f"{len(compared)} of {len(paired.pairs)} results compared")
        agrees = all(parity.within for parity in compared)
        return Outcome.AGREES if agrees else Outcome.DIFFERS, ", ".join(notes) or None


def _indexes_by_module(calls: Sequence[PairedCall]) -> Iterator[list[int]]:
    """Yield the indexes of the calls of each module that ran more than once."""
    indexes: dict[str, list[int]] = {}
    for index, paired in enumerate(calls):
        indexes.setdefault(paired.call.path, []).append(index)
    return (found for found in indexes.values() if len(found) > 1)


def _compare(pair: Pair, values: Mapping[str, Array], tolerance: Tolerance) -> TensorParity | None:
    """Compare a tensor of PyTorch with the value of the file; None if the file does not have it."""
    expected = pair.expected
    names = [name for name in pair.names if name in values]
    if len(names) > 1:  # none is recorded, so the closest of those that leave the module
        names = sorted(
            (name for name in names if values[name].shape == expected.shape),
            key=lambda name: measure_difference(expected, values[name], tolerance).max_abs,
        )
    if not names:
        return None
    value = values[names[0]]
    old, new = (f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in (expected, value))
    parity = TensorParity(names[0], old, new, None, None, None, False)
    if is_comparable(expected, value):
        difference = measure_difference(expected, value, tolerance)
        parity = msgspec.structs.replace(parity, **msgspec.structs.asdict(difference))
    return None if pair.guessed and not parity.within else parity
