"""annotate_layers(): ONNX Runtime's layer annotations, by which it places nodes on devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from modelexport.errors import ArgumentError, SourceError
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import check_output_path, transaction
from modelexport.onnx_file.model_file import StrPath, open_mapped
from modelexport.onnx_file.output_files import check_no_overwrite, copy_data_files
from modelexport.quantization.select import as_patterns, find_nodes
from modelexport.tagged.model import TaggedModel, load
from modelexport.tagged.records import sidecar_path
from modelexport.verification.runtime import ANNOTATION, supports_layer_annotations

_SYNTAX = re.compile(r"[(),;=\s]")
"""The characters that separate annotations in ONNX Runtime's session option."""


class LayerAnnotations(msgspec.Struct, frozen=True):
    """What `annotate_layers` wrote."""

    onnx_path: Path
    layers: dict[str, int]
    """How many nodes have each annotation."""
    setting: str
    """The annotations as the session option `session.layer_assignment_settings` lists them."""


def annotate_layers(
    path: StrPath,
    output_path: StrPath,
    patterns: str | Sequence[str],
    *,
    call: int | None = None,
    covering: bool = False,
) -> LayerAnnotations:
    """Write a copy of a file in which the nodes of modules have a layer annotation.

    ONNX Runtime assigns annotated nodes to devices, by the session option
    `session.layer_assignment_settings`. The annotation of a node is the pattern that matches its
    module, and the last one if several do. Nodes of subgraphs are placed with the node around them.

    Args:
        path: The tagged file.
        output_path: The file to write.
        patterns: Tags, module paths, aliases, or globs on paths and tags.
        call: Which call of the modules, from 0.
        covering: Whether nodes count that implement operations of the modules as well.

    Returns:
        The annotations, and how to pass them to a session.

    Raises:
        ArgumentError: A pattern matches nothing or cannot be an annotation, or the file has
            annotations already.
        FileError: A file cannot be read or written.
        FormatError: It is not a model, or has no tags.
        SourceError: The installed ONNX Runtime has no layer annotations.
    """
    target = check_output_path(output_path)
    model = load(path)
    if not supports_layer_annotations():
        raise SourceError(
            "the installed ONNX Runtime has no layer annotations", hint="install 1.31 or newer"
        )
    annotations = _annotations(model, as_patterns(patterns), call, covering)
    names = model.data_files
    check_no_overwrite(model.path, names, target)
    with open_mapped(model.path, whole=True) as data, transaction(target.parent) as stage:
        copy_data_files(stage, model.path, names, target)
        if model.has_sidecar:
            sidecar = stage.write("sidecar", [sidecar_path(model.path).read_bytes()])
            stage.publish(sidecar, sidecar_path(target).name)
        chunks = wire.with_node_metadata(data, ANNOTATION, annotations)
        stage.publish(stage.write("model", chunks), target.name)
        stage.commit()
    layers = dict(Counter(filter(None, annotations)))
    return LayerAnnotations(target, layers, ", ".join(f"={name}" for name in layers))


def _annotations(
    model: TaggedModel, patterns: Sequence[str], call: int | None, covering: bool
) -> list[str | None]:
    """Return the annotation of each node of the main graph."""
    unusable = next((text for text in patterns if not text or _SYNTAX.search(text)), None)
    if unusable is not None or not patterns:
        raise ArgumentError(
            f"{unusable or ''!r} cannot be a layer annotation",
            hint="name modules by their path, such as blocks.0",
        )
    found: dict[int, str] = {}
    for pattern in patterns:
        nodes = find_nodes(model, pattern, call=call, covering=covering)
        found.update(dict.fromkeys(nodes, pattern))
    annotations = []
    for index, (node, proto) in enumerate(zip(model.graph.nodes, model.graph.protos, strict=True)):
        if node.enclosing >= 0 or node.function:
            continue
        if index in found and any(entry.key == ANNOTATION for entry in proto.metadata_props):
            raise ArgumentError(
                f"{model.path.name} has layer annotations already", hint="pass the file without"
            )
        annotations.append(found.get(index))
    return annotations
