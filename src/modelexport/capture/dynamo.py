"""Export with the dynamo exporter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _errors

from modelexport.capture.calls import CallLog
from modelexport.capture.dynamo_trace import Translation, read_trace, watch_translation
from modelexport.capture.fx_trace import FxTraceReader
from modelexport.capture.inputs import ModelInputs
from modelexport.capture.model_state import preserve_model, silence_torch, swap_attributes
from modelexport.capture.module_tree import forward_args
from modelexport.capture.outputs import filter_outputs, unique_names
from modelexport.capture.recorder import record_calls
from modelexport.capture.trace import Baseline, Site, TorchOptions, map_file
from modelexport.errors import ArgumentError
from modelexport.graph.flat import subgraph_prefix
from modelexport.modules.tree import ModuleTree


def export(
    model: nn.Module | ExportedProgram,
    tree: ModuleTree,
    inputs: ModelInputs,
    target: Path,
    options: TorchOptions,
) -> Baseline:
    """Write `target` (and its data file beside it) with `torch.onnx.export(dynamo=True)`."""
    if isinstance(model, ExportedProgram):
        return _export_program(model, tree, target, options)
    try:
        return _export_once(model, tree, inputs, target, options)
    except _errors.ConversionError as error:
        # With gradients torch may capture other kernels than it decomposes to, and then fail on its own program.
        if not torch.is_grad_enabled() or isinstance(error.__cause__, torch.onnx.OnnxExporterError):
            raise
        with torch.no_grad():
            return _export_once(model, tree, inputs, target, options)


def _export_once(
    model: nn.Module, tree: ModuleTree, inputs: ModelInputs, target: Path, options: TorchOptions
) -> Baseline:
    names = options.input_names or inputs.names
    tap = FxTraceReader()
    with (
        preserve_model(model),
        filter_outputs(model, names or ()) as shape,
        record_calls(model, tree, tap) as recorder,
        watch_branches(model, tree) as branches,
        watch_translation() as translated,
        _renaming(chosen=options.output_names is not None),
        silence_torch(options.verbose),
    ):
        written = torch.onnx.export(
            model,
            inputs.for_torch,
            str(target),
            kwargs=inputs.kwargs or None,
            input_names=names,
            output_names=options.output_names or shape.names,
            dynamic_shapes=_for_every_input(model, inputs, options.dynamic_shapes),
            **_common(options),
        )
    return _read(
        written, tree, recorder.log(), tap, translated, branches, target, options, shape.dropped
    )


def _for_every_input(model: nn.Module, inputs: ModelInputs, dynamic_shapes: Any) -> Any:
    """Dynamic shapes by name with an entry for every input, as torch.export wants them."""
    if not isinstance(dynamic_shapes, Mapping) or not all(
        isinstance(name, str) for name in dynamic_shapes
    ):
        return dynamic_shapes
    arguments = list(forward_args(model))
    shapes: dict[str, Any] = dict.fromkeys((*arguments[: len(inputs.args)], *inputs.kwargs))
    shapes.update(dynamic_shapes)
    gathered = next((name.removeprefix("**") for name in arguments if name.startswith("**")), None)
    loose = [name for name in shapes if name in inputs.kwargs and name not in arguments]
    if gathered is None or not loose:
        return shapes
    return {
        **{name: shapes[name] for name in shapes if name not in loose},
        gathered: {n: shapes[n] for n in loose},
    }


def _export_program(
    program: ExportedProgram, tree: ModuleTree, target: Path, options: TorchOptions
) -> Baseline:
    """A program has its inputs, shapes and calls in it already."""
    with watch_translation() as translated, _renaming(chosen=True), silence_torch(options.verbose):
        written = torch.onnx.export(
            program,
            (),
            str(target),
            input_names=options.input_names,
            output_names=options.output_names,
            **_common(options),
        )
    return _read(
        written, tree, CallLog((), {}), FxTraceReader(), translated, None, target, options, ()
    )


def _common(options: TorchOptions) -> dict[str, Any]:
    return {
        "dynamo": True,
        "verbose": options.verbose,
        "optimize": options.optimize,
        "opset_version": options.opset_version,
        "external_data": True if options.external_data is None else options.external_data,
    }


def _read(
    written: Any,
    tree: ModuleTree,
    log: CallLog,
    tap: FxTraceReader,
    translated: Translation,
    branches: BranchModules | None,
    target: Path,
    options: TorchOptions,
    dropped: Sequence[str],
) -> Baseline:
    trace = read_trace(written, tree, log, tap, translated)
    if branches is not None:
        scopes = {**trace.scopes, **dict(branches.sites(written.model.graph))}
        trace = msgspec.structs.replace(trace, scopes=scopes, ran_in_bodies=frozenset(branches.ran))
    files = {path.name: path for path in target.parent.iterdir() if path != target}
    text = str(written.exported_program) if options.with_graph_text else None
    return Baseline(map_file(target), files, trace, tuple(dropped), text)


@contextmanager
def _renaming(chosen: bool) -> Iterator[None]:
    """Give no output the name of another value, which torch does: ONNX has no such graphs.

    Where the caller chose the names that is an error; a key of what the model returns gets a number.
    """
    from torch.onnx._internal.exporter import _ir_passes

    original = _ir_passes.rename_outputs

    def rename_outputs(model: Any, names: Sequence[str]) -> None:
        renamed = {id(value) for value, _ in zip(model.graph.outputs, names, strict=False)}
        taken = {value.name for value in _ir_passes._all_values(model) if id(value) not in renamed}
        clash = next((name for name in names if name in taken), None)
        if clash is not None and chosen:
            raise ArgumentError(
                f"the output name {clash!r} is the name of another value in the graph",
                hint="choose another",
            )
        original(model, names if clash is None else unique_names(names, taken))

    with swap_attributes(_ir_passes, rename_outputs=rename_outputs):
        yield


_STACK_TRACE = "pkg.torch.onnx.stack_trace"
_GENERATED_LINE = re.compile(r'File "(<eval_with_key>[^"]*)", line \d+, in forward\n\s*(\w+)')


class BranchModules:
    """The module of each operation that dynamo captured for a body of a higher-order operator.

    torch.export lets dynamo compile such bodies into modules of generated code, and then traces that code.
    dynamo knows the module of each operation; the trace only knows the line of generated code. The line
    begins with the name of dynamo's node, and torch writes it into the metadata of the ONNX node.
    """

    def __init__(self, model: nn.Module, tree: ModuleTree) -> None:
        self._paths = {str(id(model.get_submodule(path))): path for path in tree}
        self._bodies: list[tuple[torch.fx.GraphModule, dict[str, str]]] = []
        self.ran: set[str] = set()

    def read(self, captured: torch.fx.GraphModule) -> None:
        """Note the modules of a captured program and of the bodies in it."""
        for body in captured.modules():
            if isinstance(body, torch.fx.GraphModule):
                made_by: dict[str, str] = {}
                for node in body.graph.nodes:
                    # The keys of the stack are the ids of the modules, innermost last.
                    modules = [
                        self._paths.get(key) for key in node.meta.get("nn_module_stack") or ()
                    ]
                    self.ran.update(path for path in modules if path is not None)
                    if modules and modules[-1] is not None:
                        made_by[node.name] = modules[-1]
                self._bodies.append((body, made_by))

    def sites(self, graph: Any) -> Iterator[tuple[str, Site]]:
        """Yield the key of each output in the bodies of an ONNX graph with the module it was made in."""
        if not self.ran:
            return
        # The code of a body is generated when it first runs, so its file has a name only now.
        made_by = {body.forward.__code__.co_filename: names for body, names in self._bodies}
        pending = [found for node in graph for found in _bodies(node, "")]
        for body, prefix in pending:
            for node in body:
                pending.extend(_bodies(node, prefix))
                lines = _GENERATED_LINE.findall(node.metadata_props.get(_STACK_TRACE, ""))
                path = made_by.get(lines[-1][0], {}).get(lines[-1][1]) if lines else None
                if path is not None:
                    yield from ((f"{prefix}{value.name}", Site(path)) for value in node.outputs)


def _bodies(node: Any, prefix: str) -> Iterator[tuple[Any, str]]:
    """Yield the subgraphs of a node, each with what stands before the keys of its values."""
    for attribute in node.attributes.values():
        if isinstance(attribute.value, type(node.graph)):
            yield (
                attribute.value,
                subgraph_prefix(f"{prefix}{node.outputs[0].name}", attribute.name),
            )


@contextmanager
def watch_branches(model: nn.Module, tree: ModuleTree) -> Iterator[BranchModules]:
    """See what dynamo captures of bodies while the block exports the model."""
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
