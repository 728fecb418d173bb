"""Ends a job's processes when whoever supervises it is gone, however that came about, and whatever the job is doing.

Run as a program with the number of a process group: it waits for the end of its input. It imports nothing but Python's
own library, so as to start at once.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    sys.stdin.buffer.read()
    with suppress(ProcessLookupError):
        os.killpg(int(sys.argv[1]), signal.SIGKILL)


if __name__ == "__main__":
    main()
