"""Collect the warnings of the tracer: values of the example inputs that the file keeps as constants."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.jit._trace import TracerWarning

from modelexport.capture.failure import short_location
from modelexport.capture.trace import TracerNote
from modelexport.errors import first_line

_LONGEST = 200
_SENTENCE_END = re.compile(r"[.!](\s|$)")
_FOLDERS = re.compile(r"(?<!\w)(/[^\s/:'\"]+)+/(?=[^\s/:'\"]+/[^\s/:'\"]+)")


@contextmanager
def collect_tracer_warnings(verbose: bool) -> Iterator[list[TracerNote]]:
    """Collect the warnings about model code while the block runs; verbose also shows them."""
    notes: list[TracerNote] = []
    with warnings.catch_warnings():
        show: Any = warnings.showwarning

        def collect(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            *rest: Any,
            **named: Any,
        ) -> None:
            is_note = issubclass(category, TracerWarning)
            if is_note:
                notes.append(TracerNote(short_location(filename, lineno), _first_sentence(message)))
            if verbose or not is_note:
                show(message, category, filename, lineno, *rest, **named)

        warnings.showwarning = collect
        warnings.filterwarnings("always", category=TracerWarning)
        ignore_lib_warnings: Any = TracerWarning.ignore_lib_warnings
        ignore_lib_warnings()  # torch's own checks of shapes warn as well
        yield notes


def _first_sentence(message: Any) -> str:
    line = _FOLDERS.sub("", first_line(message))
    return _SENTENCE_END.split(line, maxsplit=1)[0][:_LONGEST]


def note_lines(notes: Iterable[TracerNote], with_places: bool) -> tuple[str, ...]:
    """Return each note once, in one line; without places they say nothing of the model's code."""
    lines = (f"{note.place}: {note.text}" if with_places else note.text for note in notes)
    return tuple(dict.fromkeys(lines))
