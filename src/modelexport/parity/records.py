"""The records of a verification."""

from __future__ import annotations

import enum

import msgspec


class Outcome(enum.StrEnum):
    """What came of comparing one call of one module."""

    AGREES = "agrees"
    DIFFERS = "differs"
    SHAPE = "shape"
    DTYPE = "dtype"
    ABSORBED = "absorbed"
    UNKNOWN = "not found"
    NOTHING = "no tensor"
    UNSEEN = "not seen"


FAILED = frozenset({Outcome.DIFFERS, Outcome.SHAPE, Outcome.DTYPE})
COMPARED = FAILED | {Outcome.AGREES}


class Blame(enum.StrEnum):
    """Where a difference comes from.

    `caused here`: given PyTorch's own inputs, it still differs. `caused inside`: a module inside it
    does. `inherited`: given PyTorch's own inputs it agrees. `unclear`: it could not be run by itself.
    """

    HERE = "caused here"
    INSIDE = "caused inside"
    INHERITED = "inherited"
    UNCLEAR = "unclear"


class TensorParity(msgspec.Struct, frozen=True):
    """One tensor that a module returned, against the tensor of the file that it should be."""

    tensor: str
    """Its name in the file; empty if it is not there."""
    expected: str
    """Type and shape in PyTorch."""
    found: str
    """Type and shape in the file."""
    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    within: bool
    """Whether it agrees."""


class ModuleParity(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """One call of a module; the differences are the greatest of its tensors."""

    module: str
    tag: str | None
    class_: str
    execution_order: int | None
    call: int | None
    """Which call, where the module ran more than once."""
    outcome: Outcome
    blame: Blame | None
    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    own_abs: float | None
    """The greatest absolute difference that it makes when it is given PyTorch's own inputs, where that was tried."""
    note: str | None
    """What else there is to say; why it is not compared, where it is not."""
    tensors: tuple[TensorParity, ...]
    """Those of its results that were compared."""
    results: int
    """How many tensors it returned."""
    run: int = 0
    """The run that this is from, where there were several: the one in which the call did worst."""


class Verification(msgspec.Struct, frozen=True):
    """The whole answer. `modules` is in the order in which the calls finished: the first that differs did so first."""

    file: str
    atol: float
    rtol: float
    agrees: bool
    """Whether something was compared and all of that agrees; `not_compared` says what this is not about."""
    first: str | None
    """The module that differs first."""
    causes: tuple[str, ...]
    """The modules that differ though they are given PyTorch's own inputs, the worst first."""
    outcomes: dict[str, int]
    """Calls by outcome."""
    modules: tuple[ModuleParity, ...]
    modules_total: int
    """How many modules ran, in the export or in PyTorch."""
    modules_compared: int
    """How many of them were compared, in all or in some of their results."""
    partly_compared: tuple[str, ...]
    """The modules of which some results or calls were compared and others were not."""
    not_compared: dict[str, str]
    """The modules of which nothing was compared, each with the reason."""
    runs: int = 1
    """On how many sets of inputs both ran; `modules` has the worst of each call."""
