"""Errors and warnings of the package, and the words that messages share."""

from __future__ import annotations

from collections.abc import Sequence


def first_line(error: BaseException) -> str:
    """What an error says in its first line; its kind where it says nothing."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def describe_type(value: object) -> str:
    """Name the type of a value with its article, as in "an int" and "a str"."""
    name = type(value).__name__
    vowel = name.lower().startswith(("a", "e", "i", "o", "nd"))  # an ndarray, but a uint8
    return f"{'an' if vowel else 'a'} {name}"


class ModelExportError(Exception):
    """Base of every error here.

    `message` says what happened, `hint` what to do next, `details` has further lines; `exit_code` is what the command
    line returns.
    """

    exit_code = 2

    def __init__(
        self, message: str, *, hint: str | None = None, details: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = tuple(details)

    @property
    def headline(self) -> str:
        """The message with its hint, in one line."""
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __str__(self) -> str:
        return "\n".join((self.headline, *self.details))


class ArgumentError(ModelExportError, ValueError):
    """An argument has a value that cannot work."""


class ArgumentTypeError(ModelExportError, TypeError):
    """An argument is of the wrong kind."""


class SourceError(ModelExportError, ValueError):
    """The model or its example inputs cannot be had."""


class FileError(ModelExportError, OSError):
    """A file or folder cannot be read or written."""


class FormatError(ModelExportError, ValueError):
    """A file is not what it should be."""


class ExportError(ModelExportError, RuntimeError):
    """torch could not export the model."""

    exit_code = 3


class ModelRunError(ExportError):
    """The model itself does not run on the example inputs, with or without an export."""


class FallbackWarning(UserWarning):
    """`auto` used the torchscript exporter because dynamo failed: branches and loops are fixed to the inputs."""


class GraphmlWarning(UserWarning):
    """The model was exported, but its GraphML could not be written."""


class ExtractionWarning(UserWarning):
    """The extracted model runs, but values that the module returned are not among its outputs."""


def plural(count: int, noun: str) -> str:
    """Give a count with its noun, as in `1 node` and `1,200 nodes`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
