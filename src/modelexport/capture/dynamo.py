"""Export with the dynamo exporter."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.export import ExportedProgram

# Private: the error that tells a failed translation from a failed capture; torch.onnx exports only
# its base class. If torch moves it, importing the exporter fails.
from torch.onnx._internal.exporter._errors import ConversionError

from modelexport.capture.dynamic_shapes import nest_shapes
from modelexport.capture.dynamo_evidence import (
    Translation,
    read_trace,
    watch_translation,
    without_call,
)
from modelexport.capture.fx_trace import FxTraceReader
from modelexport.capture.hooks import (
    OutputFilter,
    Trees,
    filter_outputs,
    record_calls,
    unique_names,
)
from modelexport.capture.inputs import ModelInputs, graph_input_names
from modelexport.capture.model_state import preserve_model, silence_torch, swap_attributes
from modelexport.capture.program_names import name_program
from modelexport.capture.trace import Baseline, CallLog, Site, TorchOptions, Trace
from modelexport.errors import ArgumentError, ModelExportError
from modelexport.graph.flat import subgraph_prefix
from modelexport.modules.tree import ModuleTree


def export(
    model: nn.Module | ExportedProgram,
    tree: ModuleTree,
    inputs: ModelInputs,
    target: Path,
    options: TorchOptions,
) -> Baseline:
    """Write a file, and its data file beside it, with `torch.onnx.export(dynamo=True)`.

    Args:
        model: The model, which is left as it was, or a program that was exported before.
        tree: Its modules.
        inputs: The example inputs; a program has its own.
        target: The file.
        options: The arguments for torch.

    Returns:
        The baseline and its evidence.

    Raises:
        ArgumentError: An output name of the options is the name of another value.
    """
    if isinstance(model, ExportedProgram):
        # A program has its inputs, shapes and calls in it already.
        chosen = name_program(model, options.input_names, options.output_names)
        written, translation = _run_torch(model, (), target, options, **chosen)
        trace = read_trace(written, tree, CallLog(), FxTraceReader(), translation)
        return read_baseline(written, trace, target, options)
    names = options.input_names or graph_input_names(model, inputs)
    for trees in (Trees.KEEP, Trees.DROP):
        output_filter = OutputFilter(names or (), trees=trees)
        try:
            return _export_in_grad_mode(model, tree, inputs, target, options, names, output_filter)
        except (ModelExportError, OSError, MemoryError):
            raise
        except Exception:
            # A cache among the outputs may be what torch cannot export.
            if not output_filter.has_trees:
                raise
    raise AssertionError("an attempt returns or raises")


def _export_in_grad_mode(model: nn.Module, *arguments: Any) -> Baseline:
    """Export as the caller's gradient mode says, and without gradients if torch cannot."""
    try:
        return _export_once(model, *arguments)
    except ConversionError as error:
        # With gradients torch may capture other kernels than it decomposes to, and then fail on
        # its own program.
        if not torch.is_grad_enabled() or isinstance(error.__cause__, torch.onnx.OnnxExporterError):
            raise
        with torch.no_grad():
            return _export_once(model, *arguments)


def _export_once(
    model: nn.Module,
    tree: ModuleTree,
    inputs: ModelInputs,
    target: Path,
    options: TorchOptions,
    names: Sequence[str] | None,
    output_filter: OutputFilter,
) -> Baseline:
    reader = FxTraceReader()
    with (
        preserve_model(model),
        filter_outputs(model, output_filter) as shape,
        record_calls(model, tree, reader) as recorder,
        watch_branches(model, tree) as branches,
    ):
        written, translation = _run_torch(
            model,
            inputs.for_torch,
            target,
            options,
            kwargs=inputs.kwargs or None,
            input_names=names,
            output_names=options.output_names or shape.names,
            dynamic_shapes=nest_shapes(model, inputs, options.dynamic_shapes),
        )
    trace = read_trace(written, tree, recorder.log(), reader, translation)
    trace = branches.complete(trace, written.model.graph)
    return read_baseline(written, trace, target, options, shape.dropped)


def _run_torch(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...],
    target: Path,
    options: TorchOptions,
    **arguments: Any,
) -> tuple[Any, Translation]:
    """Let torch write the file; return its `ONNXProgram`, and what became of the nodes."""
    with (
        watch_translation() as translation,
        _unique_output_names(chosen=options.output_names is not None),
        silence_torch(options.verbose),
    ):
        written = torch.onnx.export(
            model,
            args,
            str(target),
            dynamo=True,
            verbose=options.verbose,
            optimize=options.optimize,
            opset_version=options.opset_version,
            external_data=options.external_data is not False,
            **arguments,
        )
    return written, translation


def read_baseline(
    written: Any, trace: Trace, target: Path, options: TorchOptions, dropped: Sequence[str] = ()
) -> Baseline:
    """Return the baseline that an exporter wrote to a folder of its own, with its evidence."""
    files = {path.name: path for path in target.parent.iterdir() if path != target}
    text = str(written.exported_program) if options.with_graph_text else None
    # Mapped, because a model with its initializers inside may be large.
    with target.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return Baseline(data, files, trace, tuple(dropped), text)


