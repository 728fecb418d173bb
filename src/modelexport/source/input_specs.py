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

_WRITE = 'write it as {"NAME": {"shape": [1, 8], "dtype": "int64", "range": [0, 100]}}, or save an .npz of arrays'


class InputSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One input. `range` is the lowest value and, for whole numbers exclusive, the highest."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    range: tuple[float, float] | None = None


def read_specs(path: Path) -> dict[str, InputSpec | torch.Tensor]:
    """The specs in a JSON file, or the arrays of an `.npz`, by input name."""
    try:
        if path.suffix == ".npz":
            return _read_arrays(path)
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, InputSpec])
    except msgspec.ValidationError as error:
        raise SourceError(f"{path} does not describe inputs: {error}", hint=_WRITE) from error
    except UNREADABLE as error:
        raise SourceError(f"{path} is not JSON: {error}", hint=_WRITE) from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}", hint=_WRITE) from error
    for name, spec in found.items():
        _check(f"{path}: {name!r}", spec)
    return dict(found)


def _read_arrays(path: Path) -> dict[str, InputSpec | torch.Tensor]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {
                name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in arrays.files
            }
    except OSError:
        raise
    except Exception as error:  # numpy, zipfile and what it unpacks with raise many unrelated kinds
        told = f"{path} is no .npz of numbers: {first_line(error)}"
        raise SourceError(told, hint="save it with numpy.savez") from error


def _check(place: str, spec: InputSpec) -> None:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or not _is_plain(dtype):
        raise SourceError(
            f"{place} has the unknown dtype {spec.dtype!r}",
            hint="for example float32, int64 or bool",
        )
    if any(size < 0 for size in spec.shape):
        raise SourceError(
            f"{place} has a negative size in its shape {list(spec.shape)}", hint=_WRITE
        )
    if spec.range is None:
        return
    low, high = spec.range
    if not low < high:
        raise SourceError(
            f"{place} has the empty range {list(spec.range)}", hint="give the lowest value first"
        )
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return
    limits = torch.iinfo(dtype)
    if int(low) >= int(high) or low < limits.min or high > limits.max + 1:
        raise SourceError(
            f"{place} has the range {list(spec.range)}, in which {spec.dtype} has no value or not all",
            hint="the lowest value, and one more than the highest",
        )


def _is_plain(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be made of ordinary numbers."""
    try:
        return bool(torch.zeros(1).to(dtype).numel())
    except RuntimeError:
        return False


def make_tensor(spec: InputSpec, generator: torch.Generator) -> torch.Tensor:
    """Random values as the spec says; without a range noise, zeros and ones for whole numbers, or True."""
    try:
        return _make(spec, generator)
    except (
        RuntimeError,
        MemoryError,
        TypeError,
        ValueError,
    ) as error:  # the last two for numbers beyond 64 bits
        raise input_error(spec.shape, spec.dtype, error) from error


def input_error(shape: Sequence[int], dtype: str, error: BaseException) -> SourceError:
    """Return the error to raise for an input that is too large, or that torch cannot make."""
    return SourceError(
        f"cannot make an input of shape {shape_text(shape)} and dtype {dtype}: {first_line(error)}"[
            :300
        ],
        hint="choose a smaller shape, another range or another dtype",
    )


def _make(spec: InputSpec, generator: torch.Generator) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype == torch.bool:
        return torch.ones(spec.shape, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        if spec.range is None:
            return torch.randn(spec.shape, generator=generator).to(dtype)
        low, high = spec.range
        return (torch.rand(spec.shape, generator=generator) * (high - low) + low).to(dtype)
    low, high = spec.range or (0, 2)
    return torch.randint(int(low), int(high), spec.shape, generator=generator).to(dtype)


def format_specs(specs: Mapping[str, InputSpec]) -> str:
    """The text of a specs file, one input a line."""
    told = {
        name: {**msgspec.to_builtins(spec), "dtype": spec.dtype} for name, spec in specs.items()
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(spec)}" for name, spec in told.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as it is written on the command line."""
    return ",".join(map(str, shape))
