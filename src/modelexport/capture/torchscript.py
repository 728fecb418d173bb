"""Export with the TorchScript exporter, and read its evidence."""

from __future__ import annotations

import inspect
import mmap
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import onnx
import torch
from torch import nn

# Private: torch.jit imports this class but does not export it. If torch moves it, importing this
# file fails.
from torch.jit._trace import TracerWarning

# Private by its name only: torch's own way to flatten nested arguments.
from torch.utils._pytree import tree_flatten, tree_unflatten

from modelexport.capture.dynamic_shapes import flatten_shapes
from modelexport.capture.failure import short_location
from modelexport.capture.hooks import (
    OutputFilter,
    Trees,
    filter_outputs,
    hide_hooks_from_jit,
    record_calls,
)
from modelexport.capture.inputs import (
    ModelInputs,
    graph_input_names,
    in_signature_order,
    name_inputs,
)
from modelexport.capture.jit_lowering import Lowering, watch_lowering
from modelexport.capture.jit_trace import JitTraceReader, inputs_of, kind_of, outputs_of
from modelexport.capture.model_state import (
    exceeds_one_file,
    preserve_model,
    silence_torch,
    swap_attributes,
)
from modelexport.capture.trace import (
    Baseline,
    Call,
    CallLog,
    Operation,
    Site,
    TorchOptions,
    Trace,
    TracerNote,
    ValueMatcher,
    covered_modules,
)
from modelexport.errors import ModelExportError, first_line
from modelexport.graph.flat import pause_collector
from modelexport.modules.tree import ModuleTree


