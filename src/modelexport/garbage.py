"""Pause the garbage collector while many records are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pause garbage collection while the block creates many small records that all stay alive.

    Each collection would walk every live object, again and again as the records grow.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
