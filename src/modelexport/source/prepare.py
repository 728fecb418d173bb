"""What an export needs of a source: inputs, the axes that are symbolic, and where both came from."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.export import ExportedProgram

from modelexport.errors import SourceError
from modelexport.source.dynamic import Axes, dynamic_inputs, set_axes
from modelexport.source.inputs import Wanted, example_inputs
from modelexport.source.load import Source


class Prepared(NamedTuple):
    """Inputs to export with, the names of their symbolic axes, and the rung of the ladder they are from."""

    inputs: Any
    axes: Axes | None
    rung: str


def prepare(source: Source, wanted: Wanted, dynamic: bool, axes: Axes, seed: int) -> Prepared:
    """Inputs for a source, dynamic ones if asked for."""
    example = example_inputs(source, wanted, seed)
    if not dynamic and not axes:
        return Prepared(example.inputs, None, example.rung)
    if isinstance(source.model, ExportedProgram):
        raise SourceError(
            f"{source.name} has its shapes in it, fixed or dynamic", hint="choose them in torch.export.export"
        )
    found = set_axes(source.model, example, axes) if axes else dynamic_inputs(source.model, example)
    if not found.axes:
        raise SourceError(
            "no axis can be dynamic: the model runs at no other size than this",
            hint="leave --dynamic out, or set axes with --dynamic-axes",
        )
    return Prepared(found.inputs, found.axes, example.rung)
