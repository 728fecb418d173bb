"""Prints every ratio with its aim. `make bench`, or `python -m benchmarks export|memory|scaling`."""

from __future__ import annotations

import sys

from benchmarks import export_cost, memory, scaling

PARTS = {"export": export_cost.main, "memory": memory.main, "scaling": scaling.main}


def main() -> None:
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
