"""Sketches: small summaries of tensors that tell whether two of them have the same values."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

SAME = 1e-3
"""The relative error up to which two values are the same: an optimiser reorders additions."""
_NOISE = 1e-6
"""The relative error that float32 has by itself: matches below it are equally good."""
_CLEARLY = 3.0
"""A match is clear if the next best has an error that is so many times larger."""
RE_ENCODED = 0.98
"""The correlation with its input from which a value is taken for the same, encoded in another way:
8 bits keep it above 0.99 unless outliers leave the rest few levels."""
_SUM_WEIGHT = 10.0
_WIDTH = 64
_BLOCK = 1 << 16
_SEED = 20
_LARGEST = float(np.finfo(np.float32).max) / 2


class Sketch(msgspec.Struct, frozen=True, eq=False):
    """A summary of a tensor: its shape, sums over its elements, and a random projection.

    The sums do not depend on the order of the elements or on zeros, so they survive a transposition
    and padding. The projection estimates the distance of two tensors element by element.
    """

    shape: tuple[int, ...]
    size: int
    is_float: bool
    norm: float
    """The square root of the sum of squares."""
    mean: float
    sums: NDArray[np.float64]
    """Roots of the sums of several powers, the least and the greatest element."""
    projection: NDArray[np.float64]

    @property
    def is_distinct(self) -> bool:
        """Whether the values tell anything: not all are equal, and none is unbounded."""
        return self.size > 1 and self.norm > 0 and bool(self.sums[-1] > self.sums[-2])

    def order_error(self, other: Sketch) -> float:
        """Estimate the relative distance to another tensor, element by element.

        Args:
            other: The sketch of the other tensor.

        Returns:
            The root of the mean squared difference, relative to that of the values; infinite for
            tensors of another size.
        """
        if self.size != other.size:
            return float("inf")
        scale = max(self.norm, other.norm)
        return float(np.linalg.norm(self.projection - other.projection)) / scale if scale else 0.0

    def content_error(self, other: Sketch) -> float:
        """Estimate how far the elements differ from those of another tensor, in any order.

        Args:
            other: The sketch of the other tensor.

        Returns:
            The greatest relative difference of the sums.
        """
        scale = np.maximum(np.abs(self.sums), np.abs(other.sums))
        # A sum of positive and negative elements can be close to zero by chance.
        scale[-2:] = scale[-2:].max()
        scale[0] = max(scale[0], scale[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.nan_to_num(np.abs(self.sums - other.sums) / scale)
        # Over many elements, the sums of unrelated tensors of one distribution are close.
        errors[:-2] *= _SUM_WEIGHT
        return float(errors.max())

    def correlation(self, other: Sketch) -> float:
        """Estimate how far this tensor is another one, scaled and shifted, as quantizers do.

        Args:
            other: The sketch of the other tensor.

        Returns:
            The absolute correlation, from 0 to 1; 0 for tensors of another size.
        """
        if self.size != other.size or self.size < 2:
            return 0.0
        first = self.projection - self.mean * _ones(self.size)
        second = other.projection - other.mean * _ones(self.size)
        scale = float(np.linalg.norm(first) * np.linalg.norm(second))
        return abs(float(first @ second)) / scale if scale else 0.0


def sketch(array: Array) -> Sketch | None:
    """Summarise a tensor, block by block: a large one is never copied as a whole.

    Args:
        array: The tensor.

    Returns:
        The sketch; None if the elements are not numbers.
    """
    is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    if not is_float and array.dtype.kind not in "iub":
        return None
    powers, least, greatest = np.zeros(5), 0.0, 0.0
    projection = np.zeros(_WIDTH)
    flat = array.reshape(-1)
    for number, start in enumerate(range(0, flat.size, _BLOCK)):
        values = _finite(flat[start : start + _BLOCK].astype(np.float64))
        absolute, squares = np.abs(values), values * values
        powers += (
            values.sum(),
            absolute.sum(),
            squares.sum(),
            (squares * absolute).sum(),
            (squares * squares).sum(),
        )
        least, greatest = min(values.min(), least), max(values.max(), greatest)
        projection += _project(values, number)
    total, absolute_total, energy = (float(power) for power in powers[:3])
    roots = energy**0.5, float(powers[3]) ** (1 / 3), float(powers[4]) ** 0.25
    return Sketch(
        shape=array.shape,
        size=flat.size,
        is_float=is_float,
        norm=roots[0],
        mean=total / flat.size if flat.size else 0.0,
        sums=np.array([total, absolute_total, *roots, least, greatest]),
        projection=projection,
    )


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace infinities and the greatest numbers, which masks have where others have zero."""
    if values.max() < _LARGEST and values.min() > -_LARGEST:  # not so with a NaN
        return values
    return np.where(np.abs(values) < _LARGEST, values, 0.0)


