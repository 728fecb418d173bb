"""Inputs to run a file on: from a file, as the export recorded them, or random."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx

from modelexport.errors import ArgumentError, FileError, FormatError, first_line
from modelexport.onnx_file.model_file import StrPath, as_path
from modelexport.option_values import spell_option
from modelexport.tagged.example_inputs import Array, draw_example
from modelexport.tagged.model import TaggedModel
from modelexport.tagged.records import ExampleInput

_UNKNOWN_SIZE = 2
"""The size of a symbolic axis in random inputs."""


class Feeds(NamedTuple):
    """The values to feed to a file, and where they come from."""

    values: dict[str, Array]
    source: str
    """In words: `the inputs in x.npz`, `the recorded inputs` or `random inputs`."""


def make_feeds(
    model: TaggedModel, inputs: StrPath | Mapping[str, Array] | None = None, seed: int = 0
) -> Feeds:
    """Return inputs for a file.

    Args:
        model: The file.
        inputs: Arrays by input name, or an `.npz` file with them; None for those that the export
            recorded, or random ones for a file without such a record.
        seed: The seed of what is drawn.

    Returns:
        The values by input name.

    Raises:
        ArgumentError: An input is missing, or has another shape.
        FileError: The file cannot be read.
        FormatError: It is not an `.npz` file of numbers.
    """
    names = model.graph.inputs
    if inputs is not None:
        values, source = _read_given(inputs)
        missing = [name for name in names if name not in values]
        if missing:
            raise ArgumentError(
                f"{source}: no value for the input {missing[0]!r}",
                hint=f"the inputs of {model.path.name} are {', '.join(names)}",
            )
        return Feeds({name: values[name] for name in names}, source)
    generator = np.random.default_rng(seed)
    records = model.records
    examples = records.export.example_inputs if records is not None else {}
    if all(name in examples for name in names):
        drawn = {name: draw_example(examples[name], generator) for name in names}
        return Feeds(drawn, "the recorded inputs")
    declared = {value.name: value for value in model.proto.graph.input}
    return Feeds({n: draw_example(_guess(declared[n]), generator) for n in names}, "random inputs")


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
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or first_line(error)}") from error
    except (ValueError, zipfile.BadZipFile, EOFError, AttributeError, KeyError) as error:
        raise FormatError(
            f"{path} is no .npz of numbers: {first_line(error)}", hint="save it with numpy.savez"
        ) from error


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
