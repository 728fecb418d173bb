"""Namespaces: the nesting of modules as Model Explorer draws it, and what it says about each."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from modelexport.modules.record import ModuleRecord, ModuleStatus
from modelexport.modules.tree import Ancestry, join_path
from modelexport.viewing.explorer_format import group_text, panel_text

_ROOT = "(root)"


class Namespaces:
    """The namespace of every module: the modules around it and itself, from the root down.

    Shown and hidden modules are groups alike. A module that neither ran nor has nodes of its own
    only holds others, as a list of layers does: its name goes in front of theirs, `layer.0`, which
    saves a box around them.

    Args:
        modules: The module records by path; empty if they are lost.
        with_nodes: The paths of the modules that have nodes of their own.
    """

    def __init__(
        self, modules: Mapping[str, ModuleRecord], with_nodes: Container[str] = ()
    ) -> None:
        self.lineage: Ancestry = Ancestry(modules)
        self._modules = modules
        self._with_nodes = with_nodes
        self._namespaces: dict[str, str] = {}
        self._modules_by_namespace: dict[str, str] = {}

    def of(self, path: str) -> str:
        """Return the namespace of a module."""
        known = self._namespaces.get(path)
        if known is not None:
            return known
        namespace, above = "", ""
        for each in self.lineage.of(path):
            if each and self._is_container(each):
                continue
            name = each[len(above) + 1 :] if above else each
            record = self._modules.get(each)
            class_name = "" if record is None else record.class_.rpartition(".")[2]
            segment = group_text(name, class_name) or ("%" if each else _ROOT)
            namespace = f"{namespace}/{segment}" if namespace else segment
            self._modules_by_namespace[namespace] = above = each
        self._namespaces[path] = namespace
        return namespace

    def _is_container(self, path: str) -> bool:
        record = self._modules.get(path)
        return record is not None and not record.calls and path not in self._with_nodes

    def module_of(self, namespace: str) -> str:
        """Return the path of the innermost module of a namespace that `of` returned."""
        return self._modules_by_namespace[namespace]

    def groups(self, namespaces: Iterable[str]) -> dict[str, str]:
        """Return the modules that some namespaces consist of, by the namespace of each."""
        groups: dict[str, str] = {}
        for namespace in namespaces:
            while namespace and namespace not in groups:
                groups[namespace] = self.module_of(namespace)
                namespace = namespace.rpartition("/")[0]
        return groups

    def describe(self, path: str) -> dict[str, str]:
        """Return the lines of the side panel for a module."""
        record = self._modules.get(path)
        lines = {"module": path or _ROOT}
        if record is None:
            return lines
        lines |= {
            "class": record.class_,
            "tag": record.tag or "hidden",
            "status": record.status,
            "calls": str(record.calls),
            "nodes": str(record.nodes),
        }
        if record.execution_order is not None:
            lines["execution order"] = str(record.execution_order)
        if isinstance(record.parameter_count, int):
            lines["parameters"] = f"{record.parameter_count:,}"
        if isinstance(record.flops, int):
            lines["flops"] = f"{record.flops:,}"
        lists = {
            "own parameters": record.direct_parameters,
            "arguments": record.forward_args,
            "aliases": record.aliases,
            "modules without nodes": self._empty_children(path, record),
        }
        lines.update((key, ", ".join(names)) for key, names in lists.items() if names)
        return {key: panel_text(text) for key, text in lines.items()}

    def _empty_children(self, path: str, record: ModuleRecord) -> list[str]:
        """List the children that have no box, because neither they nor modules below have nodes."""
        children = ((name, self._modules.get(join_path(path, name))) for name in record.children)
        return [
            f"{name} ({child.status})"
            for name, child in children
            if child is not None and child.status != ModuleStatus.NODES
        ]
