"""The records of the map: the tag of a node, the sidecar and the model metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from modelexport.errors import FileError, FormatError
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.onnx_file.digests import record_digest
from modelexport.onnx_file.digests import text_digest as text_digest
from modelexport.options import SourceOptions

FORMAT = "modelexport-hierarchy/1"
METADATA_KEY = "modelexport.hierarchy"
REPLACED = ".replaced"
"""Appended to the key of metadata that `retag` replaced, so that `strip` can restore it."""
NAMESPACE_KEY = "namespace"
"""The key of a node's metadata that torch, and the ONNX adapter of Model Explorer, use."""
FUNCTIONS_KEY = "modelexport.functions"
"""The metadata of a file whose modules are local functions, by which it can be inlined."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding JSON may raise: it is not JSON, or has other fields; not UTF-8; nested too deep."""

_MARK = "hierarchy_"
_BEGINNING = '{"' + _MARK

_encoder = msgspec.json.Encoder()
_sorted_encoder = msgspec.json.Encoder(order="sorted")
_decoder = msgspec.json.Decoder(NodeTag)


def encode_tag(tag: NodeTag) -> bytes:
    """Encode a tag as a doc_string."""
    return _encoder.encode(tag)


def decode_tag(doc_string: str | bytes) -> NodeTag | None:
    """Decode the tag in a doc_string; return None where it is not a tag."""
    if not doc_string:
        return None
    try:
        return _decoder.decode(doc_string)
    except UNREADABLE:
        return None


def tags_digest(keys: Iterable[str], tags: Iterable[NodeTag | None]) -> str:
    """Return a digest of the keys and tags of nodes, whatever their order."""
    known: dict[int, bytes] = {}  # nodes of one module mostly share one object
    digests = []
    for tag in tags:
        digest = known.get(id(tag))
        if digest is None:
            digest = known[id(tag)] = hashlib.sha256(_encoder.encode(tag)).digest()
        digests.append(digest)
    return record_digest(sorted(zip(keys, digests, strict=True)))


def is_map_key(key: str) -> bool:
    """Return whether a key of the model's metadata is that of a map, in effect or replaced."""
    return key.replace(REPLACED, "") == METADATA_KEY


def looks_like_tag(doc_string: str | bytes) -> bool:
    """Return whether a doc_string is or was a tag, possibly a damaged one."""
    if isinstance(doc_string, bytes):  # as protobuf returns one that is not UTF-8
        doc_string = doc_string.decode("utf-8", "replace")
    return _MARK in doc_string or (bool(doc_string) and _BEGINNING.startswith(doc_string))


class ModelRecord(msgspec.Struct, frozen=True, gc=False, rename={"class_": "class"}):
    """The model and its file."""

    class_: str
    """The qualified class of the model, `class` in JSON."""
    source: str
    """The name of its source, a hub name, a folder or a factory; its class for a model object."""
    onnx: str
    """The name of the file."""
    opset: int
    """The version of ONNX's own operator set."""
    ir_version: int


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """Name, element type and shape of a value; a size is a number, a symbol, or null if unknown."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


class ExtractionRecord(msgspec.Struct, frozen=True, gc=False):
    """Where an extracted model comes from."""

    source: str
    """The name of the file that it was extracted from."""
    module: str
    """The path of the module."""
    tag: str | None
    call: int | None
    """The call of the module, where only one was extracted."""
    part: int | None
    """Which part of a partition, where one call or the module's own nodes take more than one."""
    nodes: int
    """The number of the module's nodes, those in their subgraphs included."""
    pulled_in: tuple[str, ...]
    """The keys of nodes outside the module that compute constants for it.

    They are in the extracted model as nodes, or as the values that they have at fixed shapes."""
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


class ExportRecord(msgspec.Struct, frozen=True, gc=False):
    """How the model was exported."""

    strategy: str
    """The strategy that was used."""
    exporter: str
    requested: str
    """The strategy that was requested."""
    fallback_reason: str | None
    """Why dynamo failed, where `auto` used another exporter."""
    seed: int | None
    """The seed of random inputs and parameters, where the command line generated them."""
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    dropped_outputs: tuple[str, ...]
    """Results of the model that are not tensors, and so not in the file."""
    versions: dict[str, str]
    """The versions of the packages that wrote the file."""
    inputs_from: str | None = None
    """Where the example inputs came from, in words."""
    source_options: SourceOptions | None = None
    """The options of the command line, for `verify`."""
    piece: ExtractionRecord | None = None
    """Only in an extracted model."""
    example_inputs: dict[str, ExampleInput] = {}
    """The example inputs by the name of the graph's input, where these could be matched."""
    retag: RetagRecord | msgspec.UnsetType = msgspec.UNSET
    """Only in a file that was retagged."""
    scrubbed: bool | msgspec.UnsetType = msgspec.UNSET
    """True where the exporter's metadata was removed; `strip` does not restore it. Else absent."""
    namespaces: bool | msgspec.UnsetType = msgspec.UNSET
    """True where the metadata of each node has its tag as `namespace`; `strip` removes it. Else
    absent."""
    part: str | msgspec.UnsetType = msgspec.UNSET
    """Which part of a language model the file is, such as `decode`. Else absent."""


