"""Watch the ONNX graph of a dynamo export from its translation through the optimiser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from modelexport.capture.model_state import swap_attributes
from modelexport.capture.trace import Operation

_NAME_SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of an ONNX node: the module paths of an FX node, then its name, as a printed list."""


class Translation:
    """The ONNX graph as first translated, and what the optimiser does with its nodes."""

    def __init__(self) -> None:
        """Start before the translation."""
        self.operations: list[Operation] = []
        self.fx_names: dict[str, str] = {}
        """By ONNX value, the name of the FX node that it was translated from."""
        self.outputs: list[str] = []
        self._initializers: dict[str, Any] = {}
        self._origins: dict[int, tuple[Any, dict[str, None]]] = {}
        """By the id of an ONNX node, the node and the FX nodes it implements.

        It holds the nodes so that no other object gets the id of a removed one.
        """

    def read(self, model: Any) -> None:
        """Read the graph as first translated.

        Args:
            model: The model before version conversion.
        """
        graph = model.graph
        self.operations = [describe_node(node) for node in graph]
        self.fx_names = _fx_names(model)
        self.outputs = [value.name for value in graph.outputs]
        self._initializers = {name: v.const_value for name, v in graph.initializers.items()}

    def begin(self, model: Any) -> None:
        """Note which FX node each node implements.

        Args:
            model: The model after version conversion and before the optimiser.
        """
        for node in model.graph:
            names = dict.fromkeys(
                self.fx_names[value.name] for value in node.outputs if value.name in self.fx_names
            )
            self._origins[id(node)] = (node, names)

    def replace(self, old: Iterable[Any], new: Iterable[Any]) -> None:
        """Note that the optimiser replaced nodes by others.

        Args:
            old: The replaced nodes; first the one that computed the result.
            new: The nodes in their place.
        """
        names = {name: None for node in old for name in self.fx_nodes_of(node)}
        for node in new:
            self._origins[id(node)] = (node, {**self.fx_nodes_of(node), **names})

    def fx_nodes_of(self, node: Any) -> dict[str, None]:
        """Return the names of the FX nodes that an ONNX node implements.

        Args:
            node: The ONNX node.

        Returns:
            The names in order; first the FX node whose result the node computes.
        """
        return self._origins[id(node)][1] if id(node) in self._origins else {}

    def changed_initializers(self, graph: Any) -> frozenset[str]:
        """Return the initializers to which the optimiser gave other values under their old names.

        It does so when it fuses a scale into them. An initializer that an operation used to
        compute is the folded value of that operation, and unchanged.

        Args:
            graph: The graph as written.
        """
        folded = {name for operation in self.operations for name in operation.outputs}
        return frozenset(
            name
            for name, value in graph.initializers.items()
            if name not in folded and value.const_value is not self._initializers.get(name)
        )


@contextmanager
def watch_translation() -> Iterator[Translation]:
    """Watch the translated graph, and each step of the optimiser, while the block runs.

    Yields:
        The record, complete when `torch.onnx.export` returns.
    """
    # Private, all three, because neither torch nor onnxscript calls back:
    # - Version conversion drops the metadata of nodes, so the evidence has to be read before it.
    #   The exporter calls it as an attribute of `onnxscript_apis`.
    # - Of the nodes that the optimiser fuses, the file keeps the metadata of one. It merges the
    #   metadata whenever a rewrite rule replaces nodes.
    # - It removes common subexpressions one by one.
    # If one is renamed, entering the block fails; if one is called no more, fused nodes lose their
    # `hierarchy_covers` and nodes their scopes, which tests/test_value.py shows.
    from onnx_ir.passes.common import common_subexpression_elimination as elimination
    from onnxscript.utils.metadata_merger import MetadataMerger
    from torch.onnx._internal.exporter import _core

    translation = Translation()
    original: Any = vars(_core)["onnxscript_apis"]
    merge, eliminate = (
        MetadataMerger.copy_merged_metadata,
        elimination._remove_node_and_replace_values,
    )

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

        def convert_version(self, model: Any, version: int) -> Any:
            translation.read(model)
            converted = original.convert_version(model, version)
            translation.begin(converted)
            return converted

    def copy_merged_metadata(merger: Any, from_nodes: Iterable[Any], to: Any) -> None:
        merge(merger, from_nodes, to)
        translation.replace(from_nodes, to if isinstance(to, Iterable) else (to,))

    def remove_node_and_replace_values(
        graph: Any, /, remove_node: Any, remove_values: Any, new_values: Any
    ) -> None:
        translation.replace((remove_node,), [value.producer() for value in new_values][:1])
        eliminate(graph, remove_node, remove_values, new_values)

    with (
        swap_attributes(_core, onnxscript_apis=Watched()),
        swap_attributes(MetadataMerger, copy_merged_metadata=copy_merged_metadata),
        swap_attributes(
            elimination, _remove_node_and_replace_values=remove_node_and_replace_values
        ),
    ):
        yield translation


def describe_node(node: Any) -> Operation:
    """Describe a node, so that it can be recognised after the optimiser.

    Its attributes are read now, because the optimiser changes them in place.

    Args:
        node: The ONNX node.

    Returns:
        Its description.
    """
    attributes = tuple(
        sorted((name, _attribute_key(value)) for name, value in node.attributes.items())
    )
    kind = (node.domain, node.op_type, attributes)
    return Operation(
        tuple(value.name or "" for value in node.outputs),
        tuple("" if value is None else value.name or "" for value in node.inputs),
        lambda: kind,
        not attributes,
    )


def _attribute_key(attribute: Any) -> str:
    value = attribute.value
    if isinstance(value, int | float | str | list | tuple):
        return repr(value)
    return repr((getattr(value, "dtype", None), getattr(value, "shape", None)))


def _fx_names(model: Any) -> dict[str, str]:
    """Return for each value the name of the FX node it was translated from."""
    names: dict[str, str] = {}
    for node in model.graph:
        scopes = node.metadata_props.get(_NAME_SCOPES)
        if scopes:
            fx_name = scopes.rpartition(", ")[2].strip("[]'\"")
            names.update((value.name, fx_name) for value in node.outputs if value.name)
    return names
