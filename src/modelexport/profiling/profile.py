"""profile(): the latency of a model in ONNX Runtime, by module."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from modelexport.errors import ArgumentError
from modelexport.graph.flat import pause_collector
from modelexport.modules.lookup import ModuleIndex
from modelexport.modules.record import ModuleRecord
from modelexport.modules.tree import Ancestry
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    require_data_file,
)
from modelexport.option_values import spell_option
from modelexport.profiling.kernel_times import (
    KernelTimes,
    Measurement,
    NodeTime,
    measure_kernels,
)
from modelexport.tagged.example_inputs import Array
from modelexport.tagged.model import TaggedModel, load, require_records
from modelexport.verification.feeds import make_feeds
from modelexport.verification.runtime import CPU, SessionSettings, check_provider

OPTIMIZATIONS = ("all", "extended", "basic", "off")
_LOW, _HIGH = 0.1, 0.9
"""The quantiles that state the spread over the runs."""


class ModuleTime(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """The time of one module. It includes that of the modules below it, unless called `own`."""

    path: str
    tag: str | None
    class_: str
    calls: int
    nodes: int
    """Its nodes in the graph that ran, with those of the modules below it."""
    own_ms: float
    """The time of its own nodes."""
    inclusive_ms: float
    share: float
    """The share of the kernel time, from 0 to 1."""
    shared_ms: float
    """The part of `inclusive_ms` in nodes that also implement operations of other modules."""
    low_ms: float
    """The 10th percentile of the inclusive time over the runs, or that time if it is less."""
    high_ms: float
    """The 90th percentile, or the inclusive time if that is more."""
    status: str
    execution_order: int | None
    parameters: int | None = None
    """The elements of its parameters; null where the export did not record them."""
    flops: int | None = None
    """Floating-point operations of one run, as counted at export; null without `--flops`."""
    gflops_per_second: float | None = None
    fused_with: tuple[str, ...] = ()
    """The other modules whose operations its own nodes implement as well."""


class Profile(msgspec.Struct, frozen=True):
    """The result of `profile`: medians over the runs, in milliseconds.

    The medians of nodes are added up to those of modules. On a busy machine a run takes longer than
    that sum, because some of its nodes have to wait; the difference is in `overhead_ms`.
    """

    file: str
    optimization: str
    provider: str
    threads: int | None
    inputs: str
    """What the model ran on, such as `the recorded inputs`."""
    input_shapes: dict[str, tuple[int, ...]]
    runs: int
    total_ms: float
    """The time of a run: the kernels and the rest."""
    low_ms: float
    """The 10th percentile of a run."""
    high_ms: float
    """The 90th percentile."""
    kernel_ms: float
    """The time of all nodes; the times of the modules add up to it if all is joined."""
    overhead_ms: float
    """The rest of a run: the runtime's own time, and `waiting_ms`."""
    waiting_ms: float
    """How much longer the kernels of a run took than the medians of all nodes add up to."""
    shared_ms: float
    """The time of nodes that implement operations of several modules."""
    joined: float
    """The share of the kernel time that belongs to a module, from 0 to 1."""
    saved: bool
    """Whether the optimized graph was saved and mapped; else kernels were joined by name."""
    speed_ratio: float | None
    """The time of the measured graph relative to that of the session that optimizes the file."""
    plain_ms: float | None
    """The time of a run of that session without the profiler, which slows down small nodes."""
    modules: tuple[ModuleTime, ...]
    """In the order of the module tree."""