@contextmanager
def _unique_output_names(chosen: bool) -> Iterator[None]:
    """Give no output the name of another value while the block exports.

    torch does so, and an ONNX graph with two values of one name is not valid. Where the caller
    chose the names that is an error; a key of what the model returns gets a number.
    """
    # Private: the step in which torch names the outputs, after all others; only then are the names
    # of all values known. If torch renames it, entering the block fails.
    from torch.onnx._internal.exporter import _ir_passes

    original = _ir_passes.rename_outputs

    def rename_outputs(model: Any, names: Sequence[str]) -> None:
        renamed = {id(value) for value, _ in zip(model.graph.outputs, names, strict=False)}
        taken = {value.name for value in _ir_passes._all_values(model) if id(value) not in renamed}
        clash = next((name for name in names if name in taken), None)
        if clash is not None and chosen:
            raise ArgumentError(
                f"the output name {clash!r} is the name of another value in the graph",
                hint="choose another name",
            )
        original(model, names if clash is None else unique_names(names, taken))

    with swap_attributes(_ir_passes, rename_outputs=rename_outputs):
        yield


# torch writes the stack of each operation into the metadata of the ONNX node, and names generated
# code this way. Where either changes, nodes in subgraphs take the module of the enclosing node.
_STACK_TRACE = "pkg.torch.onnx.stack_trace"
_GENERATED_LINE = re.compile(r'File "(<eval_with_key>[^"]*)", line \d+, in forward\n\s*(\w+)')


class BranchModules:
    """The module of each operation in the subgraphs of conditionals and loops.

    torch.export lets dynamo compile the function of such a subgraph into a module of generated
    code, and then traces that code. dynamo knows the module of each operation, the trace only the
    line of generated code. The line begins with the name of dynamo's node, and torch writes it
    into the metadata of the ONNX node.
    """

    def __init__(self, model: nn.Module, tree: ModuleTree) -> None:
        self._paths = {str(id(model.get_submodule(path))): path for path in tree}
        self._compiled: list[tuple[torch.fx.GraphModule, dict[str, str]]] = []
        self.ran: set[str] = set()
        """The modules that ran in subgraphs."""

    def read(self, captured: torch.fx.GraphModule) -> None:
        """Note the modules of a captured program and of the subgraphs in it."""
        for graph_module in captured.modules():
            if isinstance(graph_module, torch.fx.GraphModule):
                module_of: dict[str, str] = {}
                for node in graph_module.graph.nodes:
                    # The keys of the stack are the ids of the modules, innermost last.
                    stack = node.meta.get("nn_module_stack") or ()
                    modules = [self._paths.get(without_call(key)) for key in stack]
                    self.ran.update(path for path in modules if path is not None)
                    if modules and modules[-1] is not None:
                        module_of[node.name] = modules[-1]
                self._compiled.append((graph_module, module_of))

    def complete(self, trace: Trace, graph: Any) -> Trace:
        """Add the modules of the nodes in the subgraphs of an ONNX graph to its evidence."""
        scopes = {**trace.scopes, **dict(self._sites(graph))}
        return msgspec.structs.replace(trace, scopes=scopes, ran_in_subgraphs=frozenset(self.ran))

    def _sites(self, graph: Any) -> Iterator[tuple[str, Site]]:
        """Find the modules of the nodes in the subgraphs of an ONNX graph."""
        if not self.ran:
            return
        # The code of a module is generated when it first runs, so its file has a name only now.
        modules_of = {code.forward.__code__.co_filename: names for code, names in self._compiled}
        pending = [nested for node in graph for nested in _subgraphs(node, "")]
        for subgraph, prefix in pending:
            for node in subgraph:
                pending.extend(_subgraphs(node, prefix))
                lines = _GENERATED_LINE.findall(node.metadata_props.get(_STACK_TRACE, ""))
                path = modules_of.get(lines[-1][0], {}).get(lines[-1][1]) if lines else None
                if path is not None:
                    yield from ((f"{prefix}{value.name}", Site(path)) for value in node.outputs)


def _subgraphs(node: Any, prefix: str) -> Iterator[tuple[Any, str]]:
    """Yield the subgraphs of a node, each with the prefix of the keys of its values."""
    for attribute in node.attributes.values():
        if isinstance(attribute.value, type(node.graph)):
            key = f"{prefix}{node.outputs[0].name}"
            yield attribute.value, subgraph_prefix(key, attribute.name)


@contextmanager
def watch_branches(model: nn.Module, tree: ModuleTree) -> Iterator[BranchModules]:
    """Watch what dynamo compiles for subgraphs while the block exports the model."""
    # Private: higher-order operators choose this backend for the functions they are given, and
    # there is no option to choose another. If torch renames it, entering the block fails; if it
    # uses another one, nodes in subgraphs take the module of the enclosing node.
    from torch._dynamo.backends import debugging

    branches = BranchModules(model, tree)
    make_backend = debugging.make_eager_backend_with_torch_function_modes

    def make_watched_backend(modes: Any) -> Any:
        backend = make_backend(modes)

        def watched(captured: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            branches.read(captured)
            return backend(captured, *args, **kwargs)

        return watched

    with swap_attributes(
        debugging, make_eager_backend_with_torch_function_modes=make_watched_backend
    ):
        yield branches
