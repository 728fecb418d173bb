"""The modules of a file: their names, their calls and what they returned."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import msgspec

from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type
from modelexport.modules.lookup import ModuleNames, ModuleRef, list_aliases
from modelexport.modules.record import ModuleRecord, ModuleStatus, NodeTag
from modelexport.modules.tree import Ancestry, is_within, join_path

_WITHOUT_NODES: dict[str, str] = {
    ModuleStatus.ABSORBED: "the exporter folded or fused all of it away (absorbed)",
    ModuleStatus.UNUSED: "it did not run in the export (unused)",
}


class ModuleIndex:
    """The modules of a file, from its records or, where those are lost, from the nodes' tags.

    Args:
        records: The module records by path; empty where they are lost.
        tags: The tags of the nodes, which are read only then.

    Attributes:
        records: The module records by path.
        tags: The tag of each module by its path; None for a hidden one.
        names: The names that the modules can be given by.
    """

    def __init__(self, records: Mapping[str, ModuleRecord], tags: Iterable[NodeTag | None]) -> None:
        self.records = records
        self.tags: dict[str, str | None] = {path: record.tag for path, record in records.items()}
        self._calls = {path: record.calls for path, record in records.items()}
        if not records:
            self._gather(tags)
        self.names = ModuleNames(self.tags, list_aliases(records))

    def _gather(self, tags: Iterable[NodeTag | None]) -> None:
        """Collect the modules of nodes and those above them.

        A tag is that of the lowest module that contains all of its nodes' modules.
        """
        lineage = Ancestry({})
        modules: dict[str, set[str]] = {}
        for tag in tags:
            if tag is not None:
                modules.setdefault(tag.hierarchy_path, set()).add(tag.hierarchy_module)
                calls = self._calls.get(tag.hierarchy_module, 1)
                self._calls[tag.hierarchy_module] = max(calls, 1 + (tag.hierarchy_call or 0))
        for name, paths in modules.items():
            for above in (above for path in paths for above in lineage.of(path)):
                self.tags.setdefault(above, None)
            self.tags[lineage.common(paths)] = name

    def find(self, text: str) -> ModuleRef:
        """Find the one module that a text stands for.

        Args:
            text: A module path, a tag, an alias, or a glob that matches one module.

        Returns:
            The module.

        Raises:
            ArgumentError: It names no module or several; the hint has the nearest names.
        """
        return self.names.find(text)

    def select_call(self, target: ModuleRef, call: int) -> ModuleRef:
        """Select one call of a module.

        Args:
            target: The module.
            call: The number of the call, from 0.

        Returns:
            The module with that call.

        Raises:
            ArgumentTypeError: The call is not a number.
            ArgumentError: The module has no such call, or calls cannot be told apart.
        """
        if isinstance(call, bool) or not isinstance(call, int):
            raise ArgumentTypeError(
                f"the call is {describe_type(call)}", hint="pass a number, from 0"
            )
        if not self.records and any(
            is_within(path, target.path) and path != target.path for path in self._calls
        ):
            raise ArgumentError(
                "the records of the export are lost: the calls of a container cannot be told apart",
                hint="leave the call out, or choose a module without submodules",
            )
        calls = self._calls.get(target.path, 0)
        if not 0 <= call < calls:
            ran = {0: "never ran itself", 1: "ran once"}.get(calls, f"ran {calls} times")
            hint = "leave the call out" if calls < 2 else f"calls are numbered 0 to {calls - 1}"
            raise ArgumentError(
                f"{target.path or 'the root'} {ran}: there is no call {call}", hint=hint
            )
        return msgspec.structs.replace(target, call=call if calls > 1 else None)

    def no_nodes_error(self, target: ModuleRef) -> ArgumentError:
        """Return the error for a module without nodes.

        Args:
            target: The module.

        Returns:
            The error, which says why it has none and which module to choose instead.
        """
        record = self.records.get(target.path)
        name = target.path or "the root"
        if record is not None and record.nodes and target.call is not None:
            hint = "leave the call out, or choose another"
            return ArgumentError(f"call {target.call} of {name} has no nodes", hint=hint)
        above = target.path
        while above and not (above in self.records and self.records[above].nodes):
            above = above.rpartition(".")[0]
        reason = ""
        if record is not None:
            reason = f": {_WITHOUT_NODES.get(record.status, 'its nodes are not in the file')}"
        hint = f"{above or 'the root'} is the nearest module around it that has nodes"
        return ArgumentError(f"{name} has no nodes{reason}", hint=hint)

    def carried_tag(self, path: str) -> str | None:
        """Return the tag that the nodes of a module carry.

        Args:
            path: The path of the module.

        Returns:
            Its own tag, or that of the nearest shown module above it.
        """
        while path and self.tags.get(path) is None:
            path = path.rpartition(".")[0]
        return self.tags.get(path)

    def results(self, target: ModuleRef) -> set[str]:
        """Return the values that a module returned.

        Args:
            target: The module; its call, or all calls.

        Returns:
            The names of the values that are in the file.
        """
        return {name for names in self.returned(target).values() for name in names if name}

    def returned(self, target: ModuleRef) -> dict[int, tuple[str | None, ...]]:
        """Return the values that a module returned in each call.

        Args:
            target: The module; its call, or all calls.

        Returns:
            The names of the values by call; None for one that the exporter removed.
        """
        record = self.records.get(target.path)
        calls = () if record is None else record.results
        return {
            number: names for number, names in enumerate(calls) if target.call in (None, number)
        }

    def call_within(self, path: str, call: int | None, outer: str) -> int | None:
        """Find the call of a module in which a call of a module below it happened.

        Args:
            path: The path of the lower module.
            call: Its call; None where it ran once.
            outer: The path of the module above it.

        Returns:
            The call of `outer`; None where it is unknown.
        """
        while path != outer:
            record = self.records.get(path)
            if record is not None and record.calls:
                if call is None and record.calls > 1:
                    return None
                number = call or 0
                call = record.called_in[number] if number < len(record.called_in) else None
                if call == -1:
                    return None
            path = path.rpartition(".")[0]
        return 0 if call is None and self._calls.get(path, 0) < 2 else call

    def child_call(self, path: str, call: int | None, parent: str) -> tuple[str, int | None]:
        """Find the child of a module that contains another module, and its call.

        A child that never ran itself, such as a `ModuleList`, stands for its own children.

        Args:
            path: The path of the lower module.
            call: Its call; None where it ran once.
            parent: The path of the module.

        Returns:
            The path of the child, and its call where it ran more than once.
        """
        below = path[len(parent) + 1 :].split(".") if parent else path.split(".")
        child = parent
        for name in below:
            child = join_path(child, name)
            if child not in self.records or self.records[child].calls:
                break
        calls = self.records[child].calls if child in self.records else 0
        return child, self.call_within(path, call, child) if calls > 1 else None

    def node_filter(self, target: ModuleRef) -> functools._lru_cache_wrapper[bool]:
        """Return a predicate for the nodes of a module.

        Args:
            target: The module, and its call where only that is meant.

        Returns:
            A cached function of a node's module path and call.
        """

        @functools.cache
        def belongs(path: str, call: int | None) -> bool:
            if not is_within(path, target.path):
                return False
            return target.call is None or self.call_within(path, call, target.path) == target.call

        return belongs
