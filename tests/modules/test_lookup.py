"""A module can be named in the same ways everywhere: by path, tag, alias or glob."""

from __future__ import annotations

import pytest

from modelexport.errors import ArgumentError, ArgumentTypeError
from modelexport.modules.lookup import ModuleIndex, Selection
from modelexport.modules.record import ModuleRecord, NodeTag

pytestmark = pytest.mark.sanity

TAGS = {
    "": "/Net",
    "encoder": "/Net/Encoder",
    "encoder.layers": None,
    "encoder.layers.0": "/Net/Encoder/Block.0",
    "encoder.layers.0.mix": None,
    "encoder.layers.1": "/Net/Encoder/Block.1",
    "head": "/Net/Head",
}
ALIASES = {"encoder": ("body",), "encoder.layers.1": ("last",)}


def record(path: str) -> ModuleRecord:
    tag = TAGS[path]
    below = path and f"{path}."
    children = [p[len(below) :] for p in TAGS if p.startswith(below) and p != path]
    return ModuleRecord(
        tag=tag,
        class_="net.Any",
        shown=tag is not None,
        status="nodes",
        calls=1,
        execution_order=0,
        forward_args=(),
        parameters=(),
        direct_parameters=(),
        children=tuple(name for name in children if "." not in name),
        aliases=ALIASES.get(path, ()),
        nodes=1,
    )


RECORDS = {path: record(path) for path in TAGS}
INDEX = ModuleIndex(RECORDS, ())


def node_tag(path: str) -> NodeTag:
    tag = INDEX.carried_tag(path)
    assert tag is not None
    return NodeTag((tag,), tag, 1, "scope", path)


NODE_TAGS = [node_tag(path) for path in TAGS]


def selected(text: str) -> set[str]:
    """The modules that a text selects; their nodes have to agree."""
    selection = Selection(text, {tag.hierarchy_path for tag in NODE_TAGS}, RECORDS)
    modules = {path for path in TAGS if selection.has_module(path, INDEX.carried_tag(path))}
    nodes = {tag.hierarchy_module for tag in NODE_TAGS if selection.has_node(tag)}
    assert nodes == modules
    return modules


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", ""),
        ("/Net", ""),
        ("encoder", "encoder"),
        ("/Net/Encoder", "encoder"),
        ("/Net/Encoder/", "encoder"),
        ("body", "encoder"),
        ("encoder.layers", "encoder.layers"),
        ("encoder.layers.0.mix", "encoder.layers.0.mix"),
        ("/Net/Encoder/Block.1", "encoder.layers.1"),
        ("last", "encoder.layers.1"),
        ("body.layers.1", "encoder.layers.1"),
    ],
)
def test_a_name_means_the_same_in_both(text: str, path: str) -> None:
    assert INDEX.find(text).path == path
    assert selected(text) == {p for p in TAGS if not path or p == path or p.startswith(f"{path}.")}


def test_a_glob_matches_paths_and_tags() -> None:
    assert INDEX.find("*.mix").path == "encoder.layers.0.mix"
    assert INDEX.find("/*/Head").path == "head"
    assert selected("encoder.layers.?") == {"encoder.layers.0", "encoder.layers.1"}
    assert selected("*Block.0") == {"encoder.layers.0", "encoder.layers.0.mix"}
    with pytest.raises(ArgumentError, match="matches 2 modules"):
        INDEX.find("encoder.layers.?")


def test_the_beginning_of_a_tag_selects() -> None:
    assert selected("/Net/Encoder/Bl") == {p for p in TAGS if p.startswith("encoder.layers.")}
    with pytest.raises(ArgumentError, match="no module is called"):
        INDEX.find("/Net/Encoder/Bl")


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("encodr", "encoder"),
        ("encoder.layers.7", "encoder.layers"),
        ("/Net/Encodr", "/Net/Encoder"),
        ("Block", "/Net/Encoder/Block.0"),
        ("*.mixx", "encoder.layers.0.mix"),
    ],
)
def test_what_matches_nothing_gets_the_nearest_names(text: str, near: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        INDEX.find(text)
    assert near in (caught.value.hint or "")
    assert selected(text) == set()
    assert near in Selection(text, (), RECORDS).nearest()


def test_no_text_selects_everything() -> None:
    selection = Selection(None, (), RECORDS)
    assert all(selection.has_module(path, None) for path in TAGS)
    assert selection.has_node(None)
    assert selection.nearest() == []


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="the module is an int"):
        INDEX.find(3)  # type: ignore[arg-type]


def test_without_records_the_tags_of_nodes_are_names() -> None:
    index = ModuleIndex({}, NODE_TAGS)
    assert index.find("/Net/Head").path == "head"
    assert index.find("encoder.layers.0.mix").path == "encoder.layers.0.mix"
    selection = Selection("/Net/Encoder", {tag.hierarchy_path for tag in NODE_TAGS}, {})
    assert [tag.hierarchy_module for tag in NODE_TAGS if selection.has_node(tag)] == [
        path for path in TAGS if path.startswith("encoder")
    ]
