"""Kill the processes of a job when its supervisor ends."""

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
