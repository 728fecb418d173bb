"""The facts of each exporter, in one place.

Everything that depends on which exporter writes the graph refers to a record here: the range of
opsets, the kinds of models, the text form of its graph, and the strategy that goes with it. To add
an exporter, add a record and a file in `capture/` with an `export` function.
"""

from __future__ import annotations

import enum

import msgspec

from modelexport.errors import ArgumentError


class ModelKind(enum.StrEnum):
    """What an exporter may be given; the values complete "this model is …"."""

    MODULE = "a torch.nn.Module"
    SCRIPT = "compiled by torch.jit"
    PROGRAM = "a program of torch.export"


class Exporter(msgspec.Struct, frozen=True, kw_only=True):
    """One exporter: who writes the graph, and what it can do."""

    name: str
    """The value of `exporter=` and `--exporter`."""
    capture: str
    """The module whose `export` function runs it; imported on first use, since it needs torch."""
    strategy: str
    """The strategy that `auto` uses with it."""
    reason: str
    """Why to prefer it for a model that every exporter accepts."""
    tried_by_auto: bool
    """Whether `auto` tries it without being asked for it, in the order of `EXPORTERS`."""
    opsets: tuple[int, int]
    """The lowest and the highest opset that it writes."""
    accepts: frozenset[ModelKind]
    """The kinds of models that it can export."""
    graph_option: str
    """The option that names a file for the text form of its own graph."""
    keeps_call_order: bool
    """Whether the graph has its inputs in the order of the call, not of `forward`'s signature."""
    splits_models: bool
    """Whether it exports the parts of a language model that `generation` asks for."""


EXPORTERS = (
    Exporter(
        name="dynamo",
        capture="modelexport.capture.dynamo",
        strategy="fx",
        reason="the dynamo exporter records the module of every node itself",
        tried_by_auto=True,
        opsets=(7, 25),
        accepts=frozenset({ModelKind.MODULE, ModelKind.PROGRAM}),
        graph_option="fx_graph",
        keeps_call_order=True,
        splits_models=False,
    ),
    Exporter(
        name="torchscript",
        capture="modelexport.capture.torchscript",
        strategy="htp",
        reason="the torchscript exporter traces models that dynamo cannot export",
        tried_by_auto=True,
        opsets=(7, 20),
        accepts=frozenset({ModelKind.MODULE, ModelKind.SCRIPT}),
        graph_option="jit_graph",
        keeps_call_order=False,
        splits_models=False,
    ),
    Exporter(
        name="transformers",
        capture="modelexport.capture.transformers_exporter",
        strategy="fx",
        reason="the transformers exporter adapts a model of transformers to torch.export",
        tried_by_auto=False,
        opsets=(7, 25),
        accepts=frozenset({ModelKind.MODULE}),
        graph_option="fx_graph",
        keeps_call_order=True,
        splits_models=True,
    ),
)
EXPORTER_NAMES = tuple(exporter.name for exporter in EXPORTERS)
AUTO_EXPORTERS = tuple(exporter for exporter in EXPORTERS if exporter.tried_by_auto)
"""What `auto` tries; the first one without a fallback."""
CALL_ORDER_EXPORTERS = frozenset(one.name for one in EXPORTERS if one.keeps_call_order)
GRAPH_OPTIONS = tuple(dict.fromkeys(exporter.graph_option for exporter in EXPORTERS))


def find_exporter(name: str) -> Exporter:
    """Return the exporter of this name.

    Raises:
        ArgumentError: There is no such exporter.
    """
    for exporter in EXPORTERS:
        if exporter.name == name:
            return exporter
    raise ArgumentError(
        f"there is no exporter {name!r}", hint=f"known: {', '.join(EXPORTER_NAMES)}"
    )


def exporters_accepting(kind: ModelKind) -> tuple[Exporter, ...]:
    """Return the exporters that accept a kind of model, in their order."""
    return tuple(exporter for exporter in EXPORTERS if kind in exporter.accepts)
