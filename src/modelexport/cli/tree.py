"""Draw the module tree of a file, and count its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from modelexport.cli.console import COMPLETE, line, plain_table
from modelexport.errors import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelexport.analysis.outline import TreeModule

_MOST_LINES = 60
"""The most lines of a tree on a screen."""
_STATUS_TEXT = {"nodes": "with nodes", "absorbed": "absorbed", "unused": "unused"}
ABSORBED_TEXT = "no nodes of its own (folded, fused or identity)"
"""What the status `absorbed` means."""
_NUMBERS = {
    *("nodes", "parameters", "stored", "ms", "own", "fused", "calls"),
    *("params", "flop", "gflops", "before ms", "after ms", "ratio"),
}
"""The columns of numbers, which are aligned to the right."""
_BAR = 6


def module_counts(
    modules: Mapping[str, TreeModule], counts: Mapping[str, int]
) -> Iterator[RenderableType]:
    """Describe how many modules there are, and what a newcomer has to know to read their tree.

    Args:
        modules: The modules by path.
        counts: How many of them have each status.
    """
    from modelexport.modules.tags import count_hidden_by_default

    status = ", ".join(f"{counts.get(key, 0):,} {text}" for key, text in _STATUS_TEXT.items())
    yield line(f"{plural(len(modules), 'module')}: {status}", 2)
    if counts.get("absorbed"):
        yield line(f"absorbed: {ABSORBED_TEXT}", 4)
    hidden = count_hidden_by_default(
        {path: (module.class_, module.tag is not None) for path, module in modules.items()}
    )
    if 2 * hidden > len(modules) - 1:  # most of those below the root, which is always shown
        yield line(
            f"hidden: {plural(hidden, 'torch.nn module')}; export with --torch-nn all to show them",
            4,
        )


def bar(share: float) -> str:
    """Draw a share, from 0 to 1, as a bar with its percentage."""
    full = round(_BAR * share)
    return "█" * full + "░" * (_BAR - full) + f" {share:4.0%}"


def module_tree(
    modules: Mapping[str, TreeModule],
    collapse: bool = True,
    where: str = f"{COMPLETE} has them all",
    /,
    **columns: Callable[[str], str],
) -> Iterator[RenderableType]:
    """Draw the shown modules as a tree.

    Args:
        modules: The modules by path.
        collapse: Whether equal siblings share a line.
        where: What to say of the lines that are left out.
        columns: Titles, each with a function that returns the text for a module path.
    """
    from modelexport.analysis.outline import outline, shorten

    whole = outline(modules, collapse)
    lines = shorten(whole, _MOST_LINES)
    titles = {"module": False, **{title: title in _NUMBERS for title in columns}}
    rows = [(row.text, *(cell(row.paths[0]) for cell in columns.values())) for row in lines]
    yield plain_table(titles, rows)
    left_out = len(whole) - len(lines)
    if left_out:
        yield line(f"… and {plural(left_out, 'deeper line')}; {where}")
