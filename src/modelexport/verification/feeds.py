"""Inputs to run a file on: from a file, as the export recorded them, or random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import onnx

from modelexport.errors import ArgumentError, FileError, FormatError, first_line
from modelexport.onnx_file.model_file import StrPath, as_path
from modelexport.option_values import spell_option
from modelexport.tagged.example_inputs import Array, draw_example, numeric_kind
from modelexport.tagged.model import TaggedModel
from modelexport.tagged.records import ExampleInput, TensorInfo
from modelexport.tagged.tables import tensor_infos

_UNKNOWN_SIZE = 2
"""The size of a symbolic axis in random inputs."""


class Feeds(NamedTuple):
    """The values to feed to a file, and where they come from."""

    values: dict[str, Array]
    source: str
    """In words: `the inputs in x.npz`, `the recorded inputs`, `inputs like the recorded ones` or
    `random inputs`."""


def make_feeds(
    model: TaggedModel,
    inputs: StrPath | Mapping[str, Array] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Feeds:
    """Return inputs for a file.

    Args:
        model: The file.
        inputs: Arrays by input name, or an `.npz` file with them; None for those that the export
            recorded, or random ones for a file without such a record.
        shapes: Other shapes by input name, for a file with symbolic axes; the axes of the other
            inputs follow.

    Returns:
        The values by input name.

    Raises:
        ArgumentError: An input is missing, or has another shape.
        FileError: The file cannot be read.
        FormatError: It is not an `.npz` file of numbers.
    """
    names = model.graph.inputs
    if inputs is not None and shapes:
        raise ArgumentError(
            f"{spell_option('inputs')} and {spell_option('input_shapes')} exclude each other",
            hint="the arrays have their own shapes",
        )
    declared = {value.name: value for value in model.proto.graph.input if value.name in names}
    if inputs is not None:
        values, source = _read_given(inputs)
        missing = [name for name in names if name not in values]
        if missing:
            raise ArgumentError(
                f"{source}: no value for the input {missing[0]!r}",
                hint=f"the inputs of {model.path.name} are {', '.join(names)}",
            )
        for info in tensor_infos(model.proto.graph.input):
            if info.name in names and not fits_shape(info, values[info.name].shape):
                raise ArgumentError(
                    f"{source}: {info.name!r} must be {describe_shape(info.shape)}, "
                    f"got {describe_shape(values[info.name].shape)}",
                    hint="only symbolic axes can have other sizes",
                )
        given = {name: _as_declared(values[name], declared[name]) for name in names}
        return Feeds(given, source)
    generator = np.random.default_rng(0)
    records = model.records
    examples = records.export.example_inputs if records is not None else {}
    source = "the recorded inputs"
    if not all(name in examples for name in names):
        examples, source = {n: _guess(declared[n]) for n in names}, "random inputs"
    elif any(examples[name].values is msgspec.UNSET for name in names):
        source = "inputs like the recorded ones"
    if shapes:
        examples = _reshape(examples, declared, shapes)
        source = "random inputs"
    return Feeds({name: draw_example(examples[name], generator) for name in names}, source)


def _reshape(
    examples: Mapping[str, ExampleInput],
    declared: Mapping[str, onnx.ValueInfoProto],
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, ExampleInput]:
    """Give examples other shapes: those that the caller chose, and symbolic axes of equal names."""
    unknown = next((name for name in shapes if name not in declared), None)
    if unknown is not None:
        raise ArgumentError(
            f"the file has no input {unknown!r}", hint=f"its inputs are {', '.join(declared)}"
        )
    symbols: dict[str, int] = {}
    for name, shape in shapes.items():
        (info,) = tensor_infos([declared[name]])
        if not fits_shape(info, shape):
            raise ArgumentError(
                f"the input {name!r} is {describe_shape(info.shape)}, got {describe_shape(shape)}",
                hint="only symbolic axes can have other sizes; export with --dynamic",
            )
        # An input without a declared shape has no axes here, whatever its rank is.
        for dim, size in zip(info.shape, shape, strict=False):
            if isinstance(dim, str):
                symbols[dim] = size
    resized = {}
    for name, example in examples.items():
        (info,) = tensor_infos([declared[name]])
        shape = tuple(shapes.get(name, example.shape))
        if info.shape:
            shape = tuple(
                symbols.get(dim, size) if isinstance(dim, str) else size
                for dim, size in zip(info.shape, shape, strict=False)
            )
        values = example.values if shape == example.shape else msgspec.UNSET
        resized[name] = msgspec.structs.replace(example, shape=shape, values=values)
    return resized


def fits_shape(info: TensorInfo, shape: Sequence[int]) -> bool:
    """Return whether a shape is one that a value declares; a value without one takes any."""
    return not info.shape or (
        len(info.shape) == len(shape)
        and all(
            not isinstance(dim, int) or dim == size
            for dim, size in zip(info.shape, shape, strict=True)
        )
    )


def describe_shape(shape: Sequence[int | str | None]) -> str:
    """Describe a shape, as in `[2,?]`."""
    return f"[{','.join('?' if dim is None else str(dim) for dim in shape)}]"


def _read_given(inputs: StrPath | Mapping[str, Array]) -> tuple[dict[str, Array], str]:
    if isinstance(inputs, Mapping):
        return {name: np.asarray(value) for name, value in inputs.items()}, "the given inputs"
    path = as_path(inputs)
    return read_arrays(path), f"the inputs in {path.name}"


def read_arrays(path: Path) -> dict[str, Array]:
    """Read the arrays of an `.npz` file, without unpickling anything.

    Args:
        path: The file.

    Returns:
        The arrays by name.

    Raises:
        FileError: It cannot be read.
        FormatError: It is not an `.npz` file of numbers.
    """
    try:
        # numpy leaves a file open that it opened and cannot read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or first_line(error)}") from error
    except Exception as error:  # numpy, zipfile and its decompressors raise many unrelated types
        raise FormatError(
            f"{path} is not an .npz file of numbers: {first_line(error)}",
            hint="save it with numpy.savez",
        ) from error


def _as_declared(array: Array, value: onnx.ValueInfoProto) -> Array:
    """Cast numbers to the type that the file declares: not every tool of ONNX Runtime does."""
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    except KeyError:
        return array
    both = {numeric_kind(array.dtype), numeric_kind(dtype)}
    return array.astype(dtype, copy=False) if both <= set("bif") else array


def _guess(value: onnx.ValueInfoProto) -> ExampleInput:
    """Describe an input by its declared type: floats around zero, or zeros and ones."""
    tensor = value.type.tensor_type
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    except KeyError as error:
        raise ArgumentError(
            f"the input {value.name!r} is not a tensor of numbers",
            hint=f"pass an .npz file as {spell_option('inputs')}",
        ) from error
    shape = tuple(dim.dim_value or _UNKNOWN_SIZE for dim in tensor.shape.dim)
    return ExampleInput(dtype.name, shape, -1 if dtype.kind == "f" else 0, 1)
