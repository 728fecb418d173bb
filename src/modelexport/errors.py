"""Every error this package raises, each with what to do next.

ModelExportError                 anything below; `hint` says what to do, `exit_code` what the command line returns
  ArgumentError (ValueError)     an argument has a value that cannot work
  ArgumentTypeError (TypeError)  an argument is of the wrong kind
  SourceError (ValueError)       the model or its example inputs cannot be had
  FileError (OSError)            a file or folder cannot be read or written
  FormatError (ValueError)       a file is not what it should be
  ExportError (RuntimeError)     torch could not export the model
"""

from __future__ import annotations


class ModelExportError(Exception):
    """Base of every error here: a message, and a hint that says what to do next."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


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
