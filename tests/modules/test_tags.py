"""The tag grammar and the policy, on trees made by hand and on real modules."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import modelexport
from modelexport.capture.module_tree import read_module_tree
from modelexport.errors import ArgumentError
from modelexport.modules.tags import assign_tags, make_policy, nearest_tags
from modelexport.modules.tree import MOST_ALIASES, ModuleInfo, ModuleTree
from zoo import ZOO, Block, OddKeys

pytestmark = pytest.mark.must


def tags_of(model: nn.Module, **policy: object) -> dict[str, str | None]:
    return assign_tags(read_module_tree(model), make_policy(**policy))  # type: ignore[arg-type]


def tree_of(classes: dict[str, str]) -> ModuleTree:
    """A tree from path: class, for shapes that would be tedious as modules."""
    modules = {
        path: ModuleInfo(
            path,
            cls,
            tuple(
                p[len(path) + 1 if path else 0 :]
                for p in classes
                if p and p.rpartition(".")[0] == path
            ),
            (),
            (),
            (),
        )
        for path, cls in classes.items()
    }
    return ModuleTree(modules, {})


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(8)


def test_numeric_suffix_always_even_alone() -> None:
    assert tags_of(Stack())["layer.0"] == "/Stack/Block.0"


def test_no_suffix_where_the_class_is_enough() -> None:
    assert tags_of(Stack())["norm"] == "/Stack/LayerNorm"
    assert tags_of(Stack())["layer.0.norm"] == "/Stack/Block.0/LayerNorm"


def test_torch_classes_stay_out_except_the_exceptions() -> None:
    tags = tags_of(Stack())
    assert tags["layer"] is None
    assert tags["layer.0.fc"] is None
    assert nearest_tags(read_module_tree(Stack()), tags)["layer.0.fc"] == "/Stack/Block.0"


def test_same_class_siblings_get_the_shortest_telling_tail() -> None:
    tree = tree_of(
        {
            "": "m.Net",
            "layer1": "torch.nn.Sequential",
            "layer1.0": "m.BasicBlock",
            "layer1.1": "m.BasicBlock",
            "layer2": "torch.nn.Sequential",
            "layer2.0": "m.BasicBlock",
            "enc": "m.Stack",
            "dec": "m.Stack",
            "ln": "torch.nn.LayerNorm",
            "ln_1": "torch.nn.LayerNorm",
        }
    )
    tags = assign_tags(tree, make_policy())
    assert tags["layer1.0"] == "/Net/BasicBlock.layer1.0"
    assert tags["layer2.0"] == "/Net/BasicBlock.layer2.0"
    assert tags["layer1.1"] == "/Net/BasicBlock.1"
    assert (tags["enc"], tags["dec"]) == ("/Net/Stack.enc", "/Net/Stack.dec")
    assert (tags["ln"], tags["ln_1"]) == ("/Net/LayerNorm.ln", "/Net/LayerNorm.ln_1")


def test_characters_that_would_break_a_tag_are_encoded() -> None:
    tags = tags_of(OddKeys())
    assert tags["parts.a/b"] == "/OddKeys/Block.a%2Fb"
    assert tags["parts.a b"] == "/OddKeys/Block.a%20b"
    assert tags["parts.größe"] == "/OddKeys/Block.größe"
    assert tags["parts.a%2Fb"] == "/OddKeys/Block.a%252Fb"


def test_policy_all_none_and_a_list() -> None:
    assert (
        tags_of(Stack(), torch_nn_exceptions="all")["layer.0.fc"]
        == "/Stack/ModuleList/Block.0/Linear"
    )
    assert tags_of(Stack(), torch_nn_exceptions="none")["norm"] is None
    only = tags_of(Stack(), torch_nn_exceptions=["Linear"])
    assert only["norm"] is None
    assert only["layer.0.fc"] == "/Stack/Block.0/Linear"


def test_include_and_exclude_globs() -> None:
    tags = tags_of(Stack(), include=["torch.nn.modules.linear.*"], exclude=["layer.0.norm"])
    assert tags["layer.0.fc"] == "/Stack/Block.0/Linear"
    assert tags["layer.0.norm"] is None
    assert tags_of(Stack(), exclude="*")[""] == "/Stack", "the root is always shown"


def test_max_depth_counts_segments() -> None:
    tags = tags_of(Stack(), max_depth=2)
    assert tags["layer.0"] == "/Stack/Block.0"
    assert tags["layer.0.norm"] is None
    assert [tag for tag in tags_of(Stack(), max_depth=1).values() if tag] == ["/Stack"]
    with pytest.raises(ArgumentError, match="max_depth"):
        make_policy(max_depth=0)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("torch_nn", [None, "all", "none"])
def test_tags_are_one_to_one(name: str, torch_nn: str | None) -> None:
    tags = [
        tag
        for tag in tags_of(ZOO[name]()[0], torch_nn_exceptions=torch_nn).values()
        if tag is not None
    ]
    assert len(tags) == len(set(tags))
    for tag in tags:
        assert tag.startswith("/")
        assert not any(character.isspace() for character in tag)
        assert tag.rpartition("/")[0] in ("", *tags), "the parent of a tag is a tag"


names = st.text(st.sampled_from("ab01/ %_é"), min_size=1, max_size=3)


@given(
    st.recursive(
        st.just({}), lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=25
    ),
    st.data(),
)
def test_any_tree_has_one_to_one_tags(shape: dict[str, object], data: st.DataObject) -> None:
    """Whatever modules are called and however they nest, no two share a tag."""

    def build(children: dict[str, object]) -> nn.Module:
        cls = data.draw(st.sampled_from([Holder, Keeper, nn.ModuleDict, nn.LayerNorm]))
        module = cls(2) if cls is nn.LayerNorm else cls()
        for name, below in children.items():
            module.add_module(name, build(below))  # type: ignore[arg-type]
        return module

    tags = [tag for tag in tags_of(build(shape)).values() if tag is not None]
    assert len(tags) == len(set(tags))


class Holder(nn.Module):
    pass


class Keeper(nn.Module):
    pass


def test_aliases_and_parameters() -> None:
    model, _ = ZOO["same_object_two_names"]()
    tree = read_module_tree(model)
    assert tree["first"].aliases == ("second",)
    assert tree["first.fc"].aliases == ("second.fc",)
    assert tree.canonical("second.norm") == "first.norm"
    assert "second" not in tree.modules
    assert tree["first.fc"].direct_parameters == ("weight", "bias")
    assert tree.subtree_parameters()["first"] == (
        "fc.bias",
        "fc.weight",
        "norm.bias",
        "norm.weight",
    )
    assert set(tree.subtree_parameters()[""]) == {name for name, _ in model.named_parameters()}


def test_forward_arguments() -> None:
    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, *rest: int, mask: int = 0, **more: int) -> torch.Tensor:
            return x

    assert read_module_tree(Takes())[""].forward_args == ("x", "*rest", "mask", "**more")


def test_a_module_inside_itself_is_read_once() -> None:
    model = Stack()
    model.layer[0].up = model
    assert read_module_tree(model)[""].aliases == ()
    assert len(read_module_tree(model)) == 6


class Doubled(nn.Module):
    """Holds one module under two names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.a = inner
        self.b = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def nested(levels: int) -> nn.Module:
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(levels):
        model = Doubled(model)
    return model


