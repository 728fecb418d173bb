"""Export with the TorchScript exporter."""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from modelexport.capture.inputs import ModelInputs, in_signature_order, keyword_shim
from modelexport.capture.jit_lowering import read_trace, watch_lowering
from modelexport.capture.jit_trace import JitTraceReader
from modelexport.capture.model_state import (
    exceeds_one_file,
    preserve_model,
    silence_torch,
    swap_attributes,
)
from modelexport.capture.module_tree import forward_args
from modelexport.capture.outputs import filter_outputs
from modelexport.capture.recorder import hooks_not_compiled, record_calls
from modelexport.capture.trace import Baseline, TorchOptions
from modelexport.capture.tracer_warnings import collect_tracer_warnings
from modelexport.errors import ArgumentError
from modelexport.garbage import pause_collector
from modelexport.modules.tree import ModuleTree


def export(
    model: nn.Module, tree: ModuleTree, inputs: ModelInputs, target: Path, options: TorchOptions
) -> Baseline:
    """Export with `torch.onnx.export(dynamo=False)` into memory; large weights go straight to a data file."""
    ask, shim = True, _needs_shim(model, inputs)
    while True:
        try:
            return _export_once(model, tree, inputs, target, options, JitTraceReader(ask), shim)
        except _TraceDisturbedError:
            # Asking for a value put a constant into the trace; without asking, the trace is the baseline's.
            ask = False
        except TypeError:
            # The tracer passes keywords by position and fills in defaults, which many models reject.
            if shim:
                raise
            shim = True


class _TraceDisturbedError(Exception):
    """The trace is not the one that a plain export would have made."""


def _export_once(
    model: nn.Module,
    tree: ModuleTree,
    inputs: ModelInputs,
    target: Path,
    options: TorchOptions,
    tap: JitTraceReader,
    shim: bool,
) -> Baseline:
    inputs = inputs if shim else in_signature_order(model, inputs)
    names = options.input_names or inputs.names
    sink = _Sink()
    apart = options.external_data or exceeds_one_file(model)
    with (
        preserve_model(model),
        hooks_not_compiled(model),
        filter_outputs(model, names or (), may_be_numbers=False) as shape,
        record_calls(model, tree, tap) as recorder,
        watch_lowering(tap) as lowering,
        silence_torch(options.verbose),
        collect_tracer_warnings(options.verbose) as notes,
        store_weights_apart(target) if apart else nullcontext() as place,
        pause_collector(),
    ):
        args, kwargs = (
            (_by_position(model, inputs), None)
            if shim
            else (inputs.for_torch, inputs.kwargs or None)
        )
        torch.onnx.export(
            model,
            args,
            sink,  # type: ignore[arg-type]
            kwargs=kwargs,
            dynamo=False,
            optimize=options.optimize,
            opset_version=options.opset_version,
            input_names=names,
            output_names=options.output_names or shape.names,
            dynamic_axes=_dynamic_axes(options.dynamic_shapes, names),
        )
    if tap.disturbed:
        raise _TraceDisturbedError
    data = memoryview(sink.content if place is None else place(sink.content))
    files = {path.name: path for path in target.parent.iterdir() if path.stat().st_size}
    with pause_collector():
        trace = read_trace(recorder.log(), lowering)
    text = str(lowering.final) if options.with_graph_text else None
    return Baseline(data, files, trace, tuple(shape.dropped), text, tuple(notes))


def _needs_shim(model: nn.Module, inputs: ModelInputs) -> bool:
    """Whether keywords need to go by position.

    The tracer makes inputs of the file of the numbers among them, and of those that it fills in
    as defaults; and it does not know keywords that forward has no name for.
    """
    if not inputs.kwargs:
        return False
    parameters = inspect.signature(model.forward).parameters
    defaults = {name: item.default for name, item in parameters.items()}
    given = dict(zip(forward_args(model), inputs.args, strict=False)) | inputs.kwargs
    numbers = any(
        isinstance(v, int | float) and not isinstance(v, bool) for v in (defaults | given).values()
    )
    return numbers or any(name not in parameters for name in inputs.kwargs)


