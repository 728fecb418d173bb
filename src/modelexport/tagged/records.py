"""The records of the map: the tag of a node, the sidecar and the model metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from modelexport.errors import FileError, FormatError
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.options import SourceOptions

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON may raise: it is none, or not as it should be; it is no text; it is too deep."""

_MARK = "hierarchy_"
_BEGINNING = '{"' + _MARK

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(NodeTag)


def encode_tag(tag: NodeTag) -> bytes:
    """The doc_string for a tag."""
    return _encoder.encode(tag)


def decode_tag(doc_string: str | bytes) -> NodeTag | None:
    """The tag in a doc_string, or None where it holds no tag of ours."""
    if not doc_string:
        return None
    try:
        return _decoder.decode(doc_string)
    except UNREADABLE:
        return None


def tags_digest(keys: Iterable[str], tags: Iterable[NodeTag | None]) -> str:
    """A digest of what the nodes of a file say, by their keys, whatever their order."""
    known: dict[int, bytes] = {}  # nodes that say the same share one object
    told = []
    for tag in tags:
        short = known.get(id(tag))
        if short is None:
            short = known[id(tag)] = hashlib.sha256(_encoder.encode(tag)).digest()
        told.append(short)
    lines = sorted(zip(keys, told, strict=True))
    return hashlib.sha256(msgspec.msgpack.encode(lines)).hexdigest()[:32]


def looks_like_tag(doc_string: str | bytes) -> bool:
    """Whether a doc_string was a tag of ours, whole or in part; one that is not UTF-8 comes as bytes."""
    if isinstance(doc_string, bytes):
        doc_string = doc_string.decode("utf-8", "replace")
    return _MARK in doc_string or (bool(doc_string) and _BEGINNING.startswith(doc_string))


FORMAT = "modelexport-hierarchy/1"
METADATA_KEY = "modelexport.hierarchy"


class ModelRecord(msgspec.Struct, frozen=True, gc=False, rename={"class_": "class"}):
    """The model and its file."""

    class_: str
    """The qualified class of the model, `class` in JSON."""
    source: str
    """What the model was named by, as a folder's name or a factory; its class where it was passed as an object."""
    onnx: str
    """The name of the file."""
    opset: int
    """Of ONNX's own operators."""
    ir_version: int


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """A tensor's name, type and shape. A symbolic size is a text, one that is not known is null."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


class ExtractionRecord(msgspec.Struct, frozen=True, gc=False):
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
    """How the export was made."""

    strategy: str
    """The strategy that was used."""
    exporter: str
    requested: str
    """The one that was asked for."""
    fallback_reason: str | None
    """Why dynamo could not, where `auto` went on with torchscript."""
    seed: int | None
    """Of random inputs and weights, where the command line made them."""
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    dropped_outputs: tuple[str, ...]
    """What the model returned and ONNX cannot hold, as it is not a tensor."""
    versions: dict[str, str]
    """Of the packages that wrote the file."""
    inputs_from: str | None = None
    """Where the example inputs came from, in words."""
    source_options: SourceOptions | None = None
    """What the command line said, for `verify`."""
    piece: ExtractionRecord | None = None
    """Only in a file that was cut out of another."""
    scrubbed: bool | msgspec.UnsetType = msgspec.UNSET
    """Only there, and true, if torch's own metadata was taken out: `strip` then gives the baseline without it."""


class NodeRecord(msgspec.Struct, frozen=True, gc=False):
    """One node, by its key: the name of its first output, with the path of the body that it is in."""

    name: str
    """May be empty or repeated."""
    op_type: str
    module: str | None
    """Null, as are `tag` and `method`, where the strategy leaves the node without a tag."""
    tag: str | None
    tags: tuple[str, ...]
    """As `hierarchy_tags`."""
    method: str | None
    call: int | None
    inputs: tuple[str, ...] = ()
    """The tensors that it reads."""
    attributes: str | None = None
    """A digest of the attributes, and of domain and further outputs where there are any."""
    covers: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """As `hierarchy_covers`; only where the node implements operations of several modules."""


class TensorRecord(msgspec.Struct, frozen=True, gc=False):
    """Who makes a tensor and who reads it, by tag."""

    producer: str | None
    """Null for inputs and weights of the graph, and for nodes without a tag."""
    consumers: tuple[str, ...]


class Statistics(msgspec.Struct, frozen=True, gc=False):
    """Counts over the whole file."""

    nodes: int
    tagged_nodes: int
    coverage: float
    """The share of nodes that have a tag, from 0 to 1."""
    tags: int
    """How many different tags nodes have."""
    auxiliary_nodes: int
    """Found by `dataflow` or `root`."""
    methods: dict[str, int]
    """Nodes by evidence."""
    modules: int
    module_status: dict[str, int]
    """Modules by status."""
    tensors: int
    topology: str = ""
    """A digest of all nodes and edges, to tell when the graph is changed."""


class Sidecar(msgspec.Struct, frozen=True, gc=False):
    """`<stem>_hierarchy.json`: the whole map."""

    format: str
    """`modelexport-hierarchy/1`. A reader should refuse another."""
    model: ModelRecord
    export: ExportRecord
    modules: dict[str, ModuleRecord]
    """By module path; the root is empty."""
    expected_hierarchy: tuple[str, ...]
    """The tags of the modules that ran, in the order of their first call."""
    nodes: dict[str, NodeRecord]
    """By the name of the first output."""
    tensors: dict[str, TensorRecord]
    """By name."""
    statistics: Statistics


class EmbeddedMap(msgspec.Struct, frozen=True, gc=False):
    """The model-level metadata: enough to explain the file when the sidecar is lost."""

    format: str
    """As in the sidecar."""
    strategy: str
    exporter: str
    model: ModelRecord
    export: ExportRecord
    modules: dict[str, ModuleRecord]
    topology: str = ""
    """A digest of all nodes and edges."""
    tags_digest: str = ""
    """Of what the nodes say."""
    sidecar_digest: str = ""
    """Of the sidecar that was written with the file."""
    digest: str = ""
    """Of all the rest, to tell when the metadata itself is changed."""

    def computed_digest(self) -> str:
        return text_digest(_sorted_encoder.encode(msgspec.structs.replace(self, digest="")))


_sorted_encoder = msgspec.json.Encoder(order="sorted")


def encode_sidecar(sidecar: Sidecar) -> bytes:
    return _sorted_encoder.encode(sidecar) + b"\n"


def encode_embedded(embedded: EmbeddedMap) -> str:
    return _sorted_encoder.encode(embedded).decode()


def decode_embedded(text: str) -> EmbeddedMap:
    try:
        return msgspec.json.decode(text, type=EmbeddedMap)
    except UNREADABLE as error:
        raise FormatError(f"the model's {METADATA_KEY} metadata cannot be read: {error}") from error


def text_digest(text: bytes) -> str:
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
        raise FormatError(
            f"{path} is not a hierarchy file: {error}", hint="export the model again"
        ) from error
