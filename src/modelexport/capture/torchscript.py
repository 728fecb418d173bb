"""Export with the TorchScript exporter."""

from __future__ import annotations

import inspect
import mmap
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

# Private: torch.jit imports this class but does not export it. If torch moves it, importing this
# file fails.
from torch.jit._trace import TracerWarning

from modelexport.capture.failure import short_location
from modelexport.capture.inputs import ModelInputs, bind_by_position, in_signature_order
from modelexport.capture.jit_evidence import read_trace
from modelexport.capture.jit_lowering import watch_lowering
from modelexport.capture.jit_trace import JitTraceReader
from modelexport.capture.model_state import (
    exceeds_one_file,
    preserve_model,
    silence_torch,
    swap_attributes,
)
from modelexport.capture.module_tree import forward_args
from modelexport.capture.outputs import filter_outputs
from modelexport.capture.recorder import hide_hooks_from_jit, record_calls
from modelexport.capture.trace import Baseline, TorchOptions, TracerNote
from modelexport.errors import ArgumentError, first_line
from modelexport.garbage import pause_collector
from modelexport.modules.tree import ModuleTree


def export(
    model: nn.Module, tree: ModuleTree, inputs: ModelInputs, target: Path, options: TorchOptions
) -> Baseline:
    """Export with `torch.onnx.export(dynamo=False)` into memory.

    Args:
        model: The model; it is left as it was.
        tree: Its modules.
        inputs: The example inputs.
        target: The file that the bytes are for; large initializers go to a data file beside it.
        options: The arguments for torch.

    Returns:
        The baseline and its evidence.

    Raises:
        ArgumentError: The dynamic shapes are not by input name.
    """
    look_up_values, by_position = True, _needs_positions(model, inputs)
    while True:
        reader = JitTraceReader(look_up_values)
        try:
            return _export_once(model, tree, inputs, target, options, reader, by_position)
        except _TraceDisturbedError:
            # A look-up added a constant to the trace; without look-ups it is the baseline's.
            look_up_values = False
        except TypeError:
            # The tracer passes keywords by position and adds defaults, which many models reject.
            if by_position:
                raise
            by_position = True


class _TraceDisturbedError(Exception):
    """The trace is not the one that a plain export would make."""


