"""Explain why an export failed: the cause, the operator, the line of model code."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from modelexport.errors import ModelRunError, first_line

_MOST = 300
_FILE_LINE = re.compile(r'File "([^"]+)", line (\d+), in \S+\n\s*(\S.*)')
_SOURCE_RANGE = re.compile(r"^(.+)\((\d+)\): ", re.MULTILINE)
_OPERATORS = (
    re.compile(r"OpOverload\(op='([\w.:]+)'"),
    re.compile(r"target=(?:torch\.ops\.)?([\w.]+)\]"),
    re.compile(r"operator '([\w:]+)'"),
)
_TOOLS = re.compile(
    r"[/\\](torch|onnxscript|onnx_ir|onnx|modelexport|importlib|contextlib\.py|functools\.py)([/\\]|$)"
)
"""Files of the exporters; what else is on a stack is the model's code."""


class Failure(NamedTuple):
    """Why an export failed."""

    cause: str
    operator: str | None
    place: str | None

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"{self.cause} (at {self.place})" if self.place else self.cause

    def lines(self, title: str) -> Iterator[str]:
        yield f"  {title}: {self.cause}"
        if self.operator is not None and self.operator not in self.cause:
            yield f"    operator {self.operator}"
        if self.place is not None:
            yield f"    at {self.place}"


def explain_failure(error: BaseException) -> Failure:
    """The root cause of an error, and where it points."""
    chain = list(_chain(error))
    root = chain[-1]
    return Failure(
        f"{type(root).__name__}: {first_line(root)}"[:_MOST], _operator(chain), _place(chain)
    )


def model_run_error(error: BaseException) -> ModelRunError:
    """The error to raise for one that the model itself raised on its inputs."""
    return ModelRunError(
        f"the model itself does not run on these inputs: {explain_failure(error).line}",
        hint="their number, names, shapes and dtypes have to be what forward takes",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, down to the first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _operator(chain: list[BaseException]) -> str | None:
    for error in reversed(chain):
        for pattern in _OPERATORS:
            if match := pattern.search(str(error)):
                return match[1]
    return None


def _place(chain: list[BaseException]) -> str | None:
    """The innermost line of model code that the errors, their nodes or their stacks tell of."""
    for error in reversed(chain):
        found = [*_told(str(error)), *_of_nodes(error), *_on_stack(error)]
        if found:
            return found[0]
    return None


def _told(message: str) -> Iterator[str]:
    """Lines of model code in a message, innermost first."""
    for file, number, code in reversed(_FILE_LINE.findall(message)):
        yield from _text(file, number, code)


def _of_nodes(error: BaseException) -> Iterator[str]:
    """Where the node came from that an exporter was working on: it is a local variable of some frame."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for name in ("node", "n", "fx_node"):
            node: Any = frame.f_locals.get(name)
            if isinstance(meta := getattr(node, "meta", None), dict):
                yield from _told(str(meta.get("stack_trace")))
            elif callable(getattr(node, "sourceRange", None)):
                for file, number in _SOURCE_RANGE.findall(node.sourceRange()):
                    yield from _text(file, number, "")


def _on_stack(error: BaseException) -> Iterator[str]:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith("<") and frame.line:
            yield from _text(frame.filename, frame.lineno or 0, frame.line)


def _text(file: str, number: int | str, code: str) -> Iterator[str]:
    """A line of model code; the end of the path is enough to find a file, and says nothing of the machine."""
    if not _TOOLS.search(file):
        yield f"{short_location(file, number)}{': ' if code else ''}{code[:120]}"


def short_location(file: str, number: int | str) -> str:
    """Return the end of a path with a line number."""
    return f"{'/'.join(Path(file).parts[-2:])}:{number}"
