"""Kill the processes of a job when its supervisor ends, however it ends.

The supervisor runs this file as a script, with the process group of the job as its argument and a
pipe as its stdin. It is a file of its own because it must start in milliseconds: it runs with
`python -I -S`, and imports neither the package nor anything that is installed.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Watch stdin in a detached process; kill the group if it ends without a word."""
    # Detached, since what kills the supervisor may kill its children as well: Ray does. The
    # supervisor waits for the parent's exit, and so knows that the watchdog is there.
    if os.fork():
        return
    if sys.stdin.buffer.read():  # the supervisor says that the job has ended
        return
    with suppress(ProcessLookupError):
        os.killpg(int(sys.argv[1]), signal.SIGKILL)


if __name__ == "__main__":
    main()
