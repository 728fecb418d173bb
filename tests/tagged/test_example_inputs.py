"""Example inputs in the map: recorded, drawn again, and damaged."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from modelexport.errors import FormatError
from modelexport.tagged.example_inputs import draw_example, record_example
from modelexport.tagged.records import ExampleInput

pytestmark = pytest.mark.sanity


@pytest.mark.regression
def test_the_largest_integers_are_drawn_again() -> None:
    for dtype in (np.int64, np.uint64):
        example = record_example(np.full(2000, np.iinfo(dtype).max, dtype))
        drawn = draw_example(example, np.random.default_rng(0))
        assert (drawn.dtype, drawn.shape) == (np.dtype(dtype), (2000,))


@pytest.mark.parametrize(
    "changes",
    [
        {"values": (1, 2, 3)},
        {"dtype": "float33"},
        {"dtype": "(,)f4"},
        {"dtype": "(2,)f4"},
        {"dtype": "object"},
        {"dtype": "void64"},
        {"dtype": "datetime64[s]"},
        {"shape": (-2,)},
        {"low": 5.0, "high": 1.0},
        {"shape": (1 << 60,)},
        {"low": math.nan},
    ],
)
def test_a_damaged_record_of_inputs_is_one_error(changes: dict[str, Any]) -> None:
    example = msgspec.structs.replace(ExampleInput("int64", (2,), 0.0, 9.0), **changes)
    with pytest.raises(FormatError, match="recorded example inputs cannot be made again"):
        draw_example(example, np.random.default_rng(0))