@pytest.mark.regression
def test_modules_shared_at_many_levels_are_entered_once() -> None:
    tree = read_module_tree(nested(200))
    assert len(tree) == 201
    innermost = tree[".".join("a" * 200)]
    assert len(innermost.aliases) == MOST_ALIASES
    assert innermost.more_aliases == 2**53 - 1 - MOST_ALIASES - 1
    tree = read_module_tree(nested(18))
    innermost = tree[".".join("a" * 18)]
    assert innermost.more_aliases == 2**18 - 1 - MOST_ALIASES
    unlisted = ".".join("ba" * 9)
    assert unlisted not in innermost.aliases
    assert tree.canonical(unlisted) == innermost.path
    assert tree.owner(f"{unlisted}.weight") == innermost.path
    assert tree.canonical(f"{unlisted}.no") is None
    assert tree.owner("a.weight") is None


@pytest.mark.regression
def test_a_cut_list_of_aliases_says_so(tmp_path: Path) -> None:
    report = modelexport.export_model(
        nested(8), torch.ones(1, 2), tmp_path / "m.onnx", strategy="htp"
    )
    records = report.hierarchy.modules
    assert records[".".join("a" * 8)].more_aliases == 2**8 - 1 - MOST_ALIASES
    assert "more_aliases" not in msgspec.to_builtins(records["a.a"])
    assert modelexport.extract(
        report.onnx_path, ".".join("ab" * 4), tmp_path / "e.onnx"
    ).record.module == (".".join("a" * 8))


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6))
def test_aliases_are_all_other_ways_to_a_module(children: list[list[int]]) -> None:
    modules = [nn.Module() for _ in range(len(children))]
    for number, below in enumerate(children):
        for place, other in enumerate(below):
            if number < other < len(modules):
                modules[number].add_module(f"m{place}", modules[other])
    ways: dict[int, list[str]] = {}
    for name, module in modules[0].named_modules(remove_duplicate=False):
        ways.setdefault(id(module), []).append(name)
    tree = read_module_tree(modules[0])
    assert list(tree) == [name for name, _ in modules[0].named_modules()]
    for path in tree:
        first, *rest = ways[id(modules[0].get_submodule(path))]
        assert path == first
        assert tree[path].aliases == tuple(sorted(rest))
        assert tree[path].more_aliases == 0