def _project(values: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    """Add the elements of a block, with random signs, in a fixed number of columns."""
    signed = values * _signs(block)[: values.size]
    rows = -(-signed.size // _WIDTH)
    padded = np.zeros(rows * _WIDTH)
    padded[: signed.size] = signed
    return np.asarray(padded.reshape(rows, _WIDTH).sum(axis=0))


@functools.lru_cache(maxsize=32)
def _ones(size: int) -> NDArray[np.float64]:
    """Return the projection of a tensor of ones."""
    starts = range(0, size, _BLOCK)
    return np.asarray(
        sum(_project(np.ones(min(_BLOCK, size - at)), i) for i, at in enumerate(starts))
    )


@functools.lru_cache(maxsize=64)
def _signs(block: int) -> NDArray[np.float64]:
    """Return the random signs of a block, the same for every tensor and in every run."""
    drawn = np.random.default_rng((_SEED, block)).integers(0, 2, _BLOCK)
    return np.asarray(drawn * 2.0 - 1.0)


class SketchIndex:
    """Finds among many tensors those with given values, without comparing all pairs.

    Args:
        sketches: The sketches by name; those that tell nothing are left out.
    """

    def __init__(self, sketches: Mapping[str, Sketch]) -> None:
        kept = {name: s for name, s in sketches.items() if s.is_float and s.is_distinct}
        self._sketches = kept
        by_size: dict[int, list[tuple[float, str]]] = {}
        for name, each in kept.items():
            by_size.setdefault(each.size, []).append((float(each.projection[0]), name))
        self._in_order = {size: _Sorted(entries) for size, entries in by_size.items()}
        self._in_any_order = _Sorted([(float(s.sums[1]), name) for name, s in kept.items()])

    def find(self, wanted: Sketch, tolerance: float = SAME) -> list[str]:
        """Find the tensors with the same values, in the same order if there are such.

        Args:
            wanted: The sketch of the values.
            tolerance: The greatest relative error.

        Returns:
            The names of the best matches that are equally good; more than one if equal tensors are
            among them.
        """
        if not (wanted.is_float and wanted.is_distinct):
            return []
        if wanted.size in self._in_order:
            start = float(wanted.projection[0])
            near = self._in_order[wanted.size].within(start, tolerance * wanted.norm)
            best = _best((wanted.order_error(self._sketches[name]), name) for name in near)
            if best and best[0][0] <= tolerance:
                return [name for _, name in best]
        return self._find_in_any_order(wanted, tolerance)

    def find_similar(self, wanted: Sketch, tolerance: float) -> list[str]:
        """Find the tensors with similar values in the same order, clearly better than others.

        Args:
            wanted: The sketch of the values.
            tolerance: The greatest relative error.

        Returns:
            The names of the best matches; none if tensors that are unlike each other match.
        """
        if not (wanted.is_float and wanted.is_distinct) or wanted.size not in self._in_order:
            return []
        start = float(wanted.projection[0])
        near = self._in_order[wanted.size].within(start, tolerance * wanted.norm)
        best = _best((wanted.order_error(self._sketches[name]), name) for name in near)
        if not best or best[0][0] > tolerance:
            return []
        first = self._sketches[best[0][1]]
        alike = all(first.order_error(self._sketches[name]) <= SAME for _, name in best)
        return [name for _, name in best] if alike else []

    def _find_in_any_order(self, wanted: Sketch, tolerance: float) -> list[str]:
        total = float(wanted.sums[1])
        near = self._in_any_order.within(total, tolerance * total)
        best = _best((wanted.content_error(self._sketches[name]), name) for name in near)
        return [name for _, name in best] if best and best[0][0] <= tolerance else []


class _Sorted:
    """Names sorted by a number, to find those near a given one."""

    def __init__(self, entries: list[tuple[float, str]]) -> None:
        self._entries = sorted(entries)
        self._numbers = [number for number, _ in self._entries]

    def within(self, number: float, distance: float) -> list[str]:
        low = bisect.bisect_left(self._numbers, number - distance)
        high = bisect.bisect_right(self._numbers, number + distance)
        return [name for _, name in self._entries[low:high]]


def _best(errors: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    ranked = sorted(errors)
    if not ranked:
        return []
    limit = max(ranked[0][0] * _CLEARLY, _NOISE)
    return [entry for entry in ranked if entry[0] <= limit]
