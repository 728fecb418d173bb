"""Input specs: JSON or .npz files that describe example inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from modelexport.errors import SourceError, first_line
from modelexport.tagged.records import UNREADABLE

_FORM = (
    'write it as {"NAME": {"shape": [1, 8], "dtype": "int64", "range": [0, 100]}}, '
    "or save an .npz of arrays"
)
_MAX_MESSAGE = 300


class InputSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One input; `range` is its lowest and its highest value, which integers do not reach."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    range: tuple[float, float] | None = None


def read_specs(path: Path) -> dict[str, InputSpec | torch.Tensor]:
    """Read a specs file.

    Args:
        path: A JSON file of specs, or an `.npz` of arrays.

    Returns:
        Specs or tensors, by input name.

    Raises:
        SourceError: If the file cannot be read or does not describe inputs.
    """
    try:
        if path.suffix == ".npz":
            return _read_arrays(path)
        specs = msgspec.json.decode(path.read_bytes(), type=dict[str, InputSpec])
    except msgspec.ValidationError as error:
        raise SourceError(f"{path} does not describe inputs: {error}", hint=_FORM) from error
    except UNREADABLE as error:
        raise SourceError(f"{path} is not JSON: {error}", hint=_FORM) from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}", hint=_FORM) from error
    for name, spec in specs.items():
        _check(f"{path}: {name!r}", spec)
    return dict(specs)


def _read_arrays(path: Path) -> dict[str, InputSpec | torch.Tensor]:
    """Read the arrays of an .npz file, without unpickling anything."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {
                name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in arrays.files
            }
    except OSError:
        raise
    except Exception as error:  # numpy, zipfile and its decompressors raise many unrelated types
        raise SourceError(
            f"{path} is no .npz of numbers: {first_line(error)}", hint="save it with numpy.savez"
        ) from error


def _check(label: str, spec: InputSpec) -> None:
    """Raise for a spec that no tensor can be made from."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or not _holds_numbers(dtype):
        raise SourceError(
            f"{label} has the unknown dtype {spec.dtype!r}",
            hint="for example float32, int64 or bool",
        )
    if any(size < 0 for size in spec.shape):
        raise SourceError(
            f"{label} has a negative size in its shape {list(spec.shape)}", hint=_FORM
        )
    if spec.range is None:
        return
    low, high = spec.range
    if not low < high:
        raise SourceError(
            f"{label} has the empty range {list(spec.range)}", hint="give the lowest value first"
        )
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return
    limits = torch.iinfo(dtype)
    if int(low) >= int(high) or low < limits.min or high > limits.max + 1:
        raise SourceError(
            f"{label} has the range {list(spec.range)}, which {spec.dtype} cannot represent",
            hint="give the lowest value, and one more than the highest",
        )


def _holds_numbers(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype can be made from ordinary numbers."""
    try:
        return bool(torch.zeros(1).to(dtype).numel())
    except RuntimeError:
        return False


def make_tensor(spec: InputSpec, generator: torch.Generator) -> torch.Tensor:
    """Make a random tensor.

    Without a range, floats are drawn from a normal distribution, integers are 0 or 1, and bools are
    True.

    Args:
        spec: What to make.
        generator: The source of random values.

    Returns:
        The tensor.

    Raises:
        SourceError: If torch cannot make it, for example for lack of memory.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    try:
        if dtype == torch.bool:
            return torch.ones(spec.shape, dtype=dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            low, high = spec.range or (0, 2)
            return torch.randint(int(low), int(high), spec.shape, generator=generator).to(dtype)
        if spec.range is None:
            return torch.randn(spec.shape, generator=generator).to(dtype)
        low, high = spec.range
        return (torch.rand(spec.shape, generator=generator) * (high - low) + low).to(dtype)
    except (RuntimeError, MemoryError, TypeError, ValueError) as error:
        # torch raises TypeError and ValueError for numbers beyond 64 bits.
        raise input_error(spec.shape, spec.dtype, error) from error


def input_error(shape: Sequence[int], dtype: str, error: BaseException) -> SourceError:
    """Build the error for an input that torch cannot make.

    Args:
        shape: The shape of the input.
        dtype: Its dtype.
        error: What torch raised.

    Returns:
        The error to raise.
    """
    message = f"cannot make an input of shape {shape_text(shape)} and dtype {dtype}"
    return SourceError(
        f"{message}: {first_line(error)}"[:_MAX_MESSAGE],
        hint="choose a smaller shape, another range or another dtype",
    )


def format_specs(specs: Mapping[str, InputSpec]) -> str:
    """Format specs as the text of a specs file, one input a line.

    Args:
        specs: Specs by input name.

    Returns:
        JSON.
    """
    fields = {
        name: msgspec.to_builtins(spec) | {"dtype": spec.dtype} for name, spec in specs.items()
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(spec)}" for name, spec in fields.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape as the command line takes it.

    Args:
        shape: The sizes.

    Returns:
        The sizes with commas between them.
    """
    return ",".join(map(str, shape))
