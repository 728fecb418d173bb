"""Errors and warnings of the package, and the wording that messages share.

Exception
└── ModelExportError              every error that the package raises on purpose
    ├── ArgumentError             also a ValueError: an argument has a value that cannot work
    │   └── UnknownOptionError    also a TypeError: there is no option of this name
    ├── ArgumentTypeError         also a TypeError: an argument has the wrong type
    ├── SourceError               also a ValueError: the model or its inputs cannot be loaded
    │   └── MissingPackageError   also an ImportError: a package of an extra is not installed
    ├── FileError                 also an OSError: a file cannot be read or written
    ├── FormatError               also a ValueError: a file does not have the expected content
    │   └── NotDescendedError     a changed file was not made from the given original
    └── ExportError               also a RuntimeError: torch cannot export the model
        └── ModelRunError         the model does not run on the example inputs

UserWarning
├── FallbackWarning               auto used another exporter, because dynamo failed
├── GraphmlWarning                the model was exported, but not its GraphML
├── ViewWarning                   the model was exported, but not its page
└── ExtractionWarning             an extracted model lacks outputs that its module returned
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ModelExportError(Exception):
    """Base class of all errors of the package.

    `message` says what is wrong, `hint` what to do next, `details` has further lines; `exit_code`
    is what the command line returns.
    """

    exit_code = 2

    def __init__(
        self, message: str, *, hint: str | None = None, details: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: tuple[str, ...] = tuple(details)

    @property
    def headline(self) -> str:
        """The message and its hint, in one line."""
        return with_hint(self.message, self.hint)

    def __str__(self) -> str:
        return "\n".join((self.headline, *self.details))


class ArgumentError(ModelExportError, ValueError):
    """An argument has a value that cannot work."""


class UnknownOptionError(ArgumentError, TypeError):
    """An option has an unknown name; the hint suggests the nearest one."""


class ArgumentTypeError(ModelExportError, TypeError):
    """An argument has the wrong type."""


class SourceError(ModelExportError, ValueError):
    """The model or its example inputs cannot be loaded."""


class MissingPackageError(SourceError, ImportError):
    """A package is not installed; the hint names the extra that installs it."""


class FileError(ModelExportError, OSError):
    """A file or folder cannot be read or written."""


class FormatError(ModelExportError, ValueError):
    """A file does not have the expected content."""


class NotDescendedError(FormatError):
    """A changed file was not made from the given original."""

    exit_code = 1


class ExportError(ModelExportError, RuntimeError):
    """The exporter of torch cannot export the model."""

    exit_code = 3


class ModelRunError(ExportError):
    """The model does not run on the example inputs, with or without an export."""


class FallbackWarning(UserWarning):
    """`auto` used another exporter, because dynamo failed.

    With torchscript, branches and loops of the model are fixed to the path that the example inputs
    took.
    """


class GraphmlWarning(UserWarning):
    """The model was exported, but its GraphML could not be written."""


class ViewWarning(UserWarning):
    """The model was exported, but the page to look at it could not be written."""


class ExtractionWarning(UserWarning):
    """The extracted model runs, but values that the module returned are not among its outputs."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def causes(error: BaseException, implicit: bool = True) -> list[BaseException]:
    """Return an error and those that it was raised from, each once: an error may be its own cause.

    Args:
        error: The error.
        implicit: Whether an error counts during whose handling another was raised, without `from`.
    """
    chain = [error]
    while True:
        last = chain[-1]
        cause = last.__cause__ or (last.__context__ if implicit else None)
        if cause is None or any(cause is each for each in chain):
            return chain
        chain.append(cause)


def describe_type(value: object) -> str:
    """Name the type of a value with its article, as in "an int" and "a str"."""
    name = type(value).__name__
    vowel = name.lower().startswith(("a", "e", "i", "o", "nd"))  # an ndarray, but a uint8
    return f"{'an' if vowel else 'a'} {name}"


def with_hint(message: str, hint: str | None) -> str:
    """Append a hint to a message: in parentheses, or after a semicolon where it ends in some."""
    if not hint:
        return message
    return f"{message}; {hint}" if message.endswith(")") else f"{message} ({hint})"


def suggest_name(name: str, known: Sequence[str]) -> str:
    """Return the hint for an unknown name: the nearest known one if any, and all of them."""
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{meant}known: {', '.join(known)}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, given in the singular, as in `1 node` and `1,200 nodes`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
