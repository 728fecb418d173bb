"""Packages that only some extras install, and the error where one is missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from modelexport.errors import MissingPackageError, first_line

EXTRAS = {
    "torch": "export",
    "onnxscript": "export",
    "onnx_ir": "export",
    "transformers": "hf",
    "onnxruntime": "runtime",
    "ray": "ray",
}
"""By package, the extra of modelexport that installs it."""


def import_package(name: str, *, otherwise: str = "") -> Any:
    """Import an optional package.

    Args:
        name: Its name, one of `EXTRAS`.
        otherwise: What the user can do instead of installing it, for the hint.

    Raises:
        MissingPackageError: It is not installed or cannot be loaded.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C in its compiled part
            raise error.__cause__ from None
        raise _missing(name, first_line(error), otherwise) from error


def require_package(name: str) -> None:
    """Check that an optional package is installed, without importing it.

    Raises:
        MissingPackageError: It is not.
    """
    if importlib.util.find_spec(name) is None:
        raise _missing(name, f"No module named {name!r}")


def _missing(name: str, reason: str, otherwise: str = "") -> MissingPackageError:
    install = f"pip install 'modelexport[{EXTRAS[name]}]'"
    hint = f"{install}, or {otherwise}" if otherwise else install
    return MissingPackageError(f"this needs {name}: {reason}", hint=hint)
