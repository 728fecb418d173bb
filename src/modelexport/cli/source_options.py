"""Options of the command line, made from the fields of `ExportOptions`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import click
import msgspec

from modelexport.errors import SourceError
from modelexport.options import SOURCE_KEYWORDS, Option, SourceOptions, flags_of, options_of


class Shape(click.ParamType[tuple[str, tuple[int, ...]]]):
    """A shape, of the main input or of one by name."""

    name = "[NAME=]N,N,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[int, ...]]:
        """Parse `1,128` or `input_ids=1,128`."""
        name, _, sizes = str(value).rpartition("=")
        try:
            shape = tuple(int(part) for part in sizes.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a shape; write it as 1,128 or input_ids=1,128", param, ctx)
        if min(shape) < 1:
            self.fail(f"{value!r} has a size below 1", param, ctx)
        return name.strip(), shape


class Axes(click.ParamType[tuple[str, dict[int, str]]]):
    """Symbolic axes of one input."""

    name = "NAME=N:LABEL,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, dict[int, str]]:
        """Parse `input_ids=0:batch,1:sequence`."""
        name, _, axes = str(value).partition("=")
        try:
            labels = {
                int(axis): label.strip()
                for axis, label in (part.split(":") for part in axes.split(","))
            }
        except ValueError:
            labels = {}
        if not name or not labels or not all(label.isidentifier() for label in labels.values()):
            self.fail(
                f"{value!r} names no axes; write it as input_ids=0:batch,1:sequence", param, ctx
            )
        return name, labels


class Switch(click.ParamType[bool | str]):
    """A flag that may have a value: `--flag`, or `--flag=value`.

    Args:
        choices: The values that are allowed.
    """

    name = "switch"

    def __init__(self, choices: tuple[str, ...]) -> None:
        self._choices = choices

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> bool | str:
        """Return the value, or whether the flag is given without one."""
        if isinstance(value, bool):
            return value
        if value not in (_ON, *self._choices):
            self.fail(f"{value!r} is not {' or '.join(self._choices)}", param, ctx)
        return value == _ON or str(value)


_ON = "on"


class SwitchCommand(click.Command):
    """A command with switches: a value belongs to one only behind an equals sign.

    click would take the argument that follows a switch for its value.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Write the value of each switch that has none, and parse the arguments."""
        switches = {
            flag for param in self.params if isinstance(param.type, Switch) for flag in param.opts
        }
        end = args.index("--") if "--" in args else len(args)
        given = [f"{arg}={_ON}" if arg in switches else arg for arg in args[:end]]
        return super().parse_args(ctx, [*given, *args[end:]])


def _invert(ctx: click.Context, param: click.Parameter, given: bool) -> bool:
    return not given


def _merge(
    ctx: click.Context, param: click.Parameter, pairs: Iterable[tuple[str, Any]]
) -> dict[str, Any]:
    """Collect the values of a repeatable option by input; axes of one input add up."""
    merged: dict[str, Any] = {}
    for name, value in pairs:
        merged[name] = {**merged.get(name, {}), **value} if isinstance(value, Mapping) else value
    return merged


_BY_INPUT: dict[Any, click.ParamType[Any]] = {
    dict[str, tuple[int, ...]]: Shape(),
    dict[str, dict[int, str]]: Axes(),
}
"""How the values of options that are mappings by input are written, by the type of the option."""


def _click_option(option: Option) -> Callable[[Any], Any]:
    """Return the click option for a field: its type and default decide its form."""
    spelling = option.spelling
    details: dict[str, Any] = {"help": option.description, "default": option.default}
    if option.type in _BY_INPUT:
        details = {"type": _BY_INPUT[option.type], "multiple": True, "callback": _merge}
        details["help"] = f"{option.description} Repeatable."
    elif option.type is bool and option.default:
        # An option that is on by default is a flag that turns it off. It is inverted here, since
        # versions of click disagree on the default of a flag whose value is False.
        details = {"is_flag": True, "callback": _invert, "help": spelling.flag_help}
    elif option.type is bool:
        details["is_flag"] = True
    elif option.type == bool | None:
        pass  # a pair of flags
    elif bool in get_args(option.type):
        return click.option(
            *flags_of(option),
            option.name,
            type=Switch(spelling.choices),
            metavar=f"[={'|'.join(spelling.choices)}]",
            **details,
        )
    elif spelling.choices:
        details["type"] = click.Choice(spelling.choices)
    elif spelling.is_path:
        details["type"] = click.Path()
    elif option.type == int | None:
        details["type"] = int
    if isinstance(option.default, str):
        details["show_default"] = True
    return click.option(*flags_of(option), option.name, metavar=spelling.metavar, **details)


def _apply(
    command: Callable[..., Any], options: Iterable[Callable[[Any], Any]]
) -> Callable[..., Any]:
    for option in reversed(tuple(options)):
        command = option(command)
    return command


def export_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add every option of an export to a command."""
    return _apply(command, map(_click_option, SOURCE_KEYWORDS))


def one_option(name: str) -> Callable[[Any], Any]:
    """Return the click option for one field of `ExportOptions`."""
    return next(_click_option(option) for option in SOURCE_KEYWORDS if option.name == name)


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where a model and its inputs come from; texts may be repeated."""
    options = {
        option.name: _click_option(option)
        for option in SOURCE_KEYWORDS
        if option.name in _FOR_INPUTS
    }
    options["input_text"] = click.option(
        "--input-text",
        "input_texts",
        multiple=True,
        help="Text for the model's tokenizer; repeatable, each is a run.",
    )
    return _apply(command, options.values())


_FOR_INPUTS = frozenset(
    {option.name for option in options_of(SourceOptions)} | {"trust_remote_code"}
)
_INPUTS = tuple(name for name in SourceOptions.__struct_fields__ if name.startswith("input_"))


def merge_source_options(given: SourceOptions, recorded: SourceOptions | None) -> SourceOptions:
    """Merge the given options with those recorded at export.

    Inputs are taken over as a whole or not at all: a text has nothing to do with the shapes of
    another run.
    """
    if recorded is None:
        return given
    missing = {
        name: getattr(recorded, name)
        for name in SourceOptions.__struct_fields__
        if name not in _INPUTS and not getattr(given, name)
    }
    if not any(getattr(given, name) for name in _INPUTS):
        if recorded.input_specs is not None:
            specs = recorded.input_specs
            raise SourceError(
                f"the export took its inputs from {specs}, which the file does not hold",
                hint=f"pass --input-specs {specs}, or other inputs",
            )
        missing |= {name: getattr(recorded, name) for name in _INPUTS}
    return msgspec.structs.replace(given, **missing)
