"""Exports through torch's legacy TorchScript exporter, and follows its graph down to ONNX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from modelexport.baseline.calling import ModelInputs, keyword_shim, preserved, quiet, shaped_output, swapped
from modelexport.baseline.options import Baseline, ExportOptions, mapped
from modelexport.baseline.trace import Operation, Site, Survivors, Trace, settle_scopes
from modelexport.errors import ArgumentError
from modelexport.hierarchy.calls import CallLog
from modelexport.hierarchy.capture import forward_args, recording
from modelexport.hierarchy.tree import ModuleTree

_LOOK_AHEAD = 200
"""How many traced operations may have been dropped in a row before a match is given up."""
_CALL_BLOCK = "prim::TracedModuleForward"
_NODE_NAME = "onnx_name"
"""Where the exporter keeps a node's name until it writes it."""
_INLINE_LIMIT = 2**31 - 2**24
"""Above this a protobuf cannot hold the weights, and the exporter needs a path for its data files."""


def export(model: nn.Module, tree: ModuleTree, inputs: ModelInputs, target: Path, options: ExportOptions) -> Baseline:
    """Export with `torch.onnx.export(dynamo=False)`, into memory where the weights allow it."""
    tap, shim = _JitTap(), False
    while True:
        try:
            return _export_once(model, tree, inputs, target, options, tap, shim)
        except _TraceDisturbedError:
            # Asking for a value put a constant into the trace; without asking, the trace is the baseline's.
            tap = _JitTap(ask=False)
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
    options: ExportOptions,
    tap: _JitTap,
    shim: bool,
) -> Baseline:
    names = options.input_names or inputs.names
    sink = _Sink()
    large = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())) > _INLINE_LIMIT
    with (
        preserved(model),
        shaped_output(model, names or ()) as shape,
        recording(model, tree, tap) as recorder,
        _watched_lowering(tap) as lowering,
        quiet(options.verbose),
    ):
        args, kwargs = (_by_position(model, inputs), None) if shim else (inputs.args, inputs.kwargs or None)
        torch.onnx.export(
            model,
            args,
            str(target) if large or options.external_data else sink,  # type: ignore[arg-type]
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
    if options.jit_graph is not None:
        options.jit_graph.write_text(str(lowering.final), encoding="utf-8")
    files = {path.name: path for path in target.parent.iterdir() if path != target}
    data = mapped(target) if sink.content is None else memoryview(sink.content)
    return Baseline(data, files, _read_trace(recorder.log(), lowering), tuple(shape.dropped))


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
            axis: str(getattr(dim, "__name__", None) or (dim if isinstance(dim, str) else f"{name}_{axis}"))
            for axis, dim in items
            if dim is not None and not isinstance(dim, int)
        }
    return axes


class _Sink:
    """A file for torch to write its model bytes into; keeps the object itself, without a copy."""

    content: bytes | None = None

    def write(self, content: bytes) -> int:
        self.content = content
        return len(content)

    def flush(self) -> None:
        """Nothing is buffered."""


class _Traced(NamedTuple):
    """One operation of the trace; values go by their unique numbers."""

    kind: str
    scope: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: int


class _JitTap:
    """Reads the graph that torch.jit is tracing, where each call of a module is a block of its own."""

    def __init__(self, ask: bool = True) -> None:
        self.ask = ask
        self.disturbed = False
        self.traced: list[_Traced] = []
        self.scopes: dict[str, list[int]] = {}
        self.parents: list[int] = []

    def position(self) -> int:
        return 0

    def name_of(self, tensor: torch.Tensor) -> str | None:
        state = torch._C._get_tracing_state()
        if not self.ask or state is None or (tensor.requires_grad and tensor.is_leaf):
            return None
        here = state.graph().insertPoint()
        before = here.prev()
        unique = _ask([tensor])
        self.disturbed = self.disturbed or here.prev() != before
        return str(unique)

    def made_by(self, spans: list[tuple[int, int]]) -> dict[str, int]:
        state = torch._C._get_tracing_state()
        self.traced, self.scopes, self.parents = [], {}, []
        if state is not None:
            self._read(state.graph())
        if len(self.parents) != len(spans):  # not the calls that were recorded: no evidence rather than wrong evidence
            self.traced, self.scopes, self.parents = [], {}, []
        return {str(unique): op.call for op in self.traced for unique in op.outputs}

    def _read(self, graph: Any) -> None:
        """Walk the blocks in order: the calls of modules come in the order in which they began."""
        pending = [(node, -1) for node in reversed(list(graph.nodes()))]
        while pending:
            node, call = pending.pop()
            if node.kind() == _CALL_BLOCK:
                number = len(self.parents)
                self.parents.append(call)
                self.scopes.setdefault(node.scopeName(), []).append(number)
                inner = [(n, number) for block in node.blocks() for n in block.nodes()]
                pending.extend(reversed(inner))
            else:
                inputs = tuple(value.unique() for value in node.inputs())
                outputs = tuple(value.unique() for value in node.outputs())
                self.traced.append(_Traced(node.kind(), node.scopeName(), inputs, outputs, call))

    def call_in(self, scope: str, last: int) -> int:
        """The call of this scope that an operation belongs to, when the one before it was made by call `last`."""
        candidates = self.scopes.get(scope, [])
        around = last
        while around >= 0:
            if around in candidates:
                return around
            around = self.parents[around]
        return next((number for number in candidates if number > last), -1)


