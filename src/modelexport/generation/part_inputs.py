"""Make the inputs of one part again, as they were for its export, and its shapes for a cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from modelexport.errors import ArgumentError, FileError, FormatError
from modelexport.generation.records import GenerationFile, InputRole, read_generation
from modelexport.tagged.records import ExportRecord

if TYPE_CHECKING:
    from torch import nn

    from modelexport.capture.inputs import ModelInputs
    from modelexport.source.example_inputs import InputRequest
    from modelexport.source.load import LoadedModel


class PartInputs(NamedTuple):
    """The module of a part, the inputs that `generate` gives it, and where those come from."""

    model: nn.Module
    inputs: ModelInputs
    origin: str


class FoundGeneration(NamedTuple):
    """A generation file that names a part."""

    path: Path
    record: GenerationFile


def make_part_inputs(
    source: LoadedModel, wanted: InputRequest, export: ExportRecord, path: Path, seed: int
) -> PartInputs:
    """Run `generate` as the export did, and return what it gave to one part.

    Args:
        source: The model.
        wanted: What the user says about the inputs.
        export: How the part was exported.
        path: The file of the part.
        seed: The seed of random inputs.

    Returns:
        The module and its inputs, caches included.

    Raises:
        ArgumentError: The model has no such part.
        SourceError: The model does not generate text.
    """
    from modelexport.capture.inputs import ModelInputs
    from modelexport.generation.export import widen_inputs
    from modelexport.generation.parts import split_model
    from modelexport.source.generation_inputs import make_generation_inputs

    inputs, origin = make_generation_inputs(source, wanted, seed)
    found = find_generation(path)
    longest = None if found is None else found.record.max_cache_length
    split = split_model(
        source.model,  # type: ignore[arg-type]  # make_generation_inputs has checked it
        widen_inputs(inputs),
        longest,
    )
    for part in split.parts:
        if part.name == export.part:
            return PartInputs(part.model, ModelInputs((), part.inputs), f"{origin}, by generate()")
    names = ", ".join(part.name for part in split.parts)
    raise ArgumentError(f"{source.name} has no part {export.part!r}", hint=f"its parts are {names}")


def find_generation(path: Path) -> FoundGeneration | None:
    """Find the generation file beside a part that names it; None if there is none."""
    for candidate in sorted(path.parent.glob("*_generation.json")):
        try:
            record = read_generation(candidate)
        except (FileError, FormatError):
            continue
        if any(part.onnx == path.name for part in record.parts.values()):
            return FoundGeneration(candidate, record)
    return None


def cache_shapes(path: Path, length: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs of a part for one token after a number of others.

    Args:
        path: The file of the part, with its generation file beside it.
        length: How many tokens the cache holds.

    Returns:
        The shapes by input name.

    Raises:
        ArgumentError: There is no generation file, or the part has no cache that grows.
    """
    found = find_generation(path)
    if found is None:
        raise ArgumentError(
            f"no generation file beside {path.name} names it",
            hint="pass the shape of each input with --input-shape",
        )
    part = next(part for part in found.record.parts.values() if part.onnx == path.name)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, one in part.inputs.items():
        match one.role:
            case InputRole.TOKENS | InputRole.CONSTANT:
                shapes[name] = (1, 1)
            case InputRole.MASK:
                shapes[name] = (1, length + 1)
            case InputRole.STATE if 0 in one.empty:
                shapes[name] = tuple(size or length for size in one.empty)
    if not any(0 in one.empty for one in part.inputs.values()):
        raise ArgumentError(f"{path.name} has no cache that grows", hint="leave --cache-length out")
    return shapes