def export(
    model: nn.Module, tree: ModuleTree, inputs: ModelInputs, target: Path, options: TorchOptions
) -> Baseline:
    """Export with `torch.onnx.export(dynamo=False)` into memory.

    The arguments are those of the other exporter; only large initializers go to a file, which is
    beside the target.

    Raises:
        ArgumentError: The dynamic shapes are not by input name.
    """
    look_up_values, by_position = True, _needs_positions(model, inputs)
    trees = Trees.UNPACK
    while True:
        reader = JitTraceReader(look_up_values)
        ordered = inputs if by_position else in_signature_order(model, inputs)
        names = options.input_names or graph_input_names(model, ordered)
        output_filter = OutputFilter(names or (), may_be_numbers=False, trees=trees)
        try:
            return _export_once(
                model, tree, ordered, target, options, reader, by_position, names, output_filter
            )
        except _TraceDisturbedError:
            # A look-up added a constant to the trace; without look-ups it is the baseline's.
            look_up_values = False
        except (ModelExportError, OSError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, TypeError) and not by_position:
                # The tracer passes keywords by position and adds defaults, which models may reject.
                by_position = True
            elif output_filter.has_trees:
                # The operations of a cache among the outputs may be what torch cannot export.
                trees = Trees.DROP
            else:
                raise


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
    names: Sequence[str] | None,
    output_filter: OutputFilter,
) -> Baseline:
    sink = _Sink()
    axes = flatten_shapes(model, inputs, options.dynamic_shapes, names)
    external = options.external_data or exceeds_one_file(model)
    with (
        preserve_model(model),
        hide_hooks_from_jit(model),
        filter_outputs(model, output_filter) as shape,
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
            dynamic_axes=axes,
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
    """Return whether keyword inputs have to be passed by position.

    The tracer takes no objects, such as caches. It turns numbers among the keywords, and among the
    defaults that it adds, into inputs of the file; and it does not know keywords that forward has
    no name for.
    """
    if not inputs.kwargs or inputs.holds_tree:
        return inputs.holds_tree
    parameters = inspect.signature(model.forward).parameters
    defaults = {name: item.default for name, item in parameters.items()}
    values = (defaults | name_inputs(model, inputs)).values()
    numbers = any(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return numbers or any(name not in parameters for name in inputs.kwargs)


def _rebind_by_position(model: nn.Module, inputs: ModelInputs) -> tuple[Any, ...]:
    """Rebind forward to take the inputs that are not constants by position, and return these.

    `preserve_model` restores it.
    """
    if inputs.holds_tree:
        return _rebind_by_leaf(model, inputs)
    named = name_inputs(model, inputs)
    constants = {n: v for n, v in named.items() if v is None or isinstance(v, int | float | str)}
    tensors = {n: v for n, v in named.items() if n not in constants}
    original = model.forward

    def forward(*args: Any) -> Any:
        return original(**dict(zip(tensors, args, strict=True)), **constants)

    model.forward = forward
    return tuple(tensors.values())


def _rebind_by_leaf(model: nn.Module, inputs: ModelInputs) -> tuple[Any, ...]:
    """Rebind forward to take the tensors of all inputs by position, and return these.

    It rebuilds the objects that hold them.
    """
    leaves, spec = tree_flatten((inputs.args, inputs.kwargs))
    original = model.forward

    def forward(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        values = (next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        args, kwargs = tree_unflatten(values, spec)
        return original(*args, **kwargs)

    model.forward = forward
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


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


def read_trace(log: CallLog, lowering: Lowering) -> Trace:
    """Read the evidence of a finished export, in terms of the names of the file."""
    names = lowering.final_names()
    nodes = list(lowering.final.nodes())
    final = [_describe_node(node) for node in nodes]
    present = {value.debugName() for value in lowering.final.inputs()}
    matcher = ValueMatcher([old.rename(names) for old in lowering.translated], final, present)
    count = len(log.calls)
    calls = {names.get(name, name): call for name, call in lowering.calls.items() if call < count}
    merged = {names.get(name, name): more for name, more in lowering.merged.items()}
    scopes: dict[str, Site] = {}
    covers: dict[str, tuple[str, ...]] = {}
    last = -1
    for node, operation in zip(nodes, final, strict=True):
        originals = matcher.original_operations(operation)
        ran_in = [calls[name] for old in originals for name in old.outputs if name in calls]
        ran_in = ran_in or [calls[name] for name in operation.outputs if name in calls]
        ran_in += [call for name in operation.outputs for call in merged.get(name, ())]
        # The scope decides for a node that no followed operation explains. The nodes of a call
        # stand together, so the call of the node before tells calls with one scope apart.
        scope = node.scopeName()
        recorded = lowering.reader.call_in(scope, ran_in[0] if ran_in else last) if scope else -1
        sites = [Site(log.calls[call].path, call) for call in (*ran_in, recorded) if call >= 0]
        if sites:
            last = sites[0].call
            scopes.update(dict.fromkeys(operation.outputs, sites[0]))
            covers[operation.outputs[0]] = covered_modules(sites)

    def find(traced: str, call: Call) -> str | None:
        value = lowering.onnx_value(traced, call, log.calls[0].returned) if traced else None
        return None if value is None else matcher.find(names.get(value, value))

    results = {
        number: tuple(find(traced, call) for traced in call.returned)
        for number, call in enumerate(log.calls)
    }
    return Trace(log, scopes, covers, results)


def _describe_node(node: Any) -> Operation:
    """Describe a written node; its attributes are read only if it has to be compared."""
    outputs = tuple([value.debugName() for value in outputs_of(node)])
    inputs = tuple([value.debugName() for value in inputs_of(node)])
    return Operation(outputs, inputs, lambda: kind_of(node)[0], False)


_MAX_NOTE = 200
_SENTENCE_END = re.compile(r"[.!](\s|$)")
_FOLDERS = re.compile(r"(?<!\w)(/[^\s/:'\"]+)+/(?=[^\s/:'\"]+/[^\s/:'\"]+)")


@contextmanager
def collect_tracer_warnings(verbose: bool) -> Iterator[list[TracerNote]]:
    """Collect the tracer's warnings about model code, and show them if verbose."""
    notes: list[TracerNote] = []
    with warnings.catch_warnings():
        show: Any = warnings.showwarning

        def collect(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            is_note = issubclass(category, TracerWarning)
            if is_note:
                notes.append(TracerNote(short_location(filename, lineno), _first_sentence(message)))
            if verbose or not is_note:
                show(message, category, filename, lineno, *rest)

        warnings.showwarning = cast(Any, collect)
        warnings.filterwarnings("always", category=TracerWarning)
        # Undocumented: filters out the warnings about torch's own shape checks. torch calls it
        # once at import, before the filter above; without it the notes name lines of torch.
        ignore_lib_warnings: Any = TracerWarning.ignore_lib_warnings
        ignore_lib_warnings()
        yield notes


def _first_sentence(message: Any) -> str:
    line = _FOLDERS.sub("", first_line(message))
    return _SENTENCE_END.split(line, maxsplit=1)[0][:_MAX_NOTE]
