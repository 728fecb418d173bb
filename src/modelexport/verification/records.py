"""The records of a verification, and how two values are compared."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np

from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type


class Outcome(enum.StrEnum):
    """What came of comparing one call of one module."""

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

    `caused here`: given PyTorch's own inputs, it still differs. `caused inside`: a module inside it
    does. `inherited`: given PyTorch's own inputs it agrees. `unclear`: it could not be run by itself.
    """

    HERE = "caused here"
    INSIDE = "caused inside"
    INHERITED = "inherited"
    UNCLEAR = "unclear"


class TensorParity(msgspec.Struct, frozen=True):
    """One tensor that a module returned, against the tensor of the file that it should be."""

    tensor: str
    """Its name in the file; empty if it is not there."""
    expected: str
    """Type and shape in PyTorch."""
    found: str
    """Type and shape in the file."""
    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    within: bool
    """Whether it agrees."""


class ModuleParity(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """One call of a module; the differences are the greatest of its tensors."""

    module: str
    tag: str | None
    class_: str
    execution_order: int | None
    call: int | None
    """Which call, where the module ran more than once."""
    outcome: Outcome
    blame: Blame | None
    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    own_abs: float | None
    """The greatest absolute difference that it makes when it is given PyTorch's own inputs, where that was tried."""
    note: str | None
    """What else there is to say; why it is not compared, where it is not."""
    tensors: tuple[TensorParity, ...]
    """Those of its results that were compared."""
    results: int
    """How many tensors it returned."""
    run: int = 0
    """The run that this is from, where there were several: the one in which the call did worst."""


class Verification(msgspec.Struct, frozen=True):
    """The whole answer. `modules` is in the order in which the calls finished: the first that differs did so first."""

    file: str
    atol: float
    rtol: float
    agrees: bool
    """Whether something was compared and all of that agrees; `not_compared` says what this is not about."""
    first: str | None
    """The module that differs first."""
    causes: tuple[str, ...]
    """The modules that differ though they are given PyTorch's own inputs, the worst first."""
    outcomes: dict[str, int]
    """Calls by outcome."""
    modules: tuple[ModuleParity, ...]
    modules_total: int
    """How many modules ran, in the export or in PyTorch."""
    modules_compared: int
    """How many of them were compared, in all or in some of their results."""
    partly_compared: tuple[str, ...]
    """The modules of which some results or calls were compared and others were not."""
    not_compared: dict[str, str]
    """The modules of which nothing was compared, each with the reason."""
    runs: int = 1
    """On how many sets of inputs both ran; `modules` has the worst of each call."""


Array = np.ndarray[Any, Any]


class Tolerance(msgspec.Struct, frozen=True):
    """A value may differ by `atol` and by `rtol` times itself."""

    atol: float = 1e-4
    rtol: float = 1e-3


def make_tolerance(atol: float, rtol: float) -> Tolerance:
    """A tolerance, if these can be one."""
    for name, value in (("atol", atol), ("rtol", rtol)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(f"{name} is {describe_type(value)}", hint="pass a number")
        if not 0 <= value < float("inf"):
            raise ArgumentError(f"{name} is {value}", hint="it cannot be negative, nor without end")
    return Tolerance(float(atol), float(rtol))


class Difference(msgspec.Struct, frozen=True):
    """Greatest absolute and relative difference, and the cosine of the angle between two tensors.

    A relative difference is one to the expected value, or to `atol` where that is smaller still.
    """

    max_abs: float
    max_rel: float
    cosine: float
    within: bool


def measure_difference(expected: Array, found: Array, tolerance: Tolerance) -> Difference:
    """Compare two tensors of the same shape; equal infinities and two that are no number are no difference."""
    first, second = _numbers(expected), _numbers(found)
    if not first.size:
        return Difference(0.0, 0.0, 1.0, within=True)
    with np.errstate(all="ignore"):
        apart = np.abs(first - second)
        apart[(first == second) | (np.isnan(first) & np.isnan(second))] = 0.0
        apart[np.isnan(apart)] = np.inf
        size = np.abs(first)
        size[~np.isfinite(size)] = 0.0
        relative = apart / np.maximum(size, tolerance.atol or np.finfo(np.float64).tiny)
        within = bool(np.all(apart <= tolerance.atol + tolerance.rtol * size))
    if (
        value_kind(expected) not in "fc"
    ):  # whole numbers and truth values are the same or they are not
        within = bool(np.array_equal(expected, found))
    return Difference(float(apart.max()), float(relative.max()), _cosine(first, second), within)


def _numbers(values: Array) -> Array:
    return np.atleast_1d(values).astype(
        np.complex128 if values.dtype.kind == "c" else np.float64, copy=True
    )


def _cosine(first: Array, second: Array) -> float:
    finite = np.isfinite(first) & np.isfinite(second)
    one, two = np.abs(first[finite]), np.abs(second[finite])
    scale_one, scale_two = float(one.max(initial=0.0)), float(two.max(initial=0.0))
    if not scale_one or not scale_two:
        return 1.0 if scale_one == scale_two else 0.0
    one, two = first[finite] / scale_one, second[finite] / scale_two  # so that no square overflows
    return float(np.real(np.vdot(one, two)) / (np.linalg.norm(one) * np.linalg.norm(two)))


def value_kind(values: Array) -> str:
    """Numbers with a point, whole ones, truth values: what has to be the same."""
    return (
        "f"
        if values.dtype.kind in "fV"
        else "i"
        if values.dtype.kind in "iu"
        else values.dtype.kind
    )
