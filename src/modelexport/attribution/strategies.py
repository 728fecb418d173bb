"""Strategies: an exporter and an ordered chain of evidence, how they are found and applied."""

from __future__ import annotations

import enum
from importlib.metadata import EntryPoint, entry_points

import msgspec

from modelexport.attribution.evidence import (
    Evidence,
    Facts,
    by_agreement,
    by_dataflow,
    by_parameter,
    by_parameter_in_use,
    by_root,
    by_scope,
)
from modelexport.capture.trace import Site
from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type, suggest_name
from modelexport.exporters import EXPORTER_NAMES
from modelexport.modules.record import Attribution, Method

ENTRY_POINTS = "modelexport.strategies"


class ExportStrategy(enum.StrEnum):
    """The strategies that come with the package; their names as strings work too."""

    AUTO = "auto"
    USAGE_BASED = "usage_based"
    HTP = "htp"
    FX = "fx"


class Strategy(msgspec.Struct, frozen=True):
    """How nodes are mapped to modules: the first evidence in the chain with an answer wins."""

    name: str
    """Its name for `strategy=` and `--strategy`."""
    exporter: str
    """`dynamo` or `torchscript`; the caller may choose the other one."""
    chain: tuple[Evidence, ...]
    """The evidence in order. A node without an answer from any of it has no tag."""
    description: str = ""
    """One line for people."""


SCOPE = Evidence(Method.SCOPE, by_scope)
PARAMETER = Evidence(Method.PARAMETER, by_parameter)
PARAMETER_IN_USE = Evidence(Method.PARAMETER, by_parameter_in_use)
DATAFLOW = Evidence(Method.DATAFLOW, by_dataflow)
AGREEMENT = Evidence(Method.DATAFLOW, by_agreement)
ROOT = Evidence(Method.ROOT, by_root)
FULL_CHAIN = (SCOPE, PARAMETER, DATAFLOW, ROOT)

FX = Strategy("fx", "dynamo", FULL_CHAIN, "torch.export based; every node has a tag")
HTP = Strategy("htp", "torchscript", FULL_CHAIN, "traced; takes more models; every node has a tag")
USAGE_BASED = Strategy(
    "usage_based",
    "torchscript",
    (PARAMETER_IN_USE, SCOPE, AGREEMENT),
    "traced; tags only modules that ran, and only where the evidence is certain",
)

_REGISTRY: dict[str, Strategy] = {strategy.name: strategy for strategy in (FX, HTP, USAGE_BASED)}


def register_strategy(strategy: Strategy) -> None:
    """Register a strategy under its name for this process.

    Installed packages register theirs by an entry point in the group `modelexport.strategies`.

    Args:
        strategy: The strategy.

    Raises:
        ArgumentTypeError: It is no `Strategy`.
        ArgumentError: Its exporter is unknown, or another strategy has its name.
    """
    if not isinstance(strategy, Strategy):
        raise ArgumentTypeError(f"expected a Strategy, got {describe_type(strategy)}")
    if strategy.exporter not in EXPORTER_NAMES:
        raise ArgumentError(
            f"strategy {strategy.name!r} names the exporter {strategy.exporter!r}",
            hint=f"known: {', '.join(EXPORTER_NAMES)}",
        )
    if strategy.name == ExportStrategy.AUTO or _REGISTRY.get(strategy.name, strategy) != strategy:
        raise ArgumentError(
            f"a strategy called {strategy.name!r} exists already", hint="choose another name"
        )
    _REGISTRY[strategy.name] = strategy


def find_strategy(name: str) -> Strategy:
    """Find a strategy by its name; of installed packages only the one that provides it is loaded.

    Raises:
        ArgumentError: There is none, or its package cannot be loaded.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in points:
        known = list(dict.fromkeys((ExportStrategy.AUTO.value, *_REGISTRY, *points)))
        raise ArgumentError(
            f"there is no strategy {str(name)!r}", hint=suggest_name(str(name), known)
        )
    return _load(points[name])


def _load(point: EntryPoint) -> Strategy:
    try:
        strategy: Strategy = point.load()
    except Exception as error:  # whatever the package does when it is imported
        raise ArgumentError(
            f"the strategy {point.name!r} of an installed package cannot be loaded: "
            f"{type(error).__name__}: {error}",
            hint="fix that package, or uninstall it",
        ) from error
    register_strategy(strategy)
    if strategy.name != point.name:
        raise ArgumentError(
            f"entry point {point.name!r} provides a strategy named {strategy.name!r}",
            hint="the names must match",
        )
    return strategy


def attribute(strategy: Strategy, facts: Facts) -> list[Attribution | None]:
    """Find the module of each node with the evidence of a strategy; None where it has no answer.

    Raises:
        ArgumentError: The strategy names a module that the model does not have.
    """
    modules = set(facts.tree)
    settled: dict[int, Site] = {}
    methods: dict[int, str] = {}
    for evidence in strategy.chain:
        for index, site in evidence.find(facts, settled).items():
            if site.path not in modules:
                raise ArgumentError(
                    f"the evidence {str(evidence.method)!r} of the strategy {strategy.name!r} "
                    f"names the module {site.path!r}, which the model does not have",
                    hint="fix the strategy",
                )
            if index not in settled:
                settled[index] = site
                methods[index] = str(evidence.method)
    calls = facts.trace.log.calls
    counts = facts.trace.log.count()

    def answer(index: int) -> Attribution | None:
        if index not in settled:
            return None
        site = settled[index]
        # A call is numbered only where the module has several.
        number = calls[site.call].index if counts[site.path] > 1 and site.call >= 0 else None
        covers = facts.trace.covers.get(facts.graph.nodes[index].key, ())
        if covers and site.path not in covers:
            covers = tuple(sorted((*covers, site.path)))
        return Attribution(site.path, number, methods[index], covers)

    return [answer(index) for index in range(len(facts.graph.nodes))]
