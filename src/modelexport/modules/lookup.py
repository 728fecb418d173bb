"""Find modules by what people type: a tag, a module path, an alias or a glob."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping

import msgspec

from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type, plural
from modelexport.modules.record import AUXILIARY, ModuleRecord, ModuleStatus, NodeTag
from modelexport.modules.tree import Ancestry, is_within, join_path, resolve_alias

_GLOB = re.compile(r"[*?\[]")
_MOST = 5
_WHY: dict[str, str] = {
    ModuleStatus.ABSORBED: "the exporter folded or fused all of it away (absorbed)",
    ModuleStatus.UNUSED: "it did not run in the export (unused)",
}


class ModuleRef(msgspec.Struct, frozen=True):
    """One module, and one of its calls where only that is meant."""

    path: str
    tag: str | None
    call: int | None = None


class ModuleIndex:
    """The modules of a file: from its records, or, where those are lost, as far as the nodes' tags tell."""

    def __init__(self, records: Mapping[str, ModuleRecord], tags: Iterable[NodeTag | None]) -> None:
        self.records = records
        self.tags: dict[str, str | None] = {path: record.tag for path, record in records.items()}
        self._aliases = {
            alias: path for path, record in records.items() for alias in record.aliases
        }
        self._calls = {path: record.calls for path, record in records.items()}
        if not records:
            self._gather(tags)
        self._path_of = {tag: path for path, tag in self.tags.items() if tag is not None}

    def _gather(self, tags: Iterable[NodeTag | None]) -> None:
        """Without records: the paths of nodes and those above them; a tag is of what its nodes have in common."""
        lineage = Ancestry({})
        modules: dict[str, set[str]] = {}
        for tag in tags:
            if tag is not None:
                modules.setdefault(tag.hierarchy_path, set()).add(tag.hierarchy_module)
                calls = self._calls.get(tag.hierarchy_module, 1)
                self._calls[tag.hierarchy_module] = max(calls, 1 + (tag.hierarchy_call or 0))
        for name, paths in modules.items():
            self.tags.update(
                (above, None)
                for path in paths
                for above in lineage.of(path)
                if above not in self.tags
            )
            self.tags[lineage.common(paths)] = name

    def find(self, text: str) -> ModuleRef:
        """The one module that a text stands for."""
        if not isinstance(text, str):
            raise ArgumentTypeError(
                f"the module is {describe_type(text)}", hint="pass a tag or a module path"
            )
        if text in self.tags:
            return ModuleRef(text, self.tags[text])
        whole = text.rstrip("/")
        path = self._path_of.get(whole, resolve_alias(text, self.tags, self._aliases))
        if path is not None:
            return ModuleRef(path, self.tags.get(path))
        if _GLOB.search(text):
            return self._only_match(text)
        raise ArgumentError(f"no module is called {text!r}", hint=self._near(text))

    def _only_match(self, text: str) -> ModuleRef:
        pattern = re.compile(fnmatch.translate(text))
        found = [
            path
            for path, tag in self.tags.items()
            if pattern.match(path) or (tag and pattern.match(tag))
        ]
        if not found:
            raise ArgumentError(f"no module matches {text!r}", hint=self._near(text.strip("*")))
        if len(found) > 1:
            more = "" if len(found) <= _MOST else f" and {len(found) - _MOST} more"
            named = ", ".join(path or "(root)" for path in found[:_MOST])
            raise ArgumentError(
                f"{text!r} matches {plural(len(found), 'module')}",
                hint=f"name one of {named}{more}",
            )
        return ModuleRef(found[0], self.tags[found[0]])

    def _near(self, text: str) -> str:
        """The names that look most like this one, told as a hint."""
        names = (
            list(self._path_of) if text.startswith("/") else [path for path in self.tags if path]
        )
        wanted = text.strip("/.").lower()
        by_part = sorted(
            (name for name in names if wanted and wanted in name.lower()), key=lambda n: (len(n), n)
        )
        near = by_part[:_MOST] or difflib.get_close_matches(text, names, n=_MOST, cutoff=0.5)
        if not near:
            last = re.split(r"[./]", wanted)[-1]
            near = [name for name in names if last and re.split(r"[./]", name.lower())[-1] == last][
                :_MOST
            ]
        return (
            f"near it: {', '.join(near)}"
            if near
            else "modelexport extract ONNX --list shows them all"
        )

    def called(self, target: ModuleRef, call: int) -> ModuleRef:
        """One call of a module."""
        if isinstance(call, bool) or not isinstance(call, int):
            raise ArgumentTypeError(
                f"the call is {describe_type(call)}", hint="pass a number, from 0"
            )
        calls = self._calls.get(target.path, 0)
        if not self.records and any(
            is_within(path, target.path) and path != target.path for path in self._calls
        ):
            raise ArgumentError(
                "the records of the export are lost, and nodes alone do not tell which call of a container they are of",
                hint="leave the call out, or take a module that holds no other",
            )
        if not 0 <= call < calls:
            ran = (
                "never ran itself"
                if not calls
                else "ran once"
                if calls == 1
                else f"ran {calls} times"
            )
            hint = "leave the call out" if calls < 2 else f"calls are numbered 0 to {calls - 1}"
            raise ArgumentError(
                f"{target.path or 'the root'} {ran}: there is no call {call}", hint=hint
            )
        return msgspec.structs.replace(target, call=call if calls > 1 else None)

    def nothing(self, target: ModuleRef) -> ArgumentError:
        """Why a module has no nodes, and what to take instead."""
        record = self.records.get(target.path)
        name = target.path or "the root"
        if record is not None and record.nodes and target.call is not None:
            hint = "leave the call out, or take another"
            return ArgumentError(f"call {target.call} of {name} has no nodes", hint=hint)
        above = target.path
        while above and not (above in self.records and self.records[above].nodes):
            above = above.rpartition(".")[0]
        why = (
            ""
            if record is None
            else f": {_WHY.get(record.status, 'its nodes are not in the file')}"
        )
        hint = f"{above or 'the root'} is the nearest module around it that has nodes"
        return ArgumentError(f"{name} has no nodes{why}", hint=hint)

    def carried_tag(self, path: str) -> str | None:
        """A module's own tag, or that of the nearest module above it that has one."""
        while path and self.tags.get(path) is None:
            path = path.rpartition(".")[0]
        return self.tags.get(path)

    def results(self, target: ModuleRef) -> set[str]:
        """The tensors that a module returned, in the call that is meant or in all."""
        return {name for names in self.returned(target).values() for name in names if name}

    def returned(self, target: ModuleRef) -> dict[int, tuple[str | None, ...]]:
        """What a module returned by call, in the call that is meant or in all; None for what the exporter removed."""
        record = self.records.get(target.path)
        calls = () if record is None else record.results
        return {
            number: names for number, names in enumerate(calls) if target.call in (None, number)
        }

    def call_within(self, path: str, call: int | None, outer: str) -> int | None:
        """Which call of `outer` a call of a module below it was part of; None where that is not known."""
        while True:
            record = self.records.get(path)
            if path == outer:
                return 0 if call is None and self._calls.get(path, 0) < 2 else call
            if record is not None and record.calls:
                if call is None and record.calls > 1:
                    return None
                place = call or 0
                call = record.called_in[place] if place < len(record.called_in) else None
                if call == -1:
                    return None
            path = path.rpartition(".")[0]

    def child_call(self, path: str, call: int | None, parent: str) -> tuple[str, int | None]:
        """The child of a module that another below it belongs to, and the call; one that never ran is looked into."""
        below = path[len(parent) + 1 :].split(".") if parent else path.split(".")
        child = parent
        for name in below:
            child = join_path(child, name)
            if child not in self.records or self.records[child].calls:
                break
        calls = self.records[child].calls if child in self.records else 0
        return child, self.call_within(path, call, child) if calls > 1 else None

    def holds(self, target: ModuleRef) -> functools._lru_cache_wrapper[bool]:
        """Whether a node with this tag belongs to a module, by its module and call."""

        @functools.cache
        def belongs(path: str, call: int | None) -> bool:
            if not is_within(path, target.path):
                return False
            return target.call is None or self.call_within(path, call, target.path) == target.call

        return belongs


