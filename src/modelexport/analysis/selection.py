"""Chooses nodes by what people type: a tag, the beginning of one, a glob, a module path, or `auxiliary`."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable

from modelexport.attribution.evidence import AUXILIARY
from modelexport.hierarchy.tree import is_within
from modelexport.tagged.codec import NodeTag
from modelexport.tagged.sidecar import ModuleRecord

AUXILIARY_WORD = "auxiliary"
_SUGGESTIONS = 5
_GLOB = re.compile(r"[*?\[]")


class Selection:
    """Which nodes and modules a text stands for; all of them where there is no text."""

    def __init__(self, text: str | None, tags: Iterable[str], modules: dict[str, ModuleRecord]) -> None:
        self.text = text
        self._is_glob = False
        self._tags = sorted({*tags, *(record.tag for record in modules.values() if record.tag is not None)})
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
        if any(tag_within(tag, whole) for tag in self._tags):
            return (lambda tag: tag_within(tag, whole)), None
        if _GLOB.search(text):
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
        return self._matched(tag.hierarchy_path) or (self._is_glob and self._matched(tag.hierarchy_module))

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


def tag_within(tag: str, ancestor: str) -> bool:
    """Whether a tag is this one or lies below it."""
    return tag == ancestor or tag.startswith(f"{ancestor}/")
