"""Modules that run in conditional and loop bodies, where no hook may record a call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from modelexport.baseline.calling import swapped
from modelexport.baseline.trace import Site
from modelexport.graph import body_prefix
from modelexport.hierarchy.tree import ModuleTree

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
                    modules = [self._paths.get(key) for key in node.meta.get("nn_module_stack") or ()]
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
            yield attribute.value, body_prefix(f"{prefix}{node.outputs[0].name}", attribute.name)


@contextmanager
def watched_branches(model: nn.Module, tree: ModuleTree) -> Iterator[BranchModules]:
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

    with swapped(debugging, make_eager_backend_with_torch_function_modes=make_watched_backend):
        yield branches
