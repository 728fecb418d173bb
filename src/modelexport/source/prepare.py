"""What an export needs of a source: inputs, the axes that are symbolic, and where both came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.export import ExportedProgram

from modelexport.errors import ModelRunError, SourceError
from modelexport.source.dynamic import Axes, dynamic_inputs, set_axes
from modelexport.source.inputs import Wanted, example_inputs
from modelexport.source.load import Source, load_source
from modelexport.tagged.sidecar import SourceOptions


class Prepared(NamedTuple):
    """Inputs to export with, the names of their symbolic axes, and the rung of the ladder they are from."""

    inputs: Any
    axes: Axes | None
    rung: str


def open_source(model: str, options: SourceOptions, trust_remote_code: bool, seed: int) -> Source:
    """The model that a command line names."""
    return load_source(
        model,
        task=options.task,
        model_class=options.model_class,
        revision=options.revision,
        trust_remote_code=trust_remote_code,
        random_weights=options.random_weights,
        seed=seed,
    )


@contextmanager
def blaming(user_chose_inputs: bool) -> Iterator[None]:
    """Where the user chose the inputs, a model that does not run on them is bad input, not a failed export.

    They are chosen by options, or in the factory that returns them.
    """
    try:
        yield
    except ModelRunError as error:
        if user_chose_inputs:
            raise SourceError(error.message, hint=error.hint) from error
        raise


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
