"""Make any transformers configuration small, by the names and values of its fields.

Nothing here knows an architecture. All widths are divided by the same number, so that they still
divide each other; counts of layers, tokens and positions are capped. If the result does not build
or run, the next recipe shrinks less.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_LAYERS = re.compile(r"(layers?|depths?|blocks|repeats)$")
_VOCABULARY = re.compile(r"vocab_size")
_POSITIONS = re.compile(r"positions?(_embeddings)?$|^n_ctx$|^seq_length$|max_.*len")
_IMAGE = re.compile(r"(image|img|input|crop)_size$")
_EXPERTS = re.compile(r"experts$")
_CHOSEN = re.compile(r"experts_per_tok|top_?k$|moe_k$")
_EXPERT_GROUPS = re.compile(r"^(n|topk)_group$")
_HEADS = re.compile(r"heads?$")
_HEAD_WIDTH = re.compile(r"head_dim$|^kv_channels$|^d_kv$")
_WINDOW = re.compile(r"window(_size)?$")
_TOKEN = re.compile(r"token(_id|_index|_ids|_type_idx)$|_id$|_idx$")
_KEPT = re.compile(
    r"rate$|channels?$|kernel|stride|theta|seed|version|labels|ratio|groups?$|frames?$|levels$"
)

WORDS = 160
_WIDE = 32
_EVEN = 16


class Recipe(NamedTuple):
    """How far to shrink: the divisor of widths, the most layers and heads, and whether images too.

    With fewer heads, widths are rounded to a multiple that most numbers of heads divide, and the
    width of a head stays.
    """

    divisor: int
    layers: int | None
    heads: int | None = None
    images: bool = False


RECIPES = (
    Recipe(16, 2, images=True),
    Recipe(16, 2),
    Recipe(16, 2, heads=2, images=True),
    Recipe(8, 2),
    Recipe(32, 2, heads=2),
    Recipe(64, 2, heads=2),
    Recipe(16, None),
    Recipe(4, 2),
    Recipe(8, None),
    Recipe(2, 2),
    Recipe(1, 2),
    Recipe(1, None),
)


def shrink_config(config: Any) -> Iterator[Any]:
    """Shrink a configuration by each recipe, from the strongest; skip those that fail."""
    for recipe in RECIPES:
        try:
            yield type(config).from_dict(_shrink_fields(config.to_dict(), recipe))
        except Exception:
            continue


def _shrink_fields(fields: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Shrink every field of a configuration."""
    counts = {value for name, value in fields.items() if _LAYERS.search(name) and _is_count(value)}
    small = {name: _shrink(name, value, fields, recipe, counts) for name, value in fields.items()}
    words = next(
        (value for name, value in small.items() if _VOCABULARY.search(name) and _is_count(value)),
        None,
    )
    return small if words is None else _move_token_ids(small, words)


def _shrink(name: str, value: Any, fields: dict[str, Any], recipe: Recipe, counts: set[int]) -> Any:
    """Shrink one field by its name; `counts` are the numbers of layers before."""
    if isinstance(value, dict):
        return (
            _shrink_fields(value, recipe) if all(isinstance(key, str) for key in value) else value
        )
    if isinstance(value, list):
        return _shrink_list(name, value, fields, recipe, counts)
    if not _is_count(value) or _TOKEN.search(name) or _KEPT.search(name):
        return value
    if _VOCABULARY.search(name):
        return min(value, WORDS)
    if _LAYERS.search(name):
        return value if recipe.layers is None else min(value, recipe.layers)
    if _IMAGE.search(name):
        return _image_size(value, fields) if recipe.images else value
    if _POSITIONS.search(name):
        return min(value, 64)
    if _WINDOW.search(name):
        return min(value, 8)
    if _EXPERT_GROUPS.search(name):
        return 1
    if _HEADS.search(name) or _HEAD_WIDTH.search(name):
        return _head(name, value, recipe)
    if _EXPERTS.search(name):
        return min(value, 4)
    if _CHOSEN.search(name):
        return min(value, 2)
    return _shrink_width(value, recipe)


def _shrink_list(
    name: str, value: list[Any], fields: dict[str, Any], recipe: Recipe, counts: set[int]
) -> list[Any]:
    """Shrink a field that is a list; one with an entry for each layer gets shorter."""
    if recipe.layers is not None and len(value) > recipe.layers and len(value) in counts:
        value = _one_of_each(value)[: recipe.layers]
    if _IMAGE.search(name) and all(map(_is_count, value)):
        return [_image_size(size, fields) for size in value] if recipe.images else value
    if _LAYERS.search(name) and all(map(_is_count, value)):
        return value if recipe.layers is None else [min(item, 1) for item in value]
    if _KEPT.search(name) or _TOKEN.search(name):
        return value
    return [_shrink_item(item, recipe) for item in value]


def _shrink_item(item: Any, recipe: Recipe) -> Any:
    """Shrink an entry of a list."""
    if isinstance(item, dict):
        return _shrink_fields(item, recipe)
    if not _is_count(item):
        return item
    # A norm over fewer than eight channels makes values that many tensors share.
    return max(_shrink_width(item, recipe), min(item, 8))


def _one_of_each(values: list[Any]) -> list[Any]:
    """Put one of each value in front, so that a shortened list still has different ones."""
    first = [index for index, value in enumerate(values) if value not in values[:index]]
    others = [index for index in range(len(values)) if index not in first]
    return [values[index] for index in (*first, *others)]


def _image_size(value: int, fields: dict[str, Any]) -> int:
    """Shrink the side of an image to at least two patches."""
    patch = fields.get("patch_size")
    patch = patch[0] if isinstance(patch, list) and patch else patch
    smallest = 2 * patch if _is_count(patch) else 64
    return min(value, max(32, smallest))


def _head(name: str, value: int, recipe: Recipe) -> int:
    """Shrink the number of heads or the width of a head."""
    if recipe.heads is not None:
        return min(value, recipe.heads) if _HEADS.search(name) else value
    return value if _HEADS.search(name) else _shrink_width(value, recipe)


def _shrink_width(value: int, recipe: Recipe) -> int:
    """Shrink a width; small ones stay."""
    if value < _WIDE:
        return value
    narrow = max(2, value // recipe.divisor)
    return narrow if recipe.heads is None else -(-narrow // _EVEN) * _EVEN


def _move_token_ids(fields: dict[str, Any], words: int) -> dict[str, Any]:
    """Move token ids outside the smaller vocabulary to its end, each to another id."""
    free = words - 1
    moved = dict(fields)
    for name, value in fields.items():
        if _TOKEN.search(name) and _is_count(value) and value >= words:
            moved[name] = free
            free -= 1
    return moved


def _is_count(value: object) -> bool:
    """Return whether a value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
