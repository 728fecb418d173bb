"""Dynamic shapes as each exporter takes them, also of inputs in objects such as caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

# Private by its name only: the registry by which torch.export nests the shapes of objects.
from torch.utils._pytree import SUPPORTED_NODES

from modelexport.capture.inputs import ModelInputs, name_inputs
from modelexport.capture.module_tree import forward_args
from modelexport.capture.pytrees import holds_tree, named_leaves
from modelexport.errors import ArgumentError


def nest_shapes(model: nn.Module, inputs: ModelInputs, dynamic_shapes: Any) -> Any:
    """Return dynamic shapes by name with an entry for every input, as torch.export needs them.

    Those of an object may be nested as torch nests them, or by the names of its tensors.
    """
    by_name = isinstance(dynamic_shapes, Mapping)
    if not by_name or not all(isinstance(name, str) for name in dynamic_shapes):
        return dynamic_shapes
    arguments = list(forward_args(model))
    shapes: dict[str, Any] = dict.fromkeys((*arguments[: len(inputs.args)], *inputs.kwargs))
    shapes.update(dynamic_shapes)
    for name, value in name_inputs(model, inputs).items():
        if holds_tree(value) and shapes.get(name) is None:
            leaves = [leaf for leaf, _ in named_leaves(name, value)]
            shapes[name] = _nest(value, (shapes.pop(leaf, None) for leaf in leaves))
    keywords = next((name.removeprefix("**") for name in arguments if name.startswith("**")), None)
    extra = {n: dims for n, dims in shapes.items() if n in inputs.kwargs and n not in arguments}
    if keywords is None or not extra:
        return shapes
    return {**{n: dims for n, dims in shapes.items() if n not in extra}, keywords: extra}


def _children(value: object) -> Sequence[object] | None:
    """Return what torch.export nests in a value; None if it is a leaf."""
    node = SUPPORTED_NODES.get(type(value))
    return None if node is None else node.flatten_fn(value)[0]


def _nest(value: object, leaves: Iterator[Any]) -> Any:
    """Nest the shapes of the leaves of a value: dicts by key, and all else as lists."""
    children = _children(value)
    if children is None:
        return next(leaves)
    nested = [_nest(child, leaves) for child in children]
    if isinstance(value, dict) and type(value) is dict:
        return dict(zip(value, nested, strict=True))
    return tuple(nested) if type(value) is tuple else nested


def _flatten(value: object, shapes: Any) -> Iterator[Any]:
    """Yield the shapes of the leaves of a value from shapes that are nested as `_nest` does."""
    children = _children(value)
    if children is None:
        yield shapes
        return
    nested = shapes.values() if isinstance(shapes, Mapping) else shapes
    if nested is None or len(nested) != len(children):
        nested = [None] * len(children)
    for child, inner in zip(children, nested, strict=True):
        yield from _flatten(child, inner)


def flatten_shapes(
    model: nn.Module, inputs: ModelInputs, dynamic_shapes: Any, names: Sequence[str] | None
) -> dict[str, dict[int, str]] | None:
    """Convert `dynamic_shapes` by input name to the `dynamic_axes` of the torchscript exporter.

    Raises:
        ArgumentError: The shapes are not by name, or the inputs have no names.
    """
    if not dynamic_shapes:
        return None
    if not isinstance(dynamic_shapes, Mapping) or names is None:
        raise ArgumentError(
            "the torchscript exporter needs dynamic_shapes by input name",
            hint="pass a dict such as {'input_ids': {0: 'batch'}} together with keyword inputs "
            "or input_names",
        )
    by_leaf = dict(dynamic_shapes)
    for name, value in name_inputs(model, inputs).items():
        if holds_tree(value) and name in by_leaf:
            leaves = (leaf for leaf, _ in named_leaves(name, value))
            by_leaf.update(zip(leaves, _flatten(value, by_leaf.pop(name)), strict=True))
    axes: dict[str, dict[int, str]] = {}
    for name, dims in by_leaf.items():
        items = dims.items() if isinstance(dims, Mapping) else enumerate(dims or ())
        axes[name] = {
            axis: dim if isinstance(dim, str) else getattr(dim, "__name__", f"{name}_{axis}")
            for axis, dim in items
            if dim is not None and not isinstance(dim, int)
        }
    return axes