def profile(
    path: StrPath,
    *,
    optimization: str = "all",
    runs: int = 20,
    warmup: int = 3,
    threads: int | None = None,
    provider: str = CPU,
    inputs: StrPath | Mapping[str, Array] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    module: str | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Profile:
    """Measure the latency of each module in ONNX Runtime, on the graph as it runs.

    Args:
        path: A tagged file.
        optimization: `all`, `extended`, `basic` or `off`: what ONNX Runtime does to the graph.
        runs: How many runs to measure.
        warmup: How many runs to leave out before.
        threads: How many threads a node may use; None leaves it to ONNX Runtime.
        provider: The execution provider.
        inputs: Arrays by input name, or an `.npz` file with them; None for inputs like those that
            the export recorded.
        input_shapes: Other shapes to draw inputs in, by input name, for a file with symbolic axes.
        module: Only report modules that match this tag, module path, alias or glob, and those
            below.
        on_step: Called with a line of progress.

    Returns:
        The times of the file and of its modules.

    Raises:
        ArgumentError: An argument cannot work, such as a pattern that matches no module.
        FileError: A file cannot be read.
        FormatError: The file has no tags, or ONNX Runtime rejects it or cannot run it.
        SourceError: ONNX Runtime is not installed.
    """
    path = as_path(path)
    _check_numbers(optimization, runs, warmup, threads)
    check_provider(provider)
    with pause_collector():
        model = _load_tagged(path)
        wanted = _select(model, module)
        feeds = make_feeds(model, inputs, shapes=input_shapes or {})
        settings = SessionSettings(optimization, threads, provider)
        measurement = Measurement(settings, feeds.values, runs, warmup)
        times = measure_kernels(model, measurement, on_step or (lambda _: None))
        modules = module_times(_records(model, feeds.values), times)
    chosen = tuple(time for time in modules if time.path in wanted)
    return _make_profile(path.name, measurement, feeds.source, times, chosen)


def _make_profile(
    name: str,
    measurement: Measurement,
    source: str,
    times: KernelTimes,
    modules: tuple[ModuleTime, ...],
) -> Profile:
    settings = measurement.settings
    return Profile(
        file=name,
        optimization=settings.optimization,
        provider=settings.provider,
        threads=settings.threads,
        inputs=source,
        input_shapes={name: value.shape for name, value in measurement.feeds.items()},
        runs=len(times.run_ms),
        **_totals(times),
        joined=times.joined,
        saved=times.saved,
        speed_ratio=times.speed_ratio,
        plain_ms=times.plain_ms,
        modules=modules,
    )


def _check_numbers(optimization: str, runs: int, warmup: int, threads: int | None) -> None:
    if optimization not in OPTIMIZATIONS:
        raise ArgumentError(
            f"{spell_option('optimization')} must be one of {', '.join(OPTIMIZATIONS)}, "
            f"got {optimization!r}"
        )
    for name, value, least in (("runs", runs, 1), ("warmup", warmup, 0), ("threads", threads, 1)):
        if value is not None and value < least:
            raise ArgumentError(
                f"{spell_option(name)} must be at least {least}, got {value}",
                hint=f"pass {least} or more",
            )


def _load_tagged(path: StrPath) -> TaggedModel:
    model = load(path)
    require_records(model)
    for name in model.data_files:
        require_data_file(model.path, name)
    return model


def _records(model: TaggedModel, feeds: Mapping[str, Array]) -> Mapping[str, ModuleRecord]:
    """Return the module records, without operations if these were counted for other shapes."""
    assert model.records is not None
    examples = model.records.export.example_inputs
    if all(name in examples and examples[name].shape == feeds[name].shape for name in feeds):
        return model.modules
    return {
        path: msgspec.structs.replace(record, flops=msgspec.UNSET)
        for path, record in model.modules.items()
    }


def _select(model: TaggedModel, module: str | None) -> set[str]:
    """Return the paths of the modules to report.

    Raises:
        ArgumentError: The pattern matches no module.
    """
    if module is None:
        return set(model.modules)
    index = ModuleIndex(model.modules, ())
    index.require_match(module)
    resolution = index.resolve(module)
    return {path for path in model.modules if resolution.covers(path, index.carried_tag(path))}


def module_times(records: Mapping[str, ModuleRecord], times: KernelTimes) -> list[ModuleTime]:
    """Add up the times of nodes by module.

    A node counts for its module, also if it implements operations of others.

    Args:
        records: The module records of the file.
        times: The times of the nodes.

    Returns:
        The modules in the order of their records.
    """
    ancestry = Ancestry(records)
    own: dict[str, list[NodeTime]] = {}
    below: dict[str, list[NodeTime]] = {path: [] for path in records}
    for node in times.nodes:
        if node.tag is None:
            continue
        own.setdefault(node.tag.hierarchy_module, []).append(node)
        for path in ancestry.of(node.tag.hierarchy_module):
            below.setdefault(path, []).append(node)
    kernel_ms = _sum(times.nodes)
    result = []
    for path, record in records.items():
        nodes = below[path]
        inclusive = _sum(nodes)
        per_run = _per_run(nodes, len(times.run_ms))
        fused = {covered for node in own.get(path, ()) for covered in _covers(node)}
        flops = None if record.flops is msgspec.UNSET else record.flops
        count = record.parameter_count
        result.append(
            ModuleTime(
                path=path,
                tag=record.tag,
                class_=record.class_,
                calls=record.calls,
                nodes=len(nodes),
                own_ms=_sum(own.get(path, ())),
                inclusive_ms=inclusive,
                share=inclusive / kernel_ms if kernel_ms else 0.0,
                shared_ms=_sum(node for node in nodes if _covers(node)),
                low_ms=min(_quantile(per_run, _LOW), inclusive),
                high_ms=max(_quantile(per_run, _HIGH), inclusive),
                status=record.status,
                execution_order=record.execution_order,
                parameters=None if count is msgspec.UNSET else count,
                flops=flops,
                gflops_per_second=flops / inclusive / 1e6 if flops and inclusive else None,
                fused_with=tuple(sorted(fused - {path})),
            )
        )
    return result


def _totals(times: KernelTimes) -> dict[str, float]:
    """Return the totals of a profile. Medians of nodes are added, so that modules add up."""
    kernel_ms = _sum(times.nodes)
    per_run = _per_run(times.nodes, len(times.run_ms))
    total_ms = max(statistics.median(times.run_ms), kernel_ms)
    shared = _sum(node for node in times.nodes if _covers(node))
    return {
        "total_ms": total_ms,
        "low_ms": _quantile(times.run_ms, _LOW),
        "high_ms": _quantile(times.run_ms, _HIGH),
        "kernel_ms": kernel_ms,
        "overhead_ms": total_ms - kernel_ms,
        "waiting_ms": max(min(statistics.median(per_run), total_ms) - kernel_ms, 0.0),
        "shared_ms": shared,
    }


def _covers(node: NodeTime) -> tuple[str, ...]:
    """Return the modules whose operations a node implements; none if they are of one module."""
    return node.tag.hierarchy_covers if node.tag else ()


def _sum(nodes: Iterable[NodeTime]) -> float:
    return sum(statistics.median(node.own_ms) for node in nodes)


def _per_run(nodes: Sequence[NodeTime], runs: int) -> list[float]:
    return [sum(node.own_ms[run] for node in nodes) for run in range(runs)]


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


class ModuleDifference(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """The times of one module in two files; null where a file does not have it."""

    path: str
    tag: str | None
    class_: str
    before_ms: float | None
    after_ms: float | None
    ratio: float | None
    """The second time relative to the first."""


class ProfileComparison(msgspec.Struct, frozen=True):
    """Two profiles, and their modules side by side."""

    before: Profile
    after: Profile
    modules: tuple[ModuleDifference, ...]


def compare_profiles(before: Profile, after: Profile) -> ProfileComparison:
    """Compare two profiles by module path.

    Args:
        before: The first profile.
        after: The second profile, such as that of the quantized file.

    Returns:
        Both, and the modules of either.
    """
    first = {module.path: module for module in before.modules}
    second = {module.path: module for module in after.modules}
    modules = []
    for path in dict.fromkeys((*first, *second)):
        old, new = first.get(path), second.get(path)
        named = old or new
        assert named is not None
        ratio = new.inclusive_ms / old.inclusive_ms if old and new and old.inclusive_ms else None
        modules.append(
            ModuleDifference(
                path=path,
                tag=named.tag,
                class_=named.class_,
                before_ms=None if old is None else old.inclusive_ms,
                after_ms=None if new is None else new.inclusive_ms,
                ratio=ratio,
            )
        )
    return ProfileComparison(before, after, tuple(modules))
