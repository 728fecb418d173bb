"""How far two tensors are apart."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from modelexport.errors import ArgumentError, ArgumentTypeError, a_kind

Array = np.ndarray[Any, Any]


class Tolerance(msgspec.Struct, frozen=True):
    """A value may differ by `atol` and by `rtol` times itself."""

    atol: float = 1e-4
    rtol: float = 1e-3


def checked_tolerance(atol: float, rtol: float) -> Tolerance:
    """A tolerance, if these can be one."""
    for name, value in (("atol", atol), ("rtol", rtol)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(f"{name} is {a_kind(value)}", hint="pass a number")
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


def difference(expected: Array, found: Array, tolerance: Tolerance) -> Difference:
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
    if kind(expected) not in "fc":  # whole numbers and truth values are the same or they are not
        within = bool(np.array_equal(expected, found))
    return Difference(float(apart.max()), float(relative.max()), _cosine(first, second), within)


def _numbers(values: Array) -> Array:
    return np.atleast_1d(values).astype(np.complex128 if values.dtype.kind == "c" else np.float64, copy=True)


def _cosine(first: Array, second: Array) -> float:
    finite = np.isfinite(first) & np.isfinite(second)
    one, two = np.abs(first[finite]), np.abs(second[finite])
    scale_one, scale_two = float(one.max(initial=0.0)), float(two.max(initial=0.0))
    if not scale_one or not scale_two:
        return 1.0 if scale_one == scale_two else 0.0
    one, two = first[finite] / scale_one, second[finite] / scale_two  # so that no square overflows
    return float(np.real(np.vdot(one, two)) / (np.linalg.norm(one) * np.linalg.norm(two)))


def kind(values: Array) -> str:
    """Numbers with a point, whole ones, truth values: what has to be the same."""
    return "f" if values.dtype.kind in "fV" else "i" if values.dtype.kind in "iu" else values.dtype.kind
