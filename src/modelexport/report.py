"""The report of one export: a record, its JSON form, its warnings, and a Markdown page."""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from modelexport.analysis.outline import outline, shorten
from modelexport.errors import FallbackWarning, GraphmlWarning, ViewWarning
from modelexport.exporters import EXPORTERS, find_exporter
from modelexport.modules.record import ModuleRecord
from modelexport.tagged.records import Sidecar, TensorInfo


class ExportReport(msgspec.Struct, frozen=True):
    """What an export did: the strategy and exporter used, the files written, and the map.

    It can also be read as JSON: `report["summary"]`, `["files"]`, `["statistics"]`, `["timings"]`.
    """

    requested: str
    """The strategy that was asked for."""
    strategy: str
    """The strategy that was used."""
    exporter: str
    """The exporter that wrote the graph."""
    fallback_reason: str | None
    """Why dynamo failed, where `auto` used another exporter."""
    onnx_path: Path
    """The model."""
    sidecar_path: Path
    """The map as JSON."""
    data_paths: tuple[Path, ...]
    """The files with the data of initializers, where it is not inside the model."""
    hierarchy: Sidecar
    """The whole map, as in the sidecar."""
    timings: dict[str, float]
    """Seconds by step."""
    notes: tuple[str, ...] = ()
    """A line for each warning of torch's tracer about a value that becomes a constant."""
    report_path: Path | None = None
    """The page of `with_report`."""
    graphml_path: Path | None = None
    """The GraphML, where one was asked for and written."""
    graphml_data_path: Path | None = None
    """The data of its initializers, where it is in a file of its own."""
    graphml_error: str | None = None
    """Why the GraphML could not be written; the model is exported nevertheless."""
    view_path: Path | None = None
    """The page of `with_view`."""
    view_error: str | None = None
    """Why the page could not be written; the model is exported nevertheless."""
    graph_path: Path | None = None
    """The text form of the exporter's own graph, where one was asked for and written."""
    parts: Mapping[str, ExportReport] = {}
    """The reports of all parts of a language model that was exported with `generation`."""
    generation_path: Path | None = None
    """The file that describes the parts, which `generate` reads."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that were written, the model first."""
        drawings = (self.view_path, self.graphml_path, self.graphml_data_path)
        extra = (self.report_path, *drawings, self.graph_path)
        written = (self.onnx_path, self.sidecar_path, *self.data_paths, *extra)
        return tuple(path for path in written if path is not None)

    @property
    def nodes(self) -> int:
        """The number of nodes in the file."""
        return self.hierarchy.statistics.nodes

    @property
    def coverage(self) -> float:
        """The share of nodes that have a tag, from 0 to 1."""
        return self.hierarchy.statistics.coverage

    @property
    def fallback_message(self) -> str | None:
        """What a fallback means, in one line; None if the first exporter succeeded."""
        if self.fallback_reason is None:
            return None
        first = EXPORTERS[0]
        return (
            f"{first.name} could not export this model ({self.fallback_reason}); "
            f"{self.exporter} was used, {find_exporter(self.exporter).consequence} "
            f'(strategy="{first.strategy}" or --no-fallback makes this an error)'
        )

    @property
    def dropped_outputs(self) -> tuple[str, ...]:
        """The outputs of the model that are not tensors, which ONNX cannot hold."""
        return self.hierarchy.export.dropped_outputs

    def to_dict(self) -> dict[str, Any]:
        """Return the sections `summary`, `files`, `statistics` and `timings` as JSON values."""
        statistics = self.hierarchy.statistics
        return {
            "summary": {
                "success": True,
                "requested_strategy": self.requested,
                "final_strategy": self.strategy,
                "exporter": self.exporter,
                "fallback_reason": self.fallback_reason,
                "nodes": self.nodes,
                "coverage": self.coverage,
                "tags": statistics.tags,
                "dropped_outputs": list(self.dropped_outputs),
                "notes": list(self.notes),
                "graphml_error": self.graphml_error,
                "view_error": self.view_error,
            },
            "files": {
                "onnx": str(self.onnx_path),
                "sidecar": str(self.sidecar_path),
                "data": [str(path) for path in self.data_paths],
                "report": self.report_path and str(self.report_path),
                "view": self.view_path and str(self.view_path),
                "graphml": self.graphml_path and str(self.graphml_path),
                "graphml_data": self.graphml_data_path and str(self.graphml_data_path),
            },
            "statistics": msgspec.to_builtins(statistics),
            "timings": dict(self.timings),
            **self._parts_section(),
        }

    def _parts_section(self) -> dict[str, Any]:
        if self.generation_path is None:
            return {}
        files = {name: str(part.onnx_path) for name, part in self.parts.items()}
        return {"generation": {"file": str(self.generation_path), "parts": files}}

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]


