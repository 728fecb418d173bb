"""Measure every part that has a peer, and write docs/benchmarks.md: `make bench`.

`python -m benchmarks NAME ...` only prints the named parts; with `--write`, their rows replace
those on the page. On request, parts are also `graphml` and `scaling`, which have no peer, and
`large`, which needs 8 GiB of disk and of memory.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings

from benchmarks.table import PAGE, Row, format_line, format_page

PARTS = {
    "reading": "reading",
    "start": "starting",
    "extracting": "extracting",
    "functions": "functions",
    "view": "viewing",
    "export": "export_cost",
    "memory": "memory",
    "generation": "generation",
    "peers": "peers",
    "retag": "retagging",
    "profile": "profiling",
}
"""Reading comes first: its commands are measured without torch loaded."""
ON_REQUEST = {"graphml": "graphml", "scaling": "scaling", "large": "large"}


def main() -> None:
    """Measure the named parts, or all parts for the page."""
    names = [name for name in sys.argv[1:] if name != "--write"]
    writes = not names or "--write" in sys.argv
    known = PARTS | ON_REQUEST
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no part is called {unknown[0]}; there are {', '.join(known)}")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows: list[tuple[Row, str]] = []
    for name in names or PARTS:
        for row in importlib.import_module(f"benchmarks.{known[name]}").rows():
            print(format_line(row), flush=True)
            rows.append((row, f"python -m benchmarks {name}"))
    if writes:
        earlier = PAGE.read_text(encoding="utf-8") if names else ""
        PAGE.write_text(format_page(rows, earlier), encoding="utf-8")


if __name__ == "__main__":
    main()
