"""The files that an export writes: each is checked before the export begins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from modelexport.errors import ArgumentError, FileError
from modelexport.graphml.format import check_graphml, data_path
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.report import report_path
from modelexport.tagged.records import sidecar_path


def check_outputs(
    output_path: object,
    *,
    with_graphml: bool,
    graphml_output: str | os.PathLike[str] | None,
    graphml_parameters: str,
    with_report: bool,
    graph_files: tuple[object, ...],
) -> tuple[Path, Path | None]:
    """Return the paths of the model and of its GraphML, if every file can be written and none overwrites another."""
    target = check_output_path(output_path)
    wanted = with_graphml or graphml_output is not None
    graphml = check_graphml(target, graphml_output, graphml_parameters) if wanted else None
    written = {path.resolve(): path for path in _written(target, graphml, with_report)}
    for graph_file in graph_files:
        if graph_file is not None:
            _check_graph_file(check_output_path(graph_file, suffix=""), written)
    return target, graphml


def _written(target: Path, graphml: Path | None, with_report: bool) -> Iterator[Path]:
    yield from (target, sidecar_path(target), target.with_name(f"{target.name}.data"))
    if with_report:
        yield report_path(target)
    if graphml is not None:
        yield from (graphml, data_path(graphml))


def _check_graph_file(path: Path, written: dict[Path, Path]) -> None:
    if path.resolve() in written:
        raise ArgumentError(
            f"the graph file {path} would overwrite {written[path.resolve()].name}, which the export writes",
            hint="choose another file",
        )
    special = path.exists() and not path.is_file()  # a pipe or a device is written to as it is
    if not special and not os.access(path.parent, os.W_OK):
        raise FileError(
            f"cannot write to {path.parent}", hint="choose a folder that you may write to"
        )
