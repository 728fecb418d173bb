"""Call the quantizers and the float16 converter of ONNX Runtime on a prepared copy."""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import onnx

from modelexport.errors import FormatError, ModelExportError, SourceError, first_line
from modelexport.graph.nested import Subgraph, sort_nodes
from modelexport.option_values import spell_option
from modelexport.tagged.example_inputs import Array
from modelexport.verification.runtime import import_onnxruntime

LARGE_MODEL = 1 << 30
"""Bytes of a model from which a data file is written: protobuf has a limit of 2 GiB."""
_ERRORS_ONLY, _WARNINGS = 4, 2
_TO_HALF, _TO_FLOAT = "_cast_to_fp16_node", "_cast_to_fp32_node"
"""How the names of the casts end that the converter inserts."""
KEPT_COPY = "_kept"
"""How the names end of initializers that only nodes in float consume."""
_DERIVED = "_MatMul"
"""What the dynamic quantizer appends to the name of a node that it rewrites before it looks names
up; without it a node that is kept would be quantized under its new name."""


class Target(enum.StrEnum):
    """What a model is quantized to."""

    INT8_DYNAMIC = "int8-dynamic"
    """Weights in int8; the ranges of activations are computed while the model runs."""
    INT8_STATIC = "int8-static"
    """Weights and activations in int8; ranges are measured once, on calibration data."""
    FLOAT16 = "float16"


@contextlib.contextmanager
def _calling(action: str) -> Iterator[None]:
    """Silence a tool of ONNX Runtime, and map what it raises to an error of ours."""
    runtime = import_onnxruntime()
    handler, disabled = logging.NullHandler(), logging.root.manager.disable
    # A message at the root logger would otherwise install a handler for good.
    logging.root.addHandler(handler)
    logging.disable(logging.CRITICAL)
    runtime.set_default_logger_severity(_ERRORS_ONLY)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except ModelExportError:
        raise
    except ImportError as error:
        raise SourceError(
            f"onnxruntime cannot {action}: {first_line(error)}",
            hint="pip install 'modelexport[runtime]'",
        ) from error
    except Exception as error:  # each tool raises what it likes
        raise FormatError(
            f"onnxruntime cannot {action}: {first_line(error)}",
            hint=f"{spell_option('preprocess')} may help; or keep the modules that it fails on",
        ) from error
    finally:
        runtime.set_default_logger_severity(_WARNINGS)
        logging.disable(disabled)
        logging.root.removeHandler(handler)


def preprocess_file(source: Path, target: Path, is_large: bool) -> tuple[str, ...]:
    """Infer shapes and optimize the graph, as onnxruntime recommends before a quantization.

    Args:
        source: The model.
        target: The file to write.
        is_large: Whether to write a data file.

    Returns:
        Notes for the user.

    Raises:
        SourceError: onnxruntime, or what it needs for this, is not installed.
        FormatError: It cannot preprocess the model.
    """
    with _calling("preprocess the model"):
        from onnxruntime.quantization import shape_inference

        options: dict[str, Any] = {}
        if is_large:
            options = {
                "save_as_external_data": True,
                "all_tensors_to_one_file": True,
                "external_data_location": f"{target.name}.data",
            }
        try:
            shape_inference.quant_pre_process(str(source), str(target), **options)
        except Exception:  # symbolic shape inference gives up on some valid models
            shape_inference.quant_pre_process(
                str(source), str(target), skip_symbolic_shape=True, **options
            )
            return ("preprocessed without symbolic shape inference, which failed",)
    return ()


def convert(
    source: Path,
    target: Path,
    to: Target,
    excluded: Set[str],
    *,
    calibration: Sequence[dict[str, Array]],
    cache: Path,
    is_large: bool,
) -> None:
    """Quantize a prepared copy.

    Args:
        source: The copy, with a name on every node.
        target: The file to write.
        to: What to quantize it to.
        excluded: The names of the nodes that stay in float.
        calibration: The samples that a static quantization measures ranges on.
        cache: A file that holds these ranges once they have been measured.
        is_large: Whether to write a data file.

    Raises:
        SourceError: onnxruntime is not installed.
        FormatError: It cannot quantize the model.
    """
    split = source.with_name(f"split-{target.name}")
    with _calling(f"quantize the model to {to}"):
        proto = onnx.load(source, load_external_data=False)
        if _separate_initializers(proto, excluded):
            onnx.save(proto, split)
            source = split
        if to is Target.FLOAT16:
            _convert_to_half(source, proto.graph, target, excluded, is_large)
        else:
            _quantize(source, target, to, excluded, calibration, cache, is_large)
    split.unlink(missing_ok=True)