class ExampleInput(msgspec.Struct, frozen=True, gc=False):
    """One example input: enough to draw inputs like it."""

    dtype: str
    """As numpy names it."""
    shape: tuple[int, ...]
    low: float
    """The least finite value."""
    high: float
    """The greatest finite value."""
    values: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """The values of a small input of integers or bools, which are rarely arbitrary."""


class RetagRecord(msgspec.Struct, frozen=True, gc=False):
    """How the map of a file that another tool wrote was made."""

    original: str
    """The name of the tagged file that the tags come from."""
    changed: str
    """The name of the file that the nodes come from."""
    compared: str | None
    """On which inputs the values of the two files were compared; null if they were not."""


class NodeRecord(msgspec.Struct, frozen=True, gc=False):
    """One node, by its key: the name of its first output, with the path of its subgraph."""

    name: str
    """May be empty or repeated."""
    op_type: str
    module: str | None
    """The module path; null, as are `tag` and `method`, for a node without a tag."""
    tag: str | None
    tags: tuple[str, ...]
    """As `hierarchy_tags`."""
    method: str | None
    call: int | None
    inputs: tuple[str, ...] = ()
    """The values that it consumes."""
    attributes: str | None = None
    """A digest of the attributes, and of domain and further outputs where it has them."""
    covers: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """As `hierarchy_covers`; only where the node implements operations of several modules."""


class TensorRecord(msgspec.Struct, frozen=True, gc=False):
    """The tags of a value's producer and consumers."""

    producer: str | None
    """Null for inputs and initializers of the graph, and where the producer has no tag."""
    consumers: tuple[str, ...]
    """Sorted."""


class Statistics(msgspec.Struct, frozen=True, gc=False):
    """Counts over the whole file."""

    nodes: int
    tagged_nodes: int
    coverage: float
    """The share of nodes that have a tag, from 0 to 1."""
    tags: int
    """The number of different tags of nodes."""
    auxiliary_nodes: int
    """The number of nodes tagged by `dataflow` or `root`."""
    methods: dict[str, int]
    """Nodes by evidence."""
    modules: int
    module_status: dict[str, int]
    """Modules by status."""
    tensors: int
    topology: str = ""
    """A digest of all nodes and edges, to detect that the graph was changed."""


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
    """A digest of the tags of all nodes."""
    sidecar_digest: str = ""
    """A digest of the sidecar that was written with the file."""
    digest: str = ""
    """A digest of all other fields, to detect that the metadata itself was changed."""

    def computed_digest(self) -> str:
        """Return the digest of everything but `digest`, which shows whether it was changed."""
        return text_digest(_sorted_encoder.encode(msgspec.structs.replace(self, digest="")))


def encode_sidecar(sidecar: Sidecar) -> bytes:
    """Encode a sidecar as the content of its file."""
    return _sorted_encoder.encode(sidecar) + b"\n"


def encode_embedded(embedded: EmbeddedMap) -> str:
    """Encode the model-level metadata as the value of the entry `METADATA_KEY`."""
    return _sorted_encoder.encode(embedded).decode()


def decode_embedded(text: str) -> EmbeddedMap:
    """Decode the model-level metadata, the value of the entry `METADATA_KEY`.

    Raises:
        FormatError: It is damaged.
    """
    try:
        return msgspec.json.decode(text, type=EmbeddedMap)
    except UNREADABLE as error:
        raise FormatError(f"the model's {METADATA_KEY} metadata cannot be read: {error}") from error


def sidecar_path(onnx_path: Path) -> Path:
    """Return the path of the sidecar of a model file: `<stem>_hierarchy.json` beside it."""
    return onnx_path.with_name(f"{onnx_path.stem}_hierarchy.json")


def read_sidecar(path: Path) -> Sidecar:
    """Read a sidecar.

    Raises:
        FileError: It cannot be read.
        FormatError: It is not a sidecar, or damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Sidecar)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except UNREADABLE as error:
        raise FormatError(
            f"{path} is not a hierarchy file: {error}", hint="export the model again"
        ) from error
