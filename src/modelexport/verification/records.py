"""Records of a verification, their summary, and the comparison of two arrays."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type
from modelexport.option_values import spell_option
from modelexport.tagged.example_inputs import Array as Array
from modelexport.tagged.example_inputs import numeric_kind


class Outcome(enum.StrEnum):
    """The result of comparing one call of a module."""

    AGREES = "agrees"
    DIFFERS = "differs"
    SHAPE = "shape"
    DTYPE = "dtype"
    ABSORBED = "absorbed"
    UNKNOWN = "not found"
    NOTHING = "no tensor"
    UNSEEN = "not seen"


FAILED = frozenset({Outcome.DIFFERS, Outcome.SHAPE, Outcome.DTYPE})
COMPARED = FAILED | {Outcome.AGREES}


class Blame(enum.StrEnum):
    """Where a difference comes from.

    `caused here`: the module differs even on PyTorch's own inputs. `caused inside`: a module inside
    it does. `inherited`: on PyTorch's own inputs it agrees. `unclear`: it could not be run alone.
    """

    HERE = "caused here"
    INSIDE = "caused inside"
    INHERITED = "inherited"
    UNCLEAR = "unclear"


class TensorParity(msgspec.Struct, frozen=True):
    """One tensor that a module returned, compared with the value of the file that stands for it."""

    tensor: str
    """The name of the value in the file."""
    expected: str
    """Type and shape in PyTorch."""
    found: str
    """Type and shape in the file."""
    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    within: bool
    """Whether it agrees within the tolerance."""


class ModuleParity(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """One call of a module; its differences are the largest of its tensors."""

    module: str
    tag: str | None
    class_: str
    execution_order: int | None
    call: int | None
    """The number of the call, if the module ran more than once."""
    outcome: Outcome
    blame: Blame | None
    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    own_abs: float | None
    """The largest absolute difference on PyTorch's own inputs, if the module was run by itself."""
    note: str | None
    """Further details, or the reason why the call is not compared."""
    tensors: tuple[TensorParity, ...]
    """The results that were compared."""
    results: int
    """The number of tensors that the call returned."""
    run: int = 0
    """The run this record is from: of several runs, the one with the worst result for this call."""


class Verification(msgspec.Struct, frozen=True):
    """The result of `verify`; `modules` are in the order in which their calls finished."""

    file: str
    atol: float
    rtol: float
    agrees: bool
    """Whether at least one module was compared and all compared modules agree."""
    first: str | None
    """The first module that differs."""
    causes: tuple[str, ...]
    """The modules that differ even on PyTorch's own inputs, the worst first."""
    outcomes: dict[str, int]
    """Number of calls by outcome."""
    modules: tuple[ModuleParity, ...]
    modules_total: int
    """Number of modules that ran, in the export or in PyTorch."""
    modules_compared: int
    """Number of modules with at least one compared result."""
    partly_compared: tuple[str, ...]
    """The modules with some results or calls compared and others not."""
    not_compared: dict[str, str]
    """The modules without any compared result, each with the reason."""
    runs: int = 1
    """Number of input sets that both models ran on; `modules` has the worst run of each call."""


class Tolerance(msgspec.Struct, frozen=True):
    """The allowed difference of a value: `atol`, plus `rtol` times its magnitude."""

    atol: float = 1e-4
    rtol: float = 1e-3