def warn_of_failures(report: ExportReport) -> None:
    """Warn the caller's caller of a fallback, and of a file that could not be written.

    Every public function that exports calls it directly, so that warnings name the user's line.
    """
    if report.graphml_error is not None:
        message = f"the GraphML could not be written: {report.graphml_error}"
        warnings.warn(message, GraphmlWarning, stacklevel=3)
    if report.view_error is not None:
        message = f"the page could not be written: {report.view_error}"
        warnings.warn(message, ViewWarning, stacklevel=3)
    if report.fallback_message is not None:
        warnings.warn(report.fallback_message, FallbackWarning, stacklevel=3)


class Steps:
    """The steps of an export: their times, and a listener that is called as each begins."""

    def __init__(self, listener: Callable[[str], None] | None = None) -> None:
        self.timings: dict[str, float] = {}
        self._listener = listener

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure the block as one step; times of the same name add up."""
        if self._listener is not None:
            self._listener(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start


_MOST_ROWS = 300
"""The greatest number of rows of a table; the sidecar has everything."""
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069`|<>\[\]]")


def report_path(onnx_path: Path) -> Path:
    """Return the path of the page that belongs to a model file: `<stem>_report.md` beside it."""
    return onnx_path.with_name(f"{onnx_path.stem}_report.md")


def markdown_page(report: ExportReport) -> str:
    """Render a report as a page of Markdown."""
    return "\n".join(_page(report)) + "\n"


def _page(report: ExportReport) -> Iterator[str]:
    hierarchy = report.hierarchy
    yield from (f"# {_escape(report.onnx_path.name)}", "")
    name = _code(hierarchy.model.class_)
    yield f"{name}, exported to ONNX with every node mapped to the module that made it."
    yield from ("", _look(report))
    yield from _section("Summary", _table(("", ""), _summary(report)))
    steps = [(name, f"{seconds:.3f}") for name, seconds in report.timings.items()]
    total = ("**total**", f"**{sum(report.timings.values()):.3f}**")
    yield from _section("Steps", _table(("step", "seconds"), [*steps, total]))
    values = [("input", info) for info in hierarchy.export.inputs]
    values += [("output", info) for info in hierarchy.export.outputs]
    rows = [_value_row(kind, info) for kind, info in values]
    yield from _section("Inputs and outputs", _table(("", "name", "type", "shape"), rows))
    if report.dropped_outputs:
        dropped = [f"- {_code(name)}" for name in report.dropped_outputs]
        yield from _section("Dropped outputs", ["Not tensors, so not in the graph:", "", *dropped])
    if report.notes:
        notes = [f"- {_escape(note)}" for note in report.notes]
        title = "torch's tracer kept values of the example inputs as constants:"
        yield from _section("Notes", [title, "", *notes])
    yield from _section("Modules", _tree(hierarchy.modules))
    yield from _section(
        "Coverage by evidence", _table(("evidence", "nodes", "share"), _evidence(hierarchy))
    )
    counts = Counter(record.tag for record in hierarchy.nodes.values() if record.tag is not None)
    tags = [(_code(tag), str(count)) for tag, count in sorted(counts.items())]
    yield from _section("Tags", _table(("tag", "nodes"), tags))
    for status, title in (("absorbed", "Absorbed modules"), ("unused", "Unused modules")):
        rows = [
            (_code(path), _code(record.class_))
            for path, record in hierarchy.modules.items()
            if record.status == status
        ]
        if rows:
            yield from _section(title, [_STATUS[status], "", *_table(("module", "class"), rows)])
    versions = hierarchy.export.versions.items()
    yield from _section("Versions", _table(("package", "version"), versions))


def _look(report: ExportReport) -> str:
    """Link to the page, or say how to write one."""
    if report.view_path is None:
        return f"`modelexport view {_escape(report.onnx_path.name)}` shows it as a picture."
    return f"[Look at it]({quote(report.view_path.name)}): a page with modules as nested boxes."


_STATUS = {
    "absorbed": (
        "They ran, and the exporter folded or fused all of their work into other nodes or weights."
    ),
    "unused": "They did not run with the example inputs.",
}


def _summary(report: ExportReport) -> Iterator[Sequence[str]]:
    hierarchy = report.hierarchy
    statistics = hierarchy.statistics
    yield "source", _code(hierarchy.model.source)
    is_requested = report.strategy == report.requested
    request = "" if is_requested else f" ({report.requested} was asked for)"
    yield "strategy", f"{report.strategy}{request}"
    yield "exporter", report.exporter
    if report.fallback_reason is not None:
        yield f"{EXPORTERS[0].name} failed", _escape(report.fallback_reason)
    if hierarchy.export.inputs_from is not None:
        yield "inputs from", _escape(hierarchy.export.inputs_from)
    yield "opset", str(hierarchy.model.opset)
    tagged = f"{statistics.tagged_nodes} tagged ({statistics.coverage:.1%})"
    yield "nodes", f"{statistics.nodes}, {tagged}"
    yield "auxiliary nodes", str(statistics.auxiliary_nodes)
    yield "tags", str(statistics.tags)
    status = ", ".join(f"{count} {name}" for name, count in statistics.module_status.items())
    yield "modules", f"{statistics.modules} ({status})"
    root = hierarchy.modules[""].parameter_count
    if isinstance(root, int):
        yield "parameters", f"{root:,}"
    files = [report.onnx_path, *report.data_paths, report.sidecar_path]
    yield "files", ", ".join(_code(path.name) for path in files)


def _value_row(kind: str, info: TensorInfo) -> Sequence[str]:
    shape = " x ".join("?" if dim is None else str(dim) for dim in info.shape)
    return kind, _code(info.name), info.dtype, shape


def _tree(modules: dict[str, ModuleRecord]) -> Iterator[str]:
    lines = shorten(outline(modules), _MOST_ROWS)
    width = max((len(line.text) for line in lines), default=0)
    yield "```text"
    for line in lines:
        record = modules[line.paths[0]]
        status = "" if record.status == "nodes" else f"  {record.status}"
        yield f"{_escape(line.text):{width}}  {record.nodes:6}{status}"
    yield "```"
    yield from (
        "",
        "Numbers are nodes, with those of the modules below; `x12` stands for twelve modules that "
        "look the same.",
    )


def _evidence(hierarchy: Sidecar) -> Iterator[Sequence[str]]:
    statistics = hierarchy.statistics
    methods = sorted(statistics.methods.items(), key=lambda item: -item[1])
    for name, count in [*methods, ("none", statistics.nodes - statistics.tagged_nodes)]:
        if count:
            yield name, str(count), f"{count / statistics.nodes:.1%}"


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    yield from lines


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    rows = list(rows)
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows[:_MOST_ROWS]:
        yield f"| {' | '.join(row)} |"
    if len(rows) > _MOST_ROWS:
        yield from ("", f"… and {len(rows) - _MOST_ROWS} more in the sidecar.")


def _code(text: str) -> str:
    return f"`{_escape(text)}`" if text else "(root)"


def _escape(text: str) -> str:
    """Percent-encode what would end a cell of a table or be taken for markup."""
    return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", text)
