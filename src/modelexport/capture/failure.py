"""Explain why an export failed: the cause, the operator, the line of model code."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from modelexport.errors import ModelRunError, causes, first_line

_MAX_CAUSE = 300
_MAX_CODE = 120
_FILE_LINE = re.compile(r'File "([^"]+)", line (\d+), in \S+\n\s*(\S.*)')
_SOURCE_RANGE = re.compile(r"^(.+)\((\d+)\): ", re.MULTILINE)
_OPERATORS = (
    re.compile(r"OpOverload\(op='([\w.:]+)'"),
    re.compile(r"target=(?:torch\.ops\.)?([\w.]+)\]"),
    re.compile(r"operator '([\w:]+)'"),
)
_EXPORTER_FILES = re.compile(
    r"[/\\](torch|onnxscript|onnx_ir|onnx|modelexport|importlib|contextlib\.py|functools\.py)([/\\]|$)"
)
"""The files of the exporters; any other file on a stack is model code."""


class Failure(NamedTuple):
    """Why an export failed."""

    cause: str
    """The type and the first line of the root error."""
    operator: str | None
    """The operator that it names."""
    location: str | None
    """The line of model code."""

    @property
    def line(self) -> str:
        """The cause and the location in one line."""
        return f"{self.cause} (at {self.location})" if self.location else self.cause

    def lines(self, title: str) -> Iterator[str]:
        """Yield the failure as indented lines under a title."""
        yield f"  {title}: {self.cause}"
        if self.operator is not None and self.operator not in self.cause:
            yield f"    operator {self.operator}"
        if self.location is not None:
            yield f"    at {self.location}"


def explain_failure(error: BaseException) -> Failure:
    """Explain an error by its root cause."""
    chain = causes(error, implicit=False)
    root = f"{type(chain[-1]).__name__}: {first_line(chain[-1])}"
    return Failure(root[:_MAX_CAUSE], _operator(chain), _location(chain))


def model_run_error(error: BaseException) -> ModelRunError:
    """Return the error to raise for one that the model itself raised on its inputs."""
    return ModelRunError(
        f"the model itself does not run on these inputs: {explain_failure(error).line}",
        hint="their number, names, shapes and dtypes have to be those that forward takes",
    )


def short_location(file: str, number: int | str) -> str:
    """Return the end of a path with a line number.

    That is enough to find a file, and reveals nothing about the machine.
    """
    return f"{'/'.join(Path(file).parts[-2:])}:{number}"


def _operator(chain: list[BaseException]) -> str | None:
    texts = [str(error) for error in reversed(chain)]
    matches = (pattern.search(text) for text in texts for pattern in _OPERATORS)
    return next((match[1] for match in matches if match), None)


def _location(chain: list[BaseException]) -> str | None:
    """Return the innermost line of model code that the errors, their nodes or stacks name."""
    for error in reversed(chain):
        for file, number, code in (*_in_text(str(error)), *_of_nodes(error), *_on_stack(error)):
            if not _EXPORTER_FILES.search(file):
                return f"{short_location(file, number)}{': ' if code else ''}{code[:_MAX_CODE]}"
    return None


_Line = tuple[str, int | str, str]
"""A file, the number of a line, and its code."""


def _in_text(text: str) -> Iterator[_Line]:
    """Yield the lines of code that a text names, innermost first."""
    yield from reversed(_FILE_LINE.findall(text))


def _of_nodes(error: BaseException) -> Iterator[_Line]:
    """Yield the source of the node that an exporter was working on: a local of some frame."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for name in ("node", "n", "fx_node"):
            node: Any = frame.f_locals.get(name)
            if isinstance(meta := getattr(node, "meta", None), dict):
                yield from _in_text(str(meta.get("stack_trace")))
            elif callable(getattr(node, "sourceRange", None)):
                yield from ((*line, "") for line in _SOURCE_RANGE.findall(node.sourceRange()))


def _on_stack(error: BaseException) -> Iterator[_Line]:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith("<") and frame.line:
            yield frame.filename, frame.lineno or 0, frame.line
