"""Prints every ratio with its aim: `make bench`, or `python -m benchmarks` with the names of parts, `large` too."""

from __future__ import annotations

import importlib
import sys

PARTS = {
    "reading": "reading",
    "extracting": "extracting",
    "graphml": "graphml",
    "export": "export_cost",
    "memory": "memory",
    "scaling": "scaling",
}
"""Reading comes first, while torch is not loaded: its commands run without it."""
_ON_REQUEST = {"large": "large"}


def main() -> None:
    for name in sys.argv[1:] or PARTS:
        importlib.import_module(f"benchmarks.{(PARTS | _ON_REQUEST)[name]}").main()


if __name__ == "__main__":
    main()
