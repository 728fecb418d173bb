"""Check the options of an export and the files that it writes, without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from modelexport.attribution.strategies import ExportStrategy, find_strategy
from modelexport.errors import ArgumentError, FileError
from modelexport.exporters import GRAPH_OPTIONS, find_exporter
from modelexport.graphml.format import check_graphml, check_mode, data_path
from modelexport.modules.tags import make_policy
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.options import ExportOptions
from modelexport.report import report_path
from modelexport.tagged.records import sidecar_path
from modelexport.tagged.strip import check_no_graph_text


class OutputPaths(NamedTuple):
    """The paths of an export's model and, if one is wanted, of its GraphML."""

    onnx: Path
    graphml: Path | None


def graph_files(options: ExportOptions) -> dict[str, str]:
    """Return the files for the text form of an exporter's graph.

    Args:
        options: The options of the export.

    Returns:
        The paths that are given, by option.
    """
    given = {name: getattr(options, name) for name in GRAPH_OPTIONS}
    return {name: path for name, path in given.items() if path is not None}


def check_options(options: ExportOptions) -> None:
    """Raise for options that cannot work, whatever the model is.

    Args:
        options: The options of the export.

    Raises:
        ArgumentError: A value is out of range or unknown, or two options exclude each other.
        ArgumentTypeError: A value has the wrong type.
    """
    if options.strategy != ExportStrategy.AUTO:
        find_strategy(options.strategy)
    if options.exporter is not None:
        find_exporter(options.exporter)
    if options.dynamic and options.dynamic_axes:
        raise ArgumentError(
            "--dynamic chooses the axes that --dynamic-axes sets", hint="give one of them"
        )
    if any(size < 1 for shape in options.input_shapes.values() for size in shape):
        raise ArgumentError(
            "a shape has a size below 1", hint="write it as 1,128 or input_ids=1,128"
        )
    check_mode(options.graphml_parameters)
    check_no_graph_text(options.scrub, *graph_files(options).values())
    make_policy(options.torch_nn_exceptions, options.include, options.exclude, options.max_depth)


def check_outputs(output_path: object, options: ExportOptions) -> OutputPaths:
    """Raise unless every file can be written and none overwrites another.

    Args:
        output_path: The path of the model.
        options: The options of the export, which name further files.

    Returns:
        The paths of the model and of its GraphML.

    Raises:
        ArgumentError: A path is unsuitable.
        ArgumentTypeError: A path is not a path.
        FileError: A folder does not exist or cannot be written to.
    """
    target = check_output_path(output_path)
    wanted = options.with_graphml or options.graphml_output is not None
    graphml = (
        check_graphml(target, options.graphml_output, options.graphml_parameters)
        if wanted
        else None
    )
    written = {path.resolve(): path for path in _written(target, graphml, options.with_report)}
    for graph_file in graph_files(options).values():
        _check_graph_file(check_output_path(graph_file, suffix=""), written)
    return OutputPaths(target, graphml)


def _written(target: Path, graphml: Path | None, with_report: bool) -> Iterator[Path]:
    yield from (target, sidecar_path(target), target.with_name(f"{target.name}.data"))
    if with_report:
        yield report_path(target)
    if graphml is not None:
        yield from (graphml, data_path(graphml))


def _check_graph_file(path: Path, written: dict[Path, Path]) -> None:
    if path.resolve() in written:
        name = written[path.resolve()].name
        raise ArgumentError(
            f"the graph file {path} would overwrite {name}, which the export writes",
            hint="choose another file",
        )
    # A pipe or a device has no temporary file beside it: its folder need not be writable.
    special = path.exists() and not path.is_file()
    if not special and not os.access(path.parent, os.W_OK):
        raise FileError(
            f"cannot write to {path.parent}", hint="choose a folder that you may write to"
        )