def _ask(holder: list[torch.Tensor]) -> int:
    """The trace's number for a tensor.

    The tracer names a value after a local variable, here or in the calling frame, that is the
    tensor; neither may be one, or asking would rename tensors of the baseline.
    """
    return _unique_of(holder)


def _unique_of(holder: list[torch.Tensor]) -> int:
    return int(torch._C._get_value_trace(holder[0]).unique())  # type: ignore[attr-defined]


class _Lowering:
    """What became of each traced operation on its way to ONNX.

    Four graphs are passed through, each with numbers of its own: the one being traced, its inlined
    copy, the ONNX one as the symbolic functions made it, and a renumbered copy of that, which is
    optimised further and then written.
    """

    def __init__(self, tap: _JitTap) -> None:
        self.final: Any = None
        self.made_by: dict[int, int] = {}
        self._translated_as: dict[int, int] = {}
        self.tap = tap
        self._traced_as: dict[int, _Traced] = {}
        self._inlined_as: dict[int, int] = {}
        self._last_call = -1
        self.translated: list[tuple[tuple[int, ...], tuple[int, ...], Any, bool]] = []
        self.outputs: list[int] = []
        self._debug_names: dict[int, str] = {}
        self._values: dict[int, Any] = {}
        self._by_debug_name: dict[str, Any] = {}
        self._graph: Any = None
        self._last: Any = None

    def inline(self, graph: Any) -> None:
        """The trace was inlined: the same operations in the same order, less some that nothing reads."""
        traced = self.tap.traced
        known: dict[int, int] = {}
        found: dict[int, _Traced] = {}
        place = 0
        for node in graph.nodes():
            kind, scope = node.kind(), node.scopeName()
            inputs = tuple(value.unique() for value in node.inputs())
            for step in range(place, min(place + _LOOK_AHEAD, len(traced))):
                if _corresponds(traced[step], kind, scope, inputs, known):
                    for was, now in zip(traced[step].outputs, node.outputs(), strict=False):
                        known[was] = now.unique()
                        found[now.unique()] = traced[step]
                    place = step + 1
                    break
        self._inlined_as = known
        self._traced_as = found

    def translate(self, graph: Any, node: Any, result: Any) -> None:
        """After a symbolic function ran: note the ONNX nodes that it added for this traced node."""
        self._graph = graph
        outputs = [value.unique() for value in node.outputs()]
        traced = next((self._traced_as[unique] for unique in outputs if unique in self._traced_as), None)
        call = self.tap.call_in(node.scopeName(), self._last_call) if traced is None else traced.call
        self._last_call = call if call >= 0 else self._last_call
        added = []
        newest = graph.return_node().prev()
        walk = newest
        while walk.kind() != "prim::Param" and walk != self._last:
            added.append(walk)
            walk = walk.prev()
        self._last = newest
        for new in reversed(added):
            self._note(new, call)
        results = result if isinstance(result, tuple | list) else (result,)
        for old, value in zip(outputs, results, strict=False):
            if isinstance(value, torch._C.Value):
                self._translated_as[old] = value.unique()

    def _note(self, node: Any, call: int) -> None:
        outputs = tuple(value.unique() for value in node.outputs())
        inputs = tuple(value.unique() for value in node.inputs())
        kind, plain = _kind(node)
        self.translated.append((outputs, inputs, kind, plain))
        if call >= 0:
            self.made_by.update(dict.fromkeys(outputs, call))

    def translated_value(self, traced: str) -> int | None:
        """The ONNX value that a value of the trace became, where it could be followed."""
        return self._translated_as.get(self._inlined_as.get(int(traced), -1))

    def renumber(self, copy: Any) -> None:
        """The graph was copied node by node: match the copy's values with the originals."""
        if self._graph is None:
            return
        pairs = zip(self._graph.nodes(), copy.nodes(), strict=False)
        for old, new in pairs:
            for was, now in zip(old.outputs(), new.outputs(), strict=False):
                self._debug_names[was.unique()] = now.debugName()
                self._values[was.unique()] = now
        for was, now in zip(self._graph.inputs(), copy.inputs(), strict=False):
            self._values[was.unique()] = now
        self.outputs = [value.unique() for value in self._graph.outputs()]

    def finish(self, graph: Any) -> None:
        """The graph is optimised; a value that a fusion made anew has taken over the old one's name."""
        self.final = graph
        self._by_debug_name = {value.debugName(): value for node in graph.nodes() for value in node.outputs()}

    def final_names(self) -> dict[int, str]:
        """The name in the file of each translated value that is still there."""
        names: dict[int, str] = {}
        for unique, value in self._values.items():
            try:
                names[unique] = value.debugName()
            except RuntimeError:  # the value was destroyed
                heir = self._by_debug_name.get(self._debug_names.get(unique, ""))
                if heir is not None:
                    names[unique] = heir.debugName()
        names.update(zip(self.outputs, (value.debugName() for value in self.final.outputs()), strict=False))
        return names