def make_tolerance(atol: float, rtol: float) -> Tolerance:
    """Check two tolerances and return them as a record.

    Raises:
        ArgumentTypeError: If one of them is not a number.
        ArgumentError: If one of them is negative or not finite.
    """
    for name, value in (("atol", atol), ("rtol", rtol)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(
                f"{spell_option(name)} is {describe_type(value)}", hint="pass a number"
            )
        if not 0 <= value < float("inf"):
            raise ArgumentError(
                f"{spell_option(name)} must be a finite number, 0 or more, got {value}"
            )
    return Tolerance(float(atol), float(rtol))


class Difference(msgspec.Struct, frozen=True):
    """The largest absolute and relative difference of two arrays, and their cosine similarity."""

    max_abs: float
    max_rel: float
    cosine: float
    within: bool


def measure_difference(expected: Array, actual: Array, tolerance: Tolerance) -> Difference:
    """Compare two arrays of the same shape.

    Equal infinities do not differ, nor do two NaNs. A relative difference is relative to the
    expected value, or to `atol` if that is larger.

    Args:
        expected: The values of PyTorch.
        actual: The values of ONNX Runtime.
        tolerance: The difference that is allowed. Integers and bools must be equal.

    Returns:
        The measured difference.
    """
    first, second = _as_wide(expected), _as_wide(actual)
    if not first.size:
        return Difference(0.0, 0.0, 1.0, within=True)
    with np.errstate(all="ignore"):
        difference = np.abs(first - second)
        difference[(first == second) | (np.isnan(first) & np.isnan(second))] = 0.0
        difference[np.isnan(difference)] = np.inf
        magnitude = np.abs(first)
        magnitude[~np.isfinite(magnitude)] = 0.0
        relative = difference / np.maximum(magnitude, tolerance.atol or np.finfo(np.float64).tiny)
        within = bool(np.all(difference <= tolerance.atol + tolerance.rtol * magnitude))
    if numeric_kind(expected.dtype) not in "fc":
        within = bool(np.array_equal(expected, actual))
    largest = float(difference.max()), float(relative.max())
    return Difference(*largest, _cosine(first, second), within)


def is_comparable(expected: Array, actual: Array) -> bool:
    """Return whether two arrays have the same shape and the same kind of number."""
    kinds = numeric_kind(expected.dtype), numeric_kind(actual.dtype)
    return expected.shape == actual.shape and kinds[0] == kinds[1]


def _as_wide(values: Array) -> Array:
    """Copy an array into the widest type of its kind, so that subtraction cannot overflow."""
    wide = np.complex128 if values.dtype.kind == "c" else np.float64
    return np.atleast_1d(values).astype(wide, copy=True)


def _cosine(first: Array, second: Array) -> float:
    """Compute the cosine similarity of the elements that are finite in both arrays."""
    finite = np.isfinite(first) & np.isfinite(second)
    first, second = first[finite], second[finite]
    scales = [float(np.abs(values).max(initial=0.0)) for values in (first, second)]
    if not all(scales):
        return 1.0 if scales[0] == scales[1] else 0.0
    first, second = first / scales[0], second / scales[1]  # no square can overflow now
    norms = np.linalg.norm(first) * np.linalg.norm(second)
    return float(np.real(np.vdot(first, second)) / norms)


def worst_calls(runs: Sequence[Sequence[ModuleParity]]) -> list[ModuleParity]:
    """Return the worst record of each call over all runs, in the order of the first run."""
    worst: dict[tuple[str, int], ModuleParity] = {}
    for number, run in enumerate(runs):
        calls: Counter[str] = Counter()
        for parity in run:
            key = (parity.module, calls[parity.module])
            calls[parity.module] += 1
            if key not in worst or _severity(parity) > _severity(worst[key]):
                worst[key] = msgspec.structs.replace(parity, run=number)
    return list(worst.values())


def _severity(parity: ModuleParity) -> tuple[bool, bool, bool, float]:
    """Rank a record: failed above not compared, and that above agreeing."""
    outcome, is_cause = parity.outcome, parity.blame == Blame.HERE
    return outcome in FAILED, outcome not in COMPARED, is_cause, _infinite_if_none(parity.max_abs)


def _infinite_if_none(size: float | None) -> float:
    return float("inf") if size is None else size


def summarize(
    name: str, tolerance: Tolerance, modules: tuple[ModuleParity, ...], runs: int
) -> Verification:
    """Count the outcomes of all calls, and name the modules that differ or were not compared."""
    failed = [parity for parity in modules if parity.outcome in FAILED]
    compared = {parity.module for parity in modules if parity.outcome in COMPARED}
    incomplete = (
        parity.module
        for parity in modules
        if parity.outcome not in COMPARED or len(parity.tensors) < parity.results
    )
    causes = [parity for parity in failed if parity.blame == Blame.HERE]
    causes.sort(key=lambda parity: _infinite_if_none(parity.own_abs), reverse=True)
    return Verification(
        file=name,
        runs=runs,
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        agrees=not failed and bool(compared),
        first=failed[0].module if failed else None,
        causes=tuple(dict.fromkeys(parity.module for parity in causes)),
        outcomes=dict(Counter(str(parity.outcome) for parity in modules)),
        modules=modules,
        modules_total=len({parity.module for parity in modules}),
        modules_compared=len(compared),
        partly_compared=tuple(dict.fromkeys(path for path in incomplete if path in compared)),
        not_compared={
            parity.module: parity.note or "" for parity in modules if parity.module not in compared
        },
    )
