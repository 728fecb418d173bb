"""The records of the sidecar file and of the model's own metadata, and their JSON."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from modelexport.errors import FileError, FormatError
from modelexport.tagged.codec import UNREADABLE

FORMAT = "modelexport-hierarchy/1"
METADATA_KEY = "modelexport.hierarchy"


class ModelRecord(msgspec.Struct, frozen=True, gc=False, rename={"class_": "class"}):
    class_: str
    source: str
    onnx: str
    opset: int
    ir_version: int


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


class SourceOptions(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What a command line said about where the model and its inputs come from, to have the same again."""

    task: str | None = None
    model_class: str | None = None
    revision: str | None = None
    random_weights: bool = False
    input_text: str | None = None
    input_shapes: dict[str, tuple[int, ...]] = {}
    input_specs: str | None = None


class PieceRecord(msgspec.Struct, frozen=True, gc=False):
    """What a model that was cut out of another is a piece of.

    `nodes` counts those of the module, with everything inside them; `pulled_in` are the nodes from
    outside that make constants for them, by their keys, as they are or as the value that they give
    at the model's fixed shapes. `part` numbers the pieces of one call, or
    of a module's own nodes, where it takes more than one.
    """

    source: str
    module: str
    tag: str | None
    call: int | None
    part: int | None
    nodes: int
    pulled_in: tuple[str, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


class ExportRecord(msgspec.Struct, frozen=True, gc=False):
    strategy: str
    exporter: str
    requested: str
    fallback_reason: str | None
    seed: int | None
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    dropped_outputs: tuple[str, ...]
    versions: dict[str, str]
    inputs_from: str | None = None
    source_options: SourceOptions | None = None
    piece: PieceRecord | None = None


class ModuleRecord(msgspec.Struct, frozen=True, gc=False, rename={"class_": "class"}):
    tag: str | None
    class_: str
    shown: bool
    status: str
    calls: int
    execution_order: int | None
    forward_args: tuple[str, ...]
    parameters: tuple[str, ...]
    direct_parameters: tuple[str, ...]
    children: tuple[str, ...]
    aliases: tuple[str, ...]
    nodes: int
    results: tuple[tuple[str | None, ...], ...] = ()
    """For each call the tensors and numbers it returned, by their names in the file; null for what is not there."""
    called_in: tuple[int, ...] = ()
    """For each call the call of the module above it that it was part of, -1 for none; empty if that ran only once."""


class NodeRecord(msgspec.Struct, frozen=True, gc=False):
    name: str
    op_type: str
    module: str | None
    tag: str | None
    tags: tuple[str, ...]
    method: str | None
    call: int | None
    inputs: tuple[str, ...] = ()
    attributes: str | None = None
    """A digest of the attributes, and of domain and further outputs where there are any."""


class TensorRecord(msgspec.Struct, frozen=True, gc=False):
    producer: str | None
    consumers: tuple[str, ...]


class Statistics(msgspec.Struct, frozen=True, gc=False):
    nodes: int
    tagged_nodes: int
    coverage: float
    tags: int
    auxiliary_nodes: int
    methods: dict[str, int]
    modules: int
    module_status: dict[str, int]
    tensors: int
    topology: str = ""
    """A digest of all nodes and edges, to tell when the graph is changed."""


class Sidecar(msgspec.Struct, frozen=True, gc=False):
    """`<stem>_hierarchy.json`: the whole map."""

    format: str
    model: ModelRecord
    export: ExportRecord
    modules: dict[str, ModuleRecord]
    expected_hierarchy: tuple[str, ...]
    nodes: dict[str, NodeRecord]
    tensors: dict[str, TensorRecord]
    statistics: Statistics


class Embedded(msgspec.Struct, frozen=True, gc=False):
    """The model-level metadata: enough to explain the file when the sidecar is lost."""

    format: str
    strategy: str
    exporter: str
    model: ModelRecord
    export: ExportRecord
    modules: dict[str, ModuleRecord]
    topology: str = ""
    tags_digest: str = ""
    sidecar_digest: str = ""
    digest: str = ""
    """Of all the rest, to tell when the metadata itself is changed."""

    def computed_digest(self) -> str:
        return content_digest(_sorted_encoder.encode(msgspec.structs.replace(self, digest="")))


_sorted_encoder = msgspec.json.Encoder(order="sorted")


def encode_sidecar(sidecar: Sidecar) -> bytes:
    return _sorted_encoder.encode(sidecar) + b"\n"


def encode_embedded(embedded: Embedded) -> str:
    return _sorted_encoder.encode(embedded).decode()


def decode_embedded(text: str) -> Embedded:
    try:
        return msgspec.json.decode(text, type=Embedded)
    except UNREADABLE as error:
        raise FormatError(f"the model's {METADATA_KEY} metadata cannot be read: {error}") from error


def content_digest(text: bytes) -> str:
    """What is recorded of a text, to tell later whether it is still the same."""
    return hashlib.sha256(text).hexdigest()[:32]


def sidecar_path(onnx_path: Path) -> Path:
    return onnx_path.with_name(f"{onnx_path.stem}_hierarchy.json")


def read_sidecar(path: Path) -> Sidecar:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Sidecar)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except UNREADABLE as error:
        raise FormatError(f"{path} is not a hierarchy file: {error}", hint="export the model again") from error