AUXILIARY_WORD = "auxiliary"
_SUGGESTIONS = 5
_GLOB_OR_LIST = re.compile(r"[*?\[]")


class Selection:
    """Which nodes and modules a text stands for; all of them where there is no text."""

    def __init__(
        self, text: str | None, tags: Iterable[str], modules: dict[str, ModuleRecord]
    ) -> None:
        self.text = text
        self._is_glob = False
        self._tags = sorted(
            {*tags, *(record.tag for record in modules.values() if record.tag is not None)}
        )
        self._matches, self._of_path = self._understand(text, modules)

    def _understand(
        self, text: str | None, modules: dict[str, ModuleRecord]
    ) -> tuple[Callable[[str], bool] | None, str | None]:
        """How the text matches tags, or which module path it names."""
        if text is None or text == AUXILIARY_WORD:
            return None, None
        if text in modules and text:
            return None, text
        whole = text.rstrip("/")
        if any(is_tag_within(tag, whole) for tag in self._tags):
            return (lambda tag: is_tag_within(tag, whole)), None
        if _GLOB_OR_LIST.search(text):
            pattern = re.compile(fnmatch.translate(text))
            self._is_glob = True
            return (lambda name: pattern.match(name) is not None), None
        return (lambda tag: text.startswith("/") and tag.startswith(text)), None

    def has_node(self, tag: NodeTag | None) -> bool:
        if self.text is None:
            return True
        if tag is None:
            return False
        if self.text == AUXILIARY_WORD:
            return tag.hierarchy_method in AUXILIARY
        if self._of_path is not None:
            return is_within(tag.hierarchy_module, self._of_path)
        return self._matched(tag.hierarchy_path) or (
            self._is_glob and self._matched(tag.hierarchy_module)
        )

    def has_module(self, path: str, tag: str | None) -> bool:
        """Whether a module is meant; `tag` is its own or that of the nearest shown module above it."""
        if self.text is None:
            return True
        if self.text == AUXILIARY_WORD:
            return False
        if self._of_path is not None:
            return is_within(path, self._of_path)
        return (tag is not None and self._matched(tag)) or (self._is_glob and self._matched(path))

    def _matched(self, name: str) -> bool:
        return self._matches is not None and self._matches(name)

    def nearest(self) -> list[str]:
        """The tags that look most like the text, for a text that matches nothing."""
        if self.text is None or not self._tags:
            return []
        wanted = self.text.strip("/*").lower()
        by_part = [tag for tag in self._tags if wanted and wanted in tag.lower()]
        if by_part:
            return sorted(by_part, key=lambda tag: (len(tag), tag))[:_SUGGESTIONS]
        last = wanted.rpartition("/")[2]
        ends: dict[str, str] = {}
        for tag in self._tags:
            ends.setdefault(tag.rpartition("/")[2].lower(), tag)
        close = difflib.get_close_matches(last, ends, n=_SUGGESTIONS, cutoff=0.4)
        return [ends[name] for name in close] or self._tags[:_SUGGESTIONS]


def is_tag_within(tag: str, ancestor: str) -> bool:
    """Whether a tag is this one or lies below it."""
    return tag == ancestor or tag.startswith(f"{ancestor}/")
