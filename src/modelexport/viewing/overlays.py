"""Overlays: a value for each module, to colour modules by."""

from __future__ import annotations

import msgspec


class Overlay(msgspec.Struct, frozen=True):
    """A value for some modules of a model, such as their latency or their error."""

    name: str
    """What the values are, such as `latency`."""
    unit: str
    """Their unit; empty if there is none."""
    values: dict[str, float]
    """The value of each module, with everything below it, by module path."""
    aggregate: str = "sum"
    """How the value of a module follows from those below it: `sum` or `max`."""
