"""Example inputs in the map: record their types and ranges, and draw arrays like them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from modelexport.errors import FormatError, first_line
from modelexport.tagged.records import ExampleInput

Array = np.ndarray[Any, Any]

_MOST_RECORDED = 1024
"""How many integers of an example input are recorded as they are."""
_NUMBERS = "biufcV"
"""numpy's kinds of numbers; ml_dtypes registers bfloat16 and the float8 types as kind V."""


def record_example(array: Array) -> ExampleInput:
    """Record what it takes to draw inputs like an example.

    Args:
        array: The example.

    Returns:
        Type, shape and range; of few integers or bools, the values themselves.
    """
    kind = array.dtype.kind
    low: float
    high: float
    if kind in "iub":
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    else:
        finite = array[np.isfinite(array)].astype(np.float64) if kind == "f" else np.zeros(0)
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    exact = kind in "iub" and array.size <= _MOST_RECORDED
    return ExampleInput(
        dtype=array.dtype.name,
        shape=array.shape,
        low=float(low),
        high=float(high),
        values=tuple(int(each) for each in array.reshape(-1)) if exact else msgspec.UNSET,
    )


def draw_example(example: ExampleInput, generator: np.random.Generator) -> Array:
    """Draw an input like a recorded one, uniformly from the range of its values.

    Raises:
        FormatError: The record is damaged.
    """
    try:
        return _draw(example, generator)
    except (TypeError, ValueError, OverflowError, SyntaxError) as error:  # numpy parses the type
        raise FormatError(
            f"the recorded example inputs cannot be made again: {first_line(error)}",
            hint="pass inputs of your own",
        ) from error


def _draw(example: ExampleInput, generator: np.random.Generator) -> Array:
    dtype = np.dtype(example.dtype)
    if dtype.name != example.dtype or dtype.kind not in _NUMBERS or dtype.type is np.void:
        raise TypeError(f"{example.dtype!r} is not a type of numbers")
    if example.values is not msgspec.UNSET:
        return np.array(example.values).reshape(example.shape).astype(dtype)
    if dtype.kind in "iub":
        wide = np.dtype(np.uint64 if dtype == np.uint64 else np.int64)
        # The record has floats, which round the largest integers up.
        most = int(np.iinfo(wide).max)
        least, greatest = (min(int(bound), most) for bound in (example.low, example.high))
        drawn: Array = generator.integers(least, greatest, example.shape, dtype=wide, endpoint=True)
        return drawn.astype(dtype)
    low, high = example.low, example.high
    if low == high:
        low, high = low - 1, high + 1
    return generator.uniform(low, high, example.shape).astype(dtype)


def numeric_kind(dtype: np.dtype[Any]) -> str:
    """Return `f` for floats, `i` for signed and unsigned integers, else numpy's kind of a dtype."""
    return {"V": "f", "u": "i"}.get(dtype.kind, dtype.kind)
