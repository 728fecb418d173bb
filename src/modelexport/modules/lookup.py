"""Find modules by what people type: a tag, a module path, an alias or a glob."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type, plural
from modelexport.modules.record import AUXILIARY, ModuleRecord, NodeTag
from modelexport.modules.tree import is_within, resolve_alias

AUXILIARY_WORD = "auxiliary"
"""Selects the auxiliary nodes, instead of a module."""

_GLOB = re.compile(r"[*?\[]")
_MAX_SUGGESTIONS = 5


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
        """Whether a module is meant.

        Args:
            path: The path of the module.
            tag: Its tag, or that of the nearest shown module above it.

        Returns:
            Whether the text names the module or one above it, or the glob matches path or tag.
        """
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
        tags: The tag of each module by its path; None for a hidden one.
        aliases: The path of a module by each of its aliases.
        node_tags: Further tags, those of nodes in a file whose module records are lost.
    """

    def __init__(
        self,
        tags: Mapping[str, str | None],
        aliases: Mapping[str, str],
        node_tags: Iterable[str] = (),
    ) -> None:
        self.tags = tags
        self._aliases = aliases
        self._path_of = {tag: path for path, tag in tags.items() if tag is not None}
        self._all_tags = sorted({*self._path_of, *node_tags})

    def resolve(self, text: str) -> Resolution:
        """Resolve what a user typed; every command that takes a module or a pattern uses this.

        Args:
            text: A module path, a tag, an alias, a glob on paths and tags, or the beginning of a
                tag; the first of them that fits.

        Returns:
            What it stands for.

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
        """Find the one module that a text stands for.

        Args:
            text: What `resolve` takes, if it names one module.

        Returns:
            The module.

        Raises:
            ArgumentError: It names no module or several; the hint has the nearest names.
            ArgumentTypeError: It is not a text.
        """
        resolution = self.resolve(text)
        path = resolution.path
        if resolution.glob is not None:
            path = self._only_match(text, resolution.glob)
        if path is None:
            raise ArgumentError(f"no module is called {text!r}", hint=self._hint(text))
        return ModuleRef(path, self.tags.get(path))

    def _only_match(self, text: str, glob: re.Pattern[str]) -> str:
        matches = [
            path
            for path, tag in self.tags.items()
            if glob.match(path) or (tag is not None and glob.match(tag))
        ]
        if not matches:
            raise ArgumentError(f"no module matches {text!r}", hint=self._hint(text))
        if len(matches) > 1:
            named = ", ".join(path or "(root)" for path in matches[:_MAX_SUGGESTIONS])
            rest = len(matches) - _MAX_SUGGESTIONS
            more = f" and {rest} more" if rest > 0 else ""
            raise ArgumentError(
                f"{text!r} matches {plural(len(matches), 'module')}",
                hint=f"name one of {named}{more}",
            )
        return matches[0]

    def _hint(self, text: str) -> str:
        near = self.suggest(text)
        if not near:
            return "modelexport extract ONNX --list shows them all"
        return f"near it: {', '.join(near)}"

    def suggest(self, text: str) -> list[str]:
        """List the names that are most like a text which matches nothing.

        Args:
            text: What the user typed.

        Returns:
            Up to five tags where the text begins like a tag, else module paths, or tags where no
            path is near.
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

    def any_tags(self) -> list[str]:
        """List some tags, for a text that no name is like.

        Returns:
            Up to five tags.
        """
        return self._all_tags[:_MAX_SUGGESTIONS]


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
        self._names = ModuleNames(
            {path: record.tag for path, record in modules.items()}, list_aliases(modules), tags
        )
        self._resolution = self._names.resolve(text or "")

    def has_node(self, tag: NodeTag | None) -> bool:
        """Whether a node is selected.

        Args:
            tag: The tag of the node; None for a node without a tag.

        Returns:
            Whether it is.
        """
        if self.text is None or tag is None:
            return self.text is None
        if self.text == AUXILIARY_WORD:
            return tag.hierarchy_method in AUXILIARY
        return self._resolution.covers(tag.hierarchy_module, tag.hierarchy_path)

    def has_module(self, path: str, tag: str | None) -> bool:
        """Whether a module is selected.

        Args:
            path: The path of the module.
            tag: Its tag, or that of the nearest shown module above it.

        Returns:
            Whether it is.
        """
        if self.text is None or self.text == AUXILIARY_WORD:
            return self.text is None
        return self._resolution.covers(path, tag)

    def nearest(self) -> list[str]:
        """List the names that are most like the text, for one that selects nothing.

        Returns:
            The names; any tags where none is near.
        """
        if self.text is None:
            return []
        return self._names.suggest(self.text) or self._names.any_tags()


def list_aliases(modules: Mapping[str, ModuleRecord]) -> dict[str, str]:
    """Return the path of the module that each alias stands for.

    Args:
        modules: The module records by path.

    Returns:
        The paths by alias.
    """
    return {alias: path for path, record in modules.items() for alias in record.aliases}


def is_tag_within(tag: str, ancestor: str) -> bool:
    """Whether a tag is another one or lies below it.

    Args:
        tag: The tag.
        ancestor: The other tag.

    Returns:
        Whether it is or does.
    """
    return tag == ancestor or tag.startswith(f"{ancestor}/")