def _corresponds(traced: _Traced, kind: str, scope: str, inputs: tuple[int, ...], known: Mapping[int, int]) -> bool:
    if traced.kind != kind or traced.scope != scope or len(traced.inputs) != len(inputs):
        return False
    return all(known.get(was, now) == now for was, now in zip(traced.inputs, inputs, strict=True))


@contextmanager
def _watched_lowering(tap: _JitTap) -> Iterator[_Lowering]:
    """See the graph at each stage of the exporter while the block runs."""
    from torch.onnx._internal.torchscript_exporter import utils

    lowering = _Lowering(tap)
    symbolic, optimize, to_graph = utils._run_symbolic_function, utils._optimize_graph, utils._model_to_graph

    def run_symbolic_function(graph: Any, block: Any, node: Any, *rest: Any) -> Any:
        result = symbolic(graph, block, node, *rest)
        lowering.translate(graph, node, result)
        return result

    def optimize_graph(traced: Any, *args: Any, **kwargs: Any) -> Any:
        lowering.inline(traced)
        graph = optimize(traced, *args, **kwargs)
        lowering.renumber(graph)
        return graph

    def model_to_graph(*args: Any, **kwargs: Any) -> Any:
        result = to_graph(*args, **kwargs)
        lowering.finish(result[0])
        return result

    with swapped(
        utils,
        _run_symbolic_function=run_symbolic_function,
        _optimize_graph=optimize_graph,
        _model_to_graph=model_to_graph,
    ):
        yield lowering


def _kind(node: Any) -> tuple[Any, bool]:
    names = sorted(name for name in node.attributeNames() if name != _NODE_NAME)
    attributes = tuple((name, _attribute_key(node, name)) for name in names)
    return (node.kind(), attributes), not attributes


def _attribute_key(node: Any, name: str) -> str:
    kind = node.kindOf(name)
    if kind in ("i", "f", "s", "is", "fs", "ss"):
        return repr(getattr(node, kind)(name))
    return str(kind)


def _read_trace(log: CallLog, lowering: _Lowering) -> Trace:
    names = lowering.final_names()

    def name_for(unique: int) -> str:
        return names.get(unique, f"%{unique}")

    final = [_final_operation(node) for node in lowering.final.nodes()]
    present = frozenset(value.debugName() for value in lowering.final.inputs())
    before = [
        Operation(tuple(map(name_for, outputs)), tuple(map(name_for, inputs)), kind, plain)
        for outputs, inputs, kind, plain in lowering.translated
    ]
    survivors = Survivors(before, final, present)
    made_by = [(unique, call) for unique, call in lowering.made_by.items() if call < len(log.calls)]
    sites = [(unique, Site(log.calls[call].path, call)) for unique, call in made_by]
    alive = {name for operation in final for name in operation.outputs}
    certain = {names[unique]: site for unique, site in sites if names.get(unique) in alive}
    scopes = settle_scopes(certain, ((name_for(unique), site) for unique, site in sites), survivors)
    _add_by_scope_name(scopes, lowering, log)
    returned: dict[int, tuple[str, ...]] = {}
    for number, call in enumerate(log.calls):
        values = [lowering.translated_value(name) for name in call.returned]
        if values and None not in values:
            now = (survivors.find(name_for(unique)) for unique in values if unique is not None)
            returned[number] = tuple(name for name in now if name is not None)
    return Trace(log, scopes, returned)


def _add_by_scope_name(scopes: dict[str, Site], lowering: _Lowering, log: CallLog) -> None:
    """For a node that a late pass made: the call of the scope it was put in, as its neighbours tell."""
    last = -1
    for node in lowering.final.nodes():
        names = [value.debugName() for value in node.outputs()]
        site = next((scopes[name] for name in names if name in scopes), None)
        if site is None:
            call = lowering.tap.call_in(node.scopeName(), last)
            if 0 <= call < len(log.calls):
                scopes.update(dict.fromkeys(names, Site(log.calls[call].path, call)))
        else:
            last = site.call


def _final_operation(node: Any) -> Operation:
    outputs = tuple(value.debugName() for value in node.outputs())
    inputs = tuple(value.debugName() for value in node.inputs())
    return Operation(outputs, inputs, *_kind(node))
