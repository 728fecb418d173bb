"""Pause the garbage collector while many records are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector() -> Iterator[None]:
    """No garbage collection while the block makes many small records that all stay alive.

    Each collection would walk everything that is alive, again and again as the records grow.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