def _separate_initializers(proto: onnx.ModelProto, excluded: Set[str]) -> bool:
    """Change a model so that no excluded node shares an initializer with another node.

    The tools convert a shared one for both, so that an excluded node would read rounded values.

    Returns:
        Whether any did.
    """
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    kept, other = set[str](), set[str]()
    nodes = [node for subgraph in Subgraph(proto.graph) for node in subgraph.nodes]
    for node in nodes:
        (kept if node.name in excluded else other).update(node.input)
    shared = [name for name in tensors if name in kept and name in other]
    copies = {name: f"{name}{KEPT_COPY}" for name in shared}
    for name, copy in copies.items():
        tensor = proto.graph.initializer.add()
        tensor.CopyFrom(tensors[name])
        tensor.name = copy
    for node in nodes:
        if node.name in excluded and not copies.keys().isdisjoint(node.input):
            node.input[:] = [copies.get(name, name) for name in node.input]
    return bool(copies)


def _quantize(
    source: Path,
    target: Path,
    to: Target,
    excluded: Set[str],
    calibration: Sequence[dict[str, Array]],
    cache: Path,
    is_large: bool,
) -> None:
    from onnxruntime import quantization

    names = sorted(excluded)
    options: dict[str, Any] = {
        "nodes_to_exclude": [*names, *(f"{name}{_DERIVED}" for name in names)],
        "use_external_data_format": is_large,
    }
    if to is Target.INT8_DYNAMIC:
        quantization.quantize_dynamic(str(source), str(target), **options)
        return

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._rest = iter(calibration)

        def get_next(self) -> dict[str, Array] | None:
            return next(self._rest, None)

    if "calibration_cache_path" in inspect.signature(quantization.quantize_static).parameters:
        options["calibration_cache_path"] = str(cache)
    quantization.quantize_static(str(source), str(target), Reader(), **options)


def _convert_to_half(
    source: Path, graph: onnx.GraphProto, target: Path, excluded: Set[str], is_large: bool
) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    stored = {tensor.name for tensor in graph.initializer}
    computed = [value.name for value in (*graph.input, *graph.output) if value.name not in stored]
    model = convert_float_to_float16(
        str(source), keep_io_types=computed, node_block_list=sorted(excluded)
    )
    _restore_stored_types(model.graph)
    _join_casts(model.graph)
    sort_nodes(Subgraph(model.graph))
    onnx.save(model, target, save_as_external_data=is_large, location=f"{target.name}.data")


def _restore_stored_types(graph: onnx.GraphProto) -> None:
    """Give outputs that are initializers the type of these, which the converter leaves in float."""
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in graph.output:
        if value.name in types:
            value.type.tensor_type.elem_type = types[value.name]


def _join_casts(graph: onnx.GraphProto) -> None:
    """Connect values that stay in float directly, where the converter casts to half and back.

    They would otherwise be rounded, and overflow beyond 65,504. The converter also writes a cast
    twice if two nodes in float consume a value, which makes the model invalid.
    """
    inputs = {f"graph_input_cast{index}" for index in range(len(graph.input))}
    outputs = {f"graph_output_cast{index}" for index in range(len(graph.output))}
    exact = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.name in inputs or node.name.endswith(_TO_HALF)
    }
    joined = {
        node.output[0]: exact[node.input[0]]
        for node in graph.node
        if node.name.endswith(_TO_FLOAT) and node.input[0] in exact
    }
    for node in graph.node:
        if node.name in outputs:
            node.input[0] = exact.get(node.input[0], node.input[0])
        elif not joined.keys().isdisjoint(node.input):
            node.input[:] = [joined.get(name, name) for name in node.input]
    # One that casts to half may only feed some that cast to float.
    for suffix in (_TO_FLOAT, _TO_HALF):
        _drop_unused(graph, suffix)


def _drop_unused(graph: onnx.GraphProto, suffix: str) -> None:
    """Remove the nodes whose names end in a suffix if nothing consumes them, or all but one."""
    consumed = {value.name for value in graph.output}
    for subgraph in Subgraph(graph):
        consumed.update(name for node in subgraph.nodes for name in node.input)
        consumed.update(value.name for value in subgraph.graph.output)
    left, seen = onnx.GraphProto(), set[str]()
    for node in graph.node:
        if node.name.endswith(suffix):
            if consumed.isdisjoint(node.output) or not seen.isdisjoint(node.output):
                continue
            seen.update(node.output)
        left.node.append(node)
    del graph.node[:]
    graph.node.extend(left.node)
