"""Measures what can be compared with a peer and writes docs/benchmarks.md: `make bench`.

`python -m benchmarks NAME ...` only shows the named parts: also `graphml` and `scaling`, which have no peer, and
`large`, which needs 8 GiB of disk and of memory.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings

from benchmarks.table import PAGE, Row, line, page

PARTS = {
    "reading": "reading",
    "extracting": "extracting",
    "export": "export_cost",
    "memory": "memory",
    "peers": "peers",
}
"""Reading comes first, while torch is not loaded: its commands run without it."""
ON_REQUEST = {"graphml": "graphml", "scaling": "scaling", "large": "large"}


def main() -> None:
    names = sys.argv[1:]
    known = PARTS | ON_REQUEST
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no part is called {unknown[0]}; there are {', '.join(known)}")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows: list[tuple[Row, str]] = []
    for name in names or PARTS:
        for row in importlib.import_module(f"benchmarks.{known[name]}").rows():
            print(line(row), flush=True)
            rows.append((row, f"python -m benchmarks {name}"))
    if not names:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
