"""Options of commands that load a model and make its inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from modelexport.errors import SourceError
from modelexport.tagged.records import SourceOptions


class Shape(click.ParamType[tuple[str, tuple[int, ...]]]):
    name = "[NAME=]N,N,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[int, ...]]:
        name, _, sizes = str(value).rpartition("=")
        try:
            shape = tuple(int(part) for part in sizes.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a shape; write it as 1,128 or input_ids=1,128", param, ctx)
        if min(shape) < 1:
            self.fail(f"{value!r} has a size below 1", param, ctx)
        return name.strip(), shape


_TEXT = click.option("--input-text", help="Text for the model's tokenizer.")
_TEXTS = click.option(
    "--input-text",
    "input_texts",
    multiple=True,
    help="Text for the model's tokenizer; repeatable, each is a run.",
)
_OPTIONS = (
    click.option(
        "--input-shape",
        type=Shape(),
        multiple=True,
        help="Shape of the main input (1,128) or of one by name; repeatable.",
    ),
    click.option(
        "--input-specs",
        type=click.Path(path_type=Path),
        help="JSON that describes each input, or an .npz with arrays.",
    ),
    click.option("--task", help="Load the head for this task, for example text-classification."),
    click.option("--model-class", help="Load this class of transformers."),
    click.option("--revision", help="Branch, tag or commit on the hub."),
    click.option(
        "--trust-remote-code", is_flag=True, help="Run the code that comes with the model."
    ),
    click.option(
        "--random-weights",
        is_flag=True,
        help="Build from the configuration alone, without the weights.",
    ),
)


def input_options(command: Callable[..., Any], several_texts: bool = False) -> Callable[..., Any]:
    """Adds these options to a command; one that runs several times may take several texts."""
    for option in reversed((_TEXTS if several_texts else _TEXT, *_OPTIONS)):
        command = option(command)
    return command


def merge_source_options(given: SourceOptions, recorded: SourceOptions | None) -> SourceOptions:
    """What is said now, and of what is not said what the export was told.

    Inputs are taken over as a whole or not at all: a text has nothing to do with another run's shapes.
    """
    if recorded is None:
        return given
    inputs = (given.input_text, given.input_shapes, given.input_specs)
    if not any(inputs):
        if recorded.input_specs is not None:
            raise SourceError(
                f"the export took its inputs from {recorded.input_specs}, which the file does not hold",
                hint=f"pass --input-specs {recorded.input_specs}, or other inputs",
            )
        inputs = (recorded.input_text, recorded.input_shapes, None)
    return msgspec.structs.replace(
        given,
        task=given.task or recorded.task,
        model_class=given.model_class or recorded.model_class,
        revision=given.revision or recorded.revision,
        random_weights=given.random_weights or recorded.random_weights,
        input_text=inputs[0],
        input_shapes=inputs[1],
        input_specs=inputs[2],
    )
