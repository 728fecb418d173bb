"""Ends a job's processes when whoever supervises it is gone, however that came about, and whatever the job is doing.

Run as a program with the number of a process group: it waits for the end of its input, and if nothing came before it,
the group is ended. The waiting is done by a process that is nobody's child, because Ray ends the children of a process
that it ends. It imports nothing but Python's own library, so as to start at once.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    if os.fork():
        return
    if sys.stdin.buffer.read():
        return
    with suppress(ProcessLookupError):
        os.killpg(int(sys.argv[1]), signal.SIGKILL)


if __name__ == "__main__":
    main()