def _export_once(
    model: nn.Module,
    tree: ModuleTree,
    inputs: ModelInputs,
    target: Path,
    options: TorchOptions,
    reader: JitTraceReader,
    by_position: bool,
) -> Baseline:
    inputs = inputs if by_position else in_signature_order(model, inputs)
    names = options.input_names or inputs.names
    sink = _Sink()
    external = options.external_data or exceeds_one_file(model)
    with (
        preserve_model(model),
        hide_hooks_from_jit(model),
        filter_outputs(model, names or (), may_be_numbers=False) as shape,
        record_calls(model, tree, reader) as recorder,
        watch_lowering(reader) as lowering,
        silence_torch(options.verbose),
        collect_tracer_warnings(options.verbose) as notes,
        store_initializers_externally(target) if external else nullcontext() as write_data_file,
        pause_collector(),
    ):
        args, kwargs = (
            (_rebind_by_position(model, inputs), None)
            if by_position
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
    if reader.disturbed:
        raise _TraceDisturbedError
    data = memoryview(sink.content if write_data_file is None else write_data_file(sink.content))
    files = {path.name: path for path in target.parent.iterdir() if path.stat().st_size}
    with pause_collector():
        trace = read_trace(recorder.log(), lowering)
    text = str(lowering.final) if options.with_graph_text else None
    return Baseline(data, files, trace, tuple(shape.dropped), text, tuple(notes))


def _needs_positions(model: nn.Module, inputs: ModelInputs) -> bool:
    """Tell whether keyword inputs have to be passed by position.

    The tracer turns numbers among the keywords, and among the defaults that it adds, into inputs
    of the file; and it does not know keywords that forward has no name for.
    """
    if not inputs.kwargs:
        return False
    parameters = inspect.signature(model.forward).parameters
    defaults = {name: item.default for name, item in parameters.items()}
    values = (defaults | _by_name(model, inputs)).values()
    numbers = any(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return numbers or any(name not in parameters for name in inputs.kwargs)


def _by_name(model: nn.Module, inputs: ModelInputs) -> dict[str, Any]:
    return dict(zip(forward_args(model), inputs.args, strict=False)) | inputs.kwargs


def _rebind_by_position(model: nn.Module, inputs: ModelInputs) -> tuple[Any, ...]:
    """Rebind forward to take the tensor inputs by position, and return them in that order."""
    named = _by_name(model, inputs)
    constants = {name: value for name, value in named.items() if _is_constant(value)}
    tensors = {name: value for name, value in named.items() if name not in constants}
    bind_by_position(model, list(tensors), constants)
    return tuple(tensors.values())


def _is_constant(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _dynamic_axes(dynamic_shapes: Any, names: Any) -> dict[str, dict[int, str]] | None:
    """Convert `dynamic_shapes` by input name to the `dynamic_axes` that this exporter takes."""
    if not dynamic_shapes:
        return None
    if not isinstance(dynamic_shapes, Mapping) or names is None:
        raise ArgumentError(
            "the torchscript exporter needs dynamic_shapes by input name",
            hint="pass a dict such as {'input_ids': {0: 'batch'}} together with keyword inputs "
            "or input_names",
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
    """A file that keeps the bytes object that torch writes, without a copy."""

    content: bytes = b""

    def write(self, content: bytes) -> int:
        self.content = content
        return len(content)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


_MAX_INLINE_SIZE = 1024
"""Initializers up to this size stay in the model, where shape inference needs them."""
_PAGE = mmap.ALLOCATIONGRANULARITY
"""Each initializer starts at a page, so that it can be mapped."""


@contextmanager
def store_initializers_externally(target: Path) -> Iterator[Callable[[bytes], bytes]]:
    """Let torch write a placeholder of one element for each large initializer.

    A protobuf holds at most 2 GiB, and torch itself would write one file for each initializer.

    Args:
        target: The file that the model is written to.

    Yields:
        A function that writes the initializers to `<target>.data` and returns the bytes of the
        model with references to them in place of the placeholders.
    """
    large: dict[str, torch.Tensor] = {}
    # Private: torch serializes a model only here, and the parameters are its first argument. If
    # torch renames it, entering the block fails; if it passes them otherwise, large exports fail.
    write = torch._C.Graph._export_onnx  # type: ignore[attr-defined]

    def write_placeholders(
        graph: Any, parameters: Mapping[str, torch.Tensor], *arguments: Any
    ) -> Any:
        large.update((n, t) for n, t in parameters.items() if _byte_size(t) > _MAX_INLINE_SIZE)
        small = {n: t.new_zeros(1) if n in large else t for n, t in parameters.items()}
        return write(graph, small, *arguments)

    with swap_attributes(torch._C.Graph, _export_onnx=write_placeholders):
        yield lambda content: _write_data_file(
            content, large, target.with_name(f"{target.name}.data")
        )


def _byte_size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write_data_file(content: bytes, large: Mapping[str, torch.Tensor], data_file: Path) -> bytes:
    model = onnx.ModelProto.FromString(content)
    with data_file.open("wb") as out:
        for tensor in model.graph.initializer:
            if tensor.name not in large:
                continue
            values = large[tensor.name].detach().cpu().contiguous()
            out.seek(-(-out.tell() // _PAGE) * _PAGE)
            onnx.external_data_helper.set_external_data(
                tensor, data_file.name, out.tell(), _byte_size(values)
            )
            tensor.ClearField("raw_data")
            tensor.dims[:] = values.shape
            out.write(values.reshape(-1).view(torch.uint8).numpy().data)
    return bytes(model.SerializeToString())


_MAX_NOTE = 200
_SENTENCE_END = re.compile(r"[.!](\s|$)")
_FOLDERS = re.compile(r"(?<!\w)(/[^\s/:'\"]+)+/(?=[^\s/:'\"]+/[^\s/:'\"]+)")


@contextmanager
def collect_tracer_warnings(verbose: bool) -> Iterator[list[TracerNote]]:
    """Collect the tracer's warnings about model code while the block runs.

    Args:
        verbose: Whether to show them as well.

    Yields:
        The notes, filled while the model is traced.
    """
    notes: list[TracerNote] = []
    with warnings.catch_warnings():
        show: Any = warnings.showwarning

        def collect(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            *rest: Any,
            **named: Any,
        ) -> None:
            is_note = issubclass(category, TracerWarning)
            if is_note:
                notes.append(TracerNote(short_location(filename, lineno), _first_sentence(message)))
            if verbose or not is_note:
                show(message, category, filename, lineno, *rest, **named)

        warnings.showwarning = collect
        warnings.filterwarnings("always", category=TracerWarning)
        # Undocumented: filters out the warnings about torch's own shape checks. torch calls it
        # once at import, before the filter above; without it the notes name lines of torch.
        ignore_lib_warnings: Any = TracerWarning.ignore_lib_warnings
        ignore_lib_warnings()
        yield notes


def _first_sentence(message: Any) -> str:
    line = _FOLDERS.sub("", first_line(message))
    return _SENTENCE_END.split(line, maxsplit=1)[0][:_MAX_NOTE]


def note_lines(notes: Iterable[TracerNote], with_locations: bool) -> tuple[str, ...]:
    """Format each distinct note in one line.

    Args:
        notes: The notes.
        with_locations: Whether to name the lines of model code.

    Returns:
        The lines in order.
    """
    lines = (f"{note.location}: {note.text}" if with_locations else note.text for note in notes)
    return tuple(dict.fromkeys(lines))
