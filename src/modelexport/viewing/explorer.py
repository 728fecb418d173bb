"""write_model_explorer(): write a model as graphs for Model Explorer, nested as its modules are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from modelexport.graph.flat import pause_collector
from modelexport.graphml.text import load_with_types
from modelexport.onnx_file.atomic_write import check_output_path, transaction
from modelexport.onnx_file.model_file import StrPath, as_path, external_files
from modelexport.onnx_file.output_files import check_no_overwrite
from modelexport.tagged.records import sidecar_path
from modelexport.viewing.explorer_format import GraphCollection
from modelexport.viewing.explorer_graphs import GraphBuilder
from modelexport.viewing.node_data import ModuleValues, node_data
from modelexport.viewing.overlays import Overlay


class ExplorerFiles(msgspec.Struct, frozen=True):
    """The files that `write_model_explorer` wrote."""

    graphs: Path
    """The file to open in Model Explorer."""
    node_data: tuple[Path, ...]
    """A file for each overlay, to load with "Add per-node data"."""
    nodes: int
    """The number of operators."""
    modules: int
    """The number of modules that are drawn as groups."""
    sidecar_refused: str | None = None
    """Why the sidecar beside a model without tags was not used; None if it was."""


def write_model_explorer(
    path: StrPath,
    output_path: StrPath,
    overlays: Iterable[Overlay] = (),
    sources: Iterable[StrPath] = (),
) -> ExplorerFiles:
    """Write a model as a JSON file that Model Explorer opens.

    Every module that has nodes is a group, in the group of its parent. Initializer data is not
    read. An overlay is written to a file of its own, `<stem>_<name>.json` beside the output.

    Args:
        path: The model file.
        output_path: The file to write, which ends in `.json`.
        overlays: Values of modules. Each module also lists its own in the side panel.
        sources: The files that the overlays were read from.

    Returns:
        The files and what is in them.

    Raises:
        ArgumentError: An output would overwrite a file of the model, or one of the sources.
        FileError: A file cannot be read or written.
        FormatError: The file is not an ONNX model.
    """
    source, target = as_path(path), check_output_path(output_path, suffix=".json")
    given = tuple(overlays)
    with pause_collector():
        builder = read_graphs(source, given)
        files = dict(zip(_data_files(target, given), given, strict=True))
        own = (*external_files(builder.model.proto), sidecar_path(source).name)
        check_no_overwrite(source, own, target, *files)
        for read in sources:
            check_no_overwrite(as_path(read), (), target, *files)
        encode = msgspec.json.encode
        with transaction(target.parent) as stage:
            for number, (file, overlay) in enumerate(files.items()):
                data = node_data(builder.module_of, builder.namespaces.lineage, overlay)
                stage.publish(stage.write(f"data-{number}", [encode(data)]), file.name)
            collection = GraphCollection(source.name, builder.graphs)
            stage.publish(stage.write("graphs", [encode(collection)]), target.name)
            stage.commit()
    return ExplorerFiles(
        target,
        tuple(files),
        len(builder.model.graph.nodes),
        len(builder.drawn_modules),
        builder.model.in_effect.refused,
    )


def read_graphs(path: Path, overlays: Sequence[Overlay] = ()) -> GraphBuilder:
    """Read a model file, and build its graphs.

    Args:
        path: The model file.
        overlays: Values of modules, for the side panel.

    Raises:
        FileError: The file cannot be read.
        FormatError: It is not an ONNX model.
    """
    return GraphBuilder(*load_with_types(path), ModuleValues(overlays))


def _data_files(target: Path, overlays: Iterable[Overlay]) -> list[Path]:
    """Name a file for each overlay, after its name."""
    names: list[str] = []
    for overlay in overlays:
        slug = re.sub(r"[^a-z0-9]+", "-", overlay.name.lower()).strip("-") or "values"
        name, number = slug, 1
        while name in names:
            number += 1
            name = f"{slug}-{number}"
        names.append(name)
    return [target.with_name(f"{target.stem}_{name}.json") for name in names]
