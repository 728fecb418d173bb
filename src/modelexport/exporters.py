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
    PRETRAINED = "a model of transformers"
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
    consequence: str
    """What is different about its files where `auto` falls back to it."""
    only_for: ModelKind | None
    """The kind of model for which `auto` tries it; None for every kind."""
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
        consequence="",
        only_for=None,
        opsets=(7, 25),
        accepts=frozenset({ModelKind.MODULE, ModelKind.PRETRAINED, ModelKind.PROGRAM}),
        graph_option="fx_graph",
        keeps_call_order=True,
        splits_models=False,
    ),
    Exporter(
        name="transformers",
        capture="modelexport.capture.transformers_exporter",
        strategy="fx",
        reason="the transformers exporter adapts a model of transformers to torch.export",
        consequence="which replaces operations that torch cannot export",
        only_for=ModelKind.PRETRAINED,
        opsets=(7, 25),
        accepts=frozenset({ModelKind.MODULE, ModelKind.PRETRAINED}),
        graph_option="fx_graph",
        keeps_call_order=True,
        splits_models=True,
    ),
    Exporter(
        name="torchscript",
        capture="modelexport.capture.torchscript",
        strategy="htp",
        reason="the torchscript exporter traces models that dynamo cannot export",
        consequence="which fixes branches and loops to the example inputs",
        only_for=None,
        opsets=(7, 20),
        accepts=frozenset({ModelKind.MODULE, ModelKind.PRETRAINED, ModelKind.SCRIPT}),
        graph_option="jit_graph",
        keeps_call_order=False,
        splits_models=False,
    ),
)
EXPORTER_NAMES = tuple(exporter.name for exporter in EXPORTERS)
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


def auto_exporters(kind: ModelKind) -> tuple[Exporter, ...]:
    """Return what `auto` tries for a kind of model; the first one without a fallback."""
    return tuple(exporter for exporter in EXPORTERS if exporter.only_for in (None, kind))


def exporters_accepting(kind: ModelKind) -> tuple[Exporter, ...]:
    """Return the exporters that accept a kind of model, in their order."""
    return tuple(exporter for exporter in EXPORTERS if kind in exporter.accepts)
