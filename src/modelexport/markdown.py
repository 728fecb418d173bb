"""The report of an export as a Markdown page, readable on any code host."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from modelexport.analysis.outline import outline, shortened
from modelexport.report import ExportReport
from modelexport.tagged.sidecar import ModuleRecord, Sidecar, TensorInfo

_MOST_ROWS = 300
"""Tables of a page have no more rows than this; the sidecar has everything."""
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069`|<>]")


def report_path(onnx_path: Path) -> Path:
    return onnx_path.with_name(f"{onnx_path.stem}_report.md")


def markdown(report: ExportReport) -> str:
    """The whole page."""
    return "\n".join(_page(report)) + "\n"


def _page(report: ExportReport) -> Iterator[str]:
    hierarchy = report.hierarchy
    yield from (f"# {_text(report.onnx_path.name)}", "")
    yield f"{_code(hierarchy.model.class_)}, exported to ONNX with every node mapped to the module that made it."
    yield from _section("Summary", _table(("", ""), _summary(report)))
    steps = [(name, f"{seconds:.3f}") for name, seconds in report.timings.items()]
    total = ("**total**", f"**{sum(report.timings.values()):.3f}**")
    yield from _section("Steps", _table(("step", "seconds"), [*steps, total]))
    ends = [("input", info) for info in hierarchy.export.inputs] + [
        ("output", info) for info in hierarchy.export.outputs
    ]
    yield from _section("Inputs and outputs", _table(("", "name", "type", "shape"), [_end(*end) for end in ends]))
    if report.dropped_outputs:
        dropped = [f"- {_code(name)}" for name in report.dropped_outputs]
        yield from _section("Dropped outputs", ["Not tensors, so not in the graph:", "", *dropped])
    if report.notes:
        warned = [f"- {_text(note)}" for note in report.notes]
        yield from _section("Notes", ["torch's tracer kept values of the example inputs as constants:", "", *warned])
    yield from _section("Modules", _tree(hierarchy.modules))
    yield from _section("Coverage by evidence", _table(("evidence", "nodes", "share"), _evidence(hierarchy)))
    yield from _section("Tags", _table(("tag", "nodes"), _tags(hierarchy)))
    for status, title in (("absorbed", "Absorbed modules"), ("unused", "Unused modules")):
        rows = [
            (_code(path), _code(record.class_)) for path, record in hierarchy.modules.items() if record.status == status
        ]
        if rows:
            yield from _section(title, [_STATUS[status], "", *_table(("module", "class"), rows)])
    versions = [(name, version) for name, version in hierarchy.export.versions.items()]
    yield from _section("Versions", _table(("package", "version"), versions))


_STATUS = {
    "absorbed": "They ran, and the exporter folded or fused all of their work into other nodes or weights.",
    "unused": "They did not run with the example inputs.",
}


def _summary(report: ExportReport) -> Iterator[Sequence[str]]:
    hierarchy = report.hierarchy
    statistics = hierarchy.statistics
    yield "source", _code(hierarchy.model.source)
    yield (
        "strategy",
        report.strategy
        if report.strategy == report.requested
        else f"{report.strategy} ({report.requested} was asked for)",
    )
    yield "exporter", report.exporter
    if report.fallback_reason is not None:
        yield "dynamo failed", _text(report.fallback_reason)
    if hierarchy.export.inputs_from is not None:
        yield "inputs from", _text(hierarchy.export.inputs_from)
    yield "opset", str(hierarchy.model.opset)
    yield "nodes", f"{statistics.nodes}, {statistics.tagged_nodes} tagged ({statistics.coverage:.1%})"
    yield "auxiliary nodes", str(statistics.auxiliary_nodes)
    yield "tags", str(statistics.tags)
    status = ", ".join(f"{count} {name}" for name, count in statistics.module_status.items())
    yield "modules", f"{statistics.modules} ({status})"
    root = hierarchy.modules[""].parameter_count
    if isinstance(root, int):
        yield "parameters", f"{root:,}"
    files = [report.onnx_path, *report.data_paths, report.sidecar_path]
    yield "files", ", ".join(_code(path.name) for path in files)


def _end(kind: str, info: TensorInfo) -> Sequence[str]:
    return kind, _code(info.name), info.dtype, " x ".join("?" if dim is None else str(dim) for dim in info.shape)


def _tree(modules: dict[str, ModuleRecord]) -> Iterator[str]:
    lines = shortened(outline(modules), _MOST_ROWS)
    width = max((len(line.text) for line in lines), default=0)
    yield "```text"
    for line in lines:
        record = modules[line.paths[0]]
        status = "" if record.status == "nodes" else f"  {record.status}"
        yield f"{_text(line.text):{width}}  {record.nodes:6}{status}"
    yield "```"
    yield from (
        "",
        "Numbers are nodes, with those of the modules below; `x12` stands for twelve modules that look the same.",
    )


def _evidence(hierarchy: Sidecar) -> Iterator[Sequence[str]]:
    statistics = hierarchy.statistics
    methods = sorted(statistics.methods.items(), key=lambda item: -item[1])
    bare = statistics.nodes - statistics.tagged_nodes
    for name, count in [*methods, *([("none", bare)] if bare else [])]:
        yield name, str(count), f"{count / statistics.nodes:.1%}"


def _tags(hierarchy: Sidecar) -> list[Sequence[str]]:
    counts = Counter(record.tag for record in hierarchy.nodes.values() if record.tag is not None)
    return [(_code(tag), str(count)) for tag, count in sorted(counts.items())]


def _section(title: str, body: Iterable[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    yield from body


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    rows = list(rows)
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows[:_MOST_ROWS]:
        yield f"| {' | '.join(row)} |"
    if len(rows) > _MOST_ROWS:
        yield from ("", f"… and {len(rows) - _MOST_ROWS} more in the sidecar.")


def _code(text: str) -> str:
    return f"`{_text(text)}`" if text else "(root)"


def _text(text: str) -> str:
    """Text that can neither end a table's cell nor be taken for markup."""
    return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", text)
