"""Find modules by what people type (a tag, a module path, an alias or a glob), and their calls."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type, plural
from modelexport.modules.record import AUXILIARY, ModuleRecord, ModuleStatus, NodeTag
from modelexport.modules.tree import Ancestry, is_within, join_path, resolve_alias

AUXILIARY_WORD = "auxiliary"
"""Selects the auxiliary nodes, instead of a module."""

_GLOB = re.compile(r"[*?\[]")
_MAX_SUGGESTIONS = 5
_WITHOUT_NODES: dict[str, str] = {
    ModuleStatus.ABSORBED: "the exporter folded or fused all of it away (absorbed)",
    ModuleStatus.UNUSED: "it did not run in the export (unused)",
}


class ModuleRef(msgspec.Struct, frozen=True):
    """One module, and one of its calls where only that is meant."""

    path: str
    tag: str | None
    call: int | None = None


class Resolution(msgspec.Struct, frozen=True):
    """What a text stands for: a module with all below it, the matches of a glob, or nothing."""

    path: str | None = None
    """The path of the module that the text names."""
    tag: str | None = None
    """The tag that the text is, or that the tags of some modules lie below."""
    prefix: str | None = None
    """The beginning of a tag that ends within a segment."""
    glob: re.Pattern[str] | None = None

    def covers(self, path: str, tag: str | None) -> bool:
        """Return whether a module is meant; `tag` is its own, or of the nearest shown one above."""
        if self.glob is not None:
            return bool(self.glob.match(path) or (tag is not None and self.glob.match(tag)))
        if self.tag is not None:
            return tag is not None and is_tag_within(tag, self.tag)
        if self.path is not None:
            return is_within(path, self.path)
        return self.prefix is not None and tag is not None and tag.startswith(self.prefix)


class ModuleNames:
    """The names that the modules of a file can be given by.

    Args:
        records: The module records by path.
        tags: The tag of each module by its path, None for a hidden one; from the records if None.
        node_tags: Further tags, those of nodes in a file whose module records are lost.
    """

    def __init__(
        self,
        records: Mapping[str, ModuleRecord],
        tags: dict[str, str | None] | None = None,
        node_tags: Iterable[str] = (),
    ) -> None:
        self.tags: dict[str, str | None] = (
            {path: r.tag for path, r in records.items()} if tags is None else tags
        )
        self._aliases = {alias: path for path, r in records.items() for alias in r.aliases}
        self._path_of = {tag: path for path, tag in self.tags.items() if tag is not None}
        self._all_tags = sorted({*self._path_of, *node_tags})

    def resolve(self, text: str) -> Resolution:
        """Resolve what a user typed; every command that takes a module or a pattern uses this.

        Args:
            text: A module path, a tag, an alias, a glob on paths and tags, or the beginning of a
                tag; the first of them that fits.

        Raises:
            ArgumentTypeError: It is not a text.
        """
        if not isinstance(text, str):
            raise ArgumentTypeError(
                f"the module is {describe_type(text)}", hint="pass a tag or a module path"
            )
        if text in self.tags:
            return Resolution(path=text)
        whole = text.rstrip("/")
        if any(is_tag_within(tag, whole) for tag in self._all_tags):
            return Resolution(path=self._path_of.get(whole), tag=whole)
        path = resolve_alias(text, self.tags, self._aliases)
        if path is not None:
            return Resolution(path=path)
        if _GLOB.search(text):
            return Resolution(glob=re.compile(fnmatch.translate(text)))
        return Resolution(prefix=text if text.startswith("/") else None)

    def find(self, text: str) -> ModuleRef:
        """Find the one module that a text stands for; `resolve` says what it may be.

        Raises:
            ArgumentError: It names no module or several; the hint has the nearest names.
            ArgumentTypeError: It is not a text.
        """
        resolution = self.resolve(text)
        path, verb = resolution.path, "is called"
        if resolution.glob is not None:
            matches = [path for path, tag in self.tags.items() if resolution.covers(path, tag)]
            if len(matches) > 1:
                raise _ambiguous(text, matches)
            path, verb = next(iter(matches), None), "matches"
        if path is None:
            near = self.suggest(text)
            hint = f"near it: {', '.join(near)}" if near else ""
            hint = hint or "modelexport extract ONNX --list shows them all"
            raise ArgumentError(f"no module {verb} {text!r}", hint=hint)
        return ModuleRef(path, self.tags.get(path))

    def require_match(self, text: str) -> None:
        """Check that a text selects at least one module.

        Raises:
            ArgumentError: It selects none; the hint has the nearest names.
            ArgumentTypeError: It is not a text.
        """
        resolution = self.resolve(text)
        if not any(resolution.covers(path, self.carried_tag(path)) for path in self.tags):
            self.find(text)

    def carried_tag(self, path: str) -> str | None:
        """Return the tag of the nodes of a module: its own, or that of the nearest shown above."""
        while path and self.tags.get(path) is None:
            path = path.rpartition(".")[0]
        return self.tags.get(path)

    def suggest(self, text: str) -> list[str]:
        """List up to five names that are most like a text which matches nothing.

        They are tags where the text begins like one, else module paths, or tags if none is near.
        """
        wanted = text.strip("/.*").lower()
        if not text.startswith("/"):
            paths = [path for path in self.tags if path]
            near = (
                _containing(wanted, paths)
                or difflib.get_close_matches(text.strip("*"), paths, n=_MAX_SUGGESTIONS, cutoff=0.5)
                or _with_similar_end(wanted, paths, ".")
            )
            if near:
                return near
        return _containing(wanted, self._all_tags) or _with_similar_end(wanted, self._all_tags, "/")

    def suggest_any(self, text: str) -> list[str]:
        """List the names that are most like a text, or any tags where none is near."""
        return self.suggest(text) or self._all_tags[:_MAX_SUGGESTIONS]


def _ambiguous(text: str, matches: Sequence[str]) -> ArgumentError:
    named = ", ".join(path or "(root)" for path in matches[:_MAX_SUGGESTIONS])
    rest = len(matches) - _MAX_SUGGESTIONS
    more = f" and {rest} more" if rest > 0 else ""
    return ArgumentError(
        f"{text!r} matches {plural(len(matches), 'module')}", hint=f"name one of {named}{more}"
    )


def _containing(wanted: str, names: Sequence[str]) -> list[str]:
    """List the shortest names that contain a text."""
    matches = [name for name in names if wanted and wanted in name.lower()]
    return sorted(matches, key=lambda name: (len(name), name))[:_MAX_SUGGESTIONS]


def _with_similar_end(wanted: str, names: Sequence[str], separator: str) -> list[str]:
    """List the names whose last segment is most like that of a text."""
    ends: dict[str, list[str]] = {}
    for name in names:
        ends.setdefault(name.rpartition(separator)[2].lower(), []).append(name)
    last = wanted.rpartition(separator)[2]
    close = difflib.get_close_matches(last, ends, n=_MAX_SUGGESTIONS, cutoff=0.4)
    return [name for end in close for name in ends[end]][:_MAX_SUGGESTIONS]


class Selection:
    """The nodes and modules that a pattern selects; all of them without a pattern.

    Args:
        text: What `ModuleNames.resolve` takes, or `auxiliary`; None for everything.
        tags: The tags of the nodes of the file.
        modules: The module records by path.
    """

    def __init__(
        self, text: str | None, tags: Iterable[str], modules: Mapping[str, ModuleRecord]
    ) -> None:
        self.text = text
        self._names = ModuleNames(modules, node_tags=tags)
        self._resolution = self._names.resolve(text or "")

    def has_node(self, tag: NodeTag | None) -> bool:
        """Return whether a node is selected, given its tag."""
        if self.text is None or tag is None:
            return self.text is None
        if self.text == AUXILIARY_WORD:
            return tag.hierarchy_method in AUXILIARY
        return self._resolution.covers(tag.hierarchy_module, tag.hierarchy_path)

    def has_module(self, path: str, tag: str | None) -> bool:
        """Return whether a module is selected; `tag` is its own, or of the nearest shown above."""
        if self.text is None or self.text == AUXILIARY_WORD:
            return self.text is None
        return self._resolution.covers(path, tag)

    def nearest(self) -> list[str]:
        """List the names that are most like the text, for one that selects nothing."""
        return [] if self.text is None else self._names.suggest_any(self.text)


def is_tag_within(tag: str, ancestor: str) -> bool:
    """Return whether a tag is another one or lies below it."""
    return tag == ancestor or tag.startswith(f"{ancestor}/")


class ModuleIndex(ModuleNames):
    """The modules of a file, from its records or, where those are lost, from the nodes' tags.

    Args:
        records: The module records by path; empty where they are lost.
        node_tags: The tags of the nodes, which are read only then.

    Attributes:
        records: The module records by path.
        tags: The tag of each module by its path; None for a hidden one.
    """

    def __init__(
        self, records: Mapping[str, ModuleRecord], node_tags: Iterable[NodeTag | None]
    ) -> None:
        self.records = records
        self._calls = {path: record.calls for path, record in records.items()}
        super().__init__(records, None if records else self._gather(node_tags))

    def _gather(self, node_tags: Iterable[NodeTag | None]) -> dict[str, str | None]:
        """Return the tags by path, of the modules of nodes and those above them.

        A tag is that of the lowest module that contains all of its nodes' modules.
        """
        lineage = Ancestry({})
        modules: dict[str, set[str]] = {}
        for tag in filter(None, node_tags):
            modules.setdefault(tag.hierarchy_path, set()).add(tag.hierarchy_module)
            calls = self._calls.get(tag.hierarchy_module, 1)
            self._calls[tag.hierarchy_module] = max(calls, 1 + (tag.hierarchy_call or 0))
        tags: dict[str, str | None] = {}
        for name, paths in modules.items():
            for above in (above for path in paths for above in lineage.of(path)):
                tags.setdefault(above, None)
            tags[lineage.common(paths)] = name
        return tags

    def select_call(self, target: ModuleRef, call: int) -> ModuleRef:
        """Select one call of a module, by its number from 0.

        Raises:
            ArgumentTypeError: The call is not a number.
            ArgumentError: The module has no such call, or its calls cannot be distinguished.
        """
        if isinstance(call, bool) or not isinstance(call, int):
            raise ArgumentTypeError(
                f"the call is {describe_type(call)}", hint="pass a number, from 0"
            )
        if not self.records and any(
            is_within(path, target.path) and path != target.path for path in self._calls
        ):
            raise ArgumentError(
                "the records of the export are lost, and with them which call is which",
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

    def no_nodes_error(
        self, target: ModuleRef, node_tags: Iterable[NodeTag | None] = ()
    ) -> ArgumentError:
        """Return the error for a module without nodes: why, and which to choose instead.

        Args:
            target: The module.
            node_tags: The tags of all nodes, to find nodes with operations of the module.
        """
        record = self.records.get(target.path)
        name = target.path or "the root"
        if record is not None and record.nodes and target.call is not None:
            hint = "leave the call out, or choose another"
            return ArgumentError(f"call {target.call} of {name} has no nodes", hint=hint)
        hosts = {
            tag.hierarchy_module: None
            for tag in filter(None, node_tags)
            if any(is_within(covered, target.path) for covered in tag.hierarchy_covers)
        }
        if hosts:
            names, most = [host or "the root" for host in hosts], _MAX_SUGGESTIONS
            more = f" and {len(names) - most} more" if len(names) > most else ""
            hint = f"choose {names[0]}" if len(names) == 1 else "choose one of these"
            message = f"{name} has no nodes: its operations are merged into nodes of "
            return ArgumentError(f"{message}{', '.join(names[:most])}{more}", hint=hint)
        above = target.path
        while above and not (above in self.records and self.records[above].nodes):
            above = above.rpartition(".")[0]
        reason = ""
        if record is not None:
            reason = f": {_WITHOUT_NODES.get(record.status, 'its nodes are not in the file')}"
        hint = f"{above or 'the root'} is the nearest module around it that has nodes"
        return ArgumentError(f"{name} has no nodes{reason}", hint=hint)

    def results(self, target: ModuleRef) -> list[str]:
        """List the values in the file that a module returned, in its call or all calls."""
        calls = self.returned_values(target).values()
        return list(dict.fromkeys(name for names in calls for name in names if name))

    def returned_values(self, target: ModuleRef) -> dict[int, tuple[str | None, ...]]:
        """Return the values that a module returned, by call; None for one that was removed."""
        record = self.records.get(target.path)
        calls = () if record is None else record.results
        return {
            number: names for number, names in enumerate(calls) if target.call in (None, number)
        }

    def call_count(self, path: str) -> int:
        """Return how many times a module ran; 0 for one that never ran itself, or is unknown."""
        return self._calls.get(path, 0)

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
        """Return a cached predicate for nodes of a module, given a node's module path and call."""

        @functools.cache
        def belongs(path: str, call: int | None) -> bool:
            if not is_within(path, target.path):
                return False
            return target.call is None or self.call_within(path, call, target.path) == target.call

        return belongs