def _by_position(model: nn.Module, inputs: ModelInputs) -> tuple[Any, ...]:
    """Rebind forward to take the tensor inputs by position, and give them in that order."""
    named = {**dict(zip(forward_args(model), inputs.args, strict=False)), **inputs.kwargs}
    tensors = {name: value for name, value in named.items() if not _is_constant(value)}
    constants = {name: value for name, value in named.items() if _is_constant(value)}
    keyword_shim(model, list(tensors), constants)
    return tuple(tensors.values())


def _is_constant(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _dynamic_axes(dynamic_shapes: Any, names: Any) -> dict[str, dict[int, str]] | None:
    """torch's newer `dynamic_shapes`, by input name, as the axes that this exporter takes."""
    if not dynamic_shapes:
        return None
    if not isinstance(dynamic_shapes, Mapping) or names is None:
        raise ArgumentError(
            "the torchscript exporter needs dynamic_shapes by input name",
            hint="pass a dict such as {'input_ids': {0: 'batch'}} together with keyword inputs or input_names",
        )
    axes: dict[str, dict[int, str]] = {}
    for name, dims in dynamic_shapes.items():
        items = dims.items() if isinstance(dims, Mapping) else enumerate(dims or ())
        axes[name] = {
            axis: str(
                getattr(dim, "__name__", None)
                or (dim if isinstance(dim, str) else f"{name}_{axis}")
            )
            for axis, dim in items
            if dim is not None and not isinstance(dim, int)
        }
    return axes


class _Sink:
    """A file for torch to write its model bytes into; keeps the object itself, without a copy."""

    content: bytes = b""

    def write(self, content: bytes) -> int:
        self.content = content
        return len(content)

    def flush(self) -> None:
        """Nothing is buffered."""


_SMALLEST = 1024
"""Up to this size a weight stays in the model, where readers of shapes and constants look for it."""
_PAGE = mmap.ALLOCATIONGRANULARITY
"""Each weight starts at a page, so that it can be mapped."""
_PARAMETERS = 0
"""The place of the weights among the arguments of torch's writer."""


@contextmanager
def store_weights_apart(target: Path) -> Iterator[Callable[[bytes], bytes]]:
    """While the block runs, torch writes one value for each large weight.

    What is yielded turns such bytes into the model that they stand for, and writes `<target>.data`.
    """
    held: dict[str, torch.Tensor] = {}
    write = torch._C.Graph._export_onnx  # type: ignore[attr-defined]

    def write_without(graph: Any, *arguments: Any) -> Any:
        weights: Mapping[str, torch.Tensor] = arguments[_PARAMETERS]
        held.update(
            (name, value) for name, value in weights.items() if _weight_size(value) > _SMALLEST
        )
        one = {
            name: value.new_zeros(1) if name in held else value for name, value in weights.items()
        }
        return write(graph, one, *arguments[1:])

    with swap_attributes(torch._C.Graph, _export_onnx=write_without):
        yield lambda content: _with_data_file(
            content, held, target.with_name(f"{target.name}.data")
        )


def _weight_size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _with_data_file(content: bytes, held: Mapping[str, torch.Tensor], data_file: Path) -> bytes:
    model = onnx.ModelProto.FromString(content)
    with data_file.open("wb") as out:
        for tensor in model.graph.initializer:
            if tensor.name not in held:
                continue
            values = held[tensor.name].detach().cpu().contiguous()
            out.seek(-(-out.tell() // _PAGE) * _PAGE)
            onnx.external_data_helper.set_external_data(
                tensor, data_file.name, out.tell(), _weight_size(values)
            )
            tensor.ClearField("raw_data")
            tensor.dims[:] = values.shape
            out.write(values.reshape(-1).view(torch.uint8).numpy().data)
    return bytes(model.SerializeToString())
