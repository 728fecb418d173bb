"""Tags: which modules are shown, and the readable name of each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type, plural
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.modules.tree import ModuleInfo, ModuleTree
from modelexport.option_values import spell_option

DEFAULT_TORCH_NN = (
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "LayerNorm",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "Embedding",
)
ALL = "all"
NONE = "none"

_BREAKS_A_TAG = re.compile(r"[%/\s\x00-\x1f\x7f-\x9f]")
_BREAKS_A_CLASS = re.compile(r"[%/.\s\x00-\x1f\x7f-\x9f]")


class TagPolicy(msgspec.Struct, frozen=True):
    """Which modules are shown in tags. The root always is."""

    torch_nn: tuple[str, ...] | str = DEFAULT_TORCH_NN
    """The names of the torch classes that are shown, or `all` or `none`."""
    include: tuple[str, ...] = ()
    """Globs on qualified class names and module paths: such modules are shown."""
    exclude: tuple[str, ...] = ()
    """The same for modules that are not shown; wins over `include`."""
    max_depth: int | None = None
    """The greatest number of segments of a tag."""

    def shows(self, module: ModuleInfo) -> bool:
        """Return whether a module is shown, as far as its class and path decide."""
        if _matches(module, self.exclude):
            return False
        if _matches(module, self.include) or not module.from_torch:
            return True
        if isinstance(self.torch_nn, str):
            return self.torch_nn == ALL
        return module.class_name in self.torch_nn


def make_policy(
    torch_nn_exceptions: Sequence[str] | str | None = None,
    include: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str | None = None,
    max_depth: int | None = None,
) -> TagPolicy:
    """Build a policy from the arguments of `export_model`.

    Args:
        torch_nn_exceptions: Class names, as a list or separated by commas; `all` or `none`.
        include: Globs, in the same forms.
        exclude: Globs, in the same forms.
        max_depth: The greatest number of segments of a tag.

    Raises:
        ArgumentTypeError: An argument is of the wrong type.
        ArgumentError: `max_depth` is below 1.
    """
    if max_depth is not None and (isinstance(max_depth, bool) or not isinstance(max_depth, int)):
        raise ArgumentTypeError(f"max_depth must be a whole number, got {describe_type(max_depth)}")
    if max_depth is not None and max_depth < 1:
        hint = "1 keeps only the root, 2 its children too"
        name = spell_option("max_depth")
        raise ArgumentError(f"{name} must be 1 or more, got {max_depth}", hint=hint)
    torch_nn: tuple[str, ...] | str
    if torch_nn_exceptions is None:
        torch_nn = DEFAULT_TORCH_NN
    elif isinstance(torch_nn_exceptions, str) and torch_nn_exceptions in (ALL, NONE):
        torch_nn = torch_nn_exceptions
    else:
        torch_nn = _names(torch_nn_exceptions, "torch_nn_exceptions")
    return TagPolicy(torch_nn, _names(include, "include"), _names(exclude, "exclude"), max_depth)


def _names(value: Sequence[str] | str | None, argument: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    names = tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(f"{argument} must hold names", hint='for example ["LayerNorm"]')
    return names


def unmatched_names(policy: TagPolicy, classes: Mapping[str, str]) -> dict[str, list[str]]:
    """List the names and globs of a policy that match no module.

    Args:
        policy: The policy.
        classes: The qualified class of each module by its path.

    Returns:
        The names and globs by option: `torch_nn_exceptions`, `include` and `exclude`.
    """
    names = policy.torch_nn
    own = () if isinstance(names, str) or names is DEFAULT_TORCH_NN else names
    known = {name.rpartition(".")[2] for name in classes.values()}
    idle = {"torch_nn_exceptions": [name for name in own if name not in known]}
    for option, globs in (("include", policy.include), ("exclude", policy.exclude)):
        idle[option] = [
            glob
            for glob in globs
            if not any(_is_named(name, path, glob) for path, name in classes.items())
        ]
    return idle


def count_hidden_by_default(modules: Mapping[str, tuple[str, bool]]) -> int:
    """Count the modules that are hidden because torch defines their class.

    Args:
        modules: The qualified class of each module by its path, and whether it is shown.

    Returns:
        Their number; 0 if other options than the default ones chose the shown modules.
    """
    shown_classes = {
        class_: TagPolicy().shows(ModuleInfo("", class_, (), (), (), ()))
        for class_ in {class_ for class_, _ in modules.values()}
    }
    if any(shown != (not path or shown_classes[name]) for path, (name, shown) in modules.items()):
        return 0
    return sum(not shown for _, shown in modules.values())


def _matches(module: ModuleInfo, globs: tuple[str, ...]) -> bool:
    return any(_is_named(module.qualified_class, module.path, glob) for glob in globs)


def _is_named(qualified_class: str, path: str, glob: str) -> bool:
    return fnmatchcase(qualified_class, glob) or fnmatchcase(path, glob)


def assign_tags(tree: ModuleTree, policy: TagPolicy) -> dict[str, str | None]:
    """Assign a tag to every shown module. Tags and shown modules are one-to-one.

    Args:
        tree: The modules.
        policy: Which of them are shown.

    Returns:
        The tag of every module by its path; None for a hidden one.
    """
    shown_parent, shown = _find_shown(tree, policy)
    siblings: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in shown:
        siblings[shown_parent[path], tree[path].class_name].append(path)
    tags: dict[str, str | None] = dict.fromkeys(tree, None)
    tags[""] = f"/{_encode(tree[''].class_name, _BREAKS_A_CLASS)}"
    suffixes: dict[str, str] = {}
    for (parent, _), group in siblings.items():
        suffixes.update(_suffixes(parent, group))
    for path in shown:
        segment = _encode(tree[path].class_name, _BREAKS_A_CLASS)
        suffix = suffixes[path]
        tags[path] = f"{tags[shown_parent[path]]}/{segment}{'.' if suffix else ''}{suffix}"
    return tags


def nearest_tags(tree: ModuleTree, tags: dict[str, str | None]) -> dict[str, str]:
    """Return, by path, the tag that a module's nodes have: its own or its nearest ancestor's."""
    carried: dict[str, str] = {}
    for path in tree:
        own = tags[path]
        carried[path] = own if own is not None else carried[tree.parent(path) or ""]
    return carried


def _find_shown(tree: ModuleTree, policy: TagPolicy) -> tuple[dict[str, str], list[str]]:
    """Return the nearest shown ancestor of each module, and those shown below the root in order."""
    nearest: dict[str, str] = {}
    depth: dict[str, int] = {"": 1}
    shown = []
    for path in filter(None, tree):
        parent = tree.parent(path) or ""
        nearest[path] = parent if parent in depth else nearest[parent]
        fits = policy.max_depth is None or depth[nearest[path]] < policy.max_depth
        if fits and policy.shows(tree[path]):
            depth[path] = depth[nearest[path]] + 1
            shown.append(path)
    return nearest, shown


def _suffixes(parent: str, group: list[str]) -> dict[str, str]:
    """Find the shortest tail of each path that no other of these same-class siblings ends in."""
    parts = {path: path[len(parent) + 1 if parent else 0 :].split(".") for path in group}
    if len(group) == 1 and not parts[group[0]][-1].isdecimal():
        return {group[0]: ""}
    suffixes: dict[str, str] = {}
    pending = group
    length = 1
    # A tail must be unique in the whole group, also among those whose suffix is known already.
    while pending:
        tails: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for path in group:
            tails[tuple(parts[path][-length:])].append(path)
        undecided = []
        for path in pending:
            tail = tuple(parts[path][-length:])
            if len(tails[tail]) == 1 or len(parts[path]) <= length:
                suffixes[path] = ".".join(_encode(part, _BREAKS_A_TAG) for part in tail)
            else:
                undecided.append(path)
        pending = undecided
        length += 1
    return suffixes


def _encode(text: str, breaking: re.Pattern[str]) -> str:
    def escape(match: re.Match[str]) -> str:
        return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))

    return breaking.sub(escape, text)


def describe_lost_tags(
    records: Mapping[str, ModuleRecord], node_tags: Collection[NodeTag | None]
) -> str | None:
    """Say that nodes have lost their tags, if so: what is found by tag is incomplete."""
    root = records.get("")
    tagged = sum(tag is not None for tag in node_tags)
    if root is None or tagged >= min(root.nodes, len(node_tags)):
        return None
    return (
        f"only {tagged:,} of {plural(len(node_tags), 'node')} have a tag, and {root.nodes:,} had "
        "one at export: modelexport retag carries the map over to a file that another tool made"
    )
