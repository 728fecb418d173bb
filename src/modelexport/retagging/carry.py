"""The module records of a retagged file: those of the original, for the nodes that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from modelexport.modules.record import Attribution, ModuleRecord, ModuleStatus
from modelexport.modules.tree import subtree_totals
from modelexport.retagging.anchors import Anchors, Side
from modelexport.retagging.fill import Modules
from modelexport.retagging.sketch import SketchIndex


def carry_records(
    modules: Modules, answers: Sequence[Attribution], results: Mapping[str, str]
) -> dict[str, ModuleRecord]:
    """Update the module records of the original for a changed file.

    Args:
        modules: The modules of the original file.
        answers: The module of each node of the changed file.
        results: The name of each value that a module returned, by its original name.

    Returns:
        The records by module path.
    """
    nodes = subtree_totals(Counter(answer.path for answer in answers), modules.ancestry)
    records = {}
    for path, record in modules.records.items():
        ran = record.status != ModuleStatus.UNUSED
        status = ModuleStatus.ABSORBED if ran else ModuleStatus.UNUSED
        records[path] = msgspec.structs.replace(
            record,
            nodes=nodes[path],
            status=str(ModuleStatus.NODES if nodes[path] else status),
            results=tuple(
                tuple(None if name is None else results.get(name) for name in call)
                for call in record.results
            ),
        )
    return records


def find_results(
    original: Side, changed: Side, anchors: Anchors, records: Iterable[ModuleRecord]
) -> dict[str, str]:
    """Find the values that modules returned among those of a changed file.

    Args:
        original: The original file.
        changed: The changed file.
        anchors: The anchors of the changed file.
        records: The module records of the original.

    Returns:
        The name in the changed file by the name in the original, of those that it still has.
    """
    wanted = {name for record in records for call in record.results for name in call if name}
    equal: dict[str, list[str]] = {}
    for name, origin in anchors.values.items():
        if origin in wanted:
            equal.setdefault(origin, []).append(name)
    index = SketchIndex(changed.sketches)
    stored = {*changed.graph.inputs, *changed.graph.initializers}
    results = {}
    for name in wanted:
        own = original.sketches.get(name)
        candidates = equal.get(name, [])
        if own is not None:
            candidates = [each for each in candidates if each in changed.sketches]
        if own is not None:
            candidates = [*candidates, *index.find(own)]
        is_kept = name in changed.graph.producer or name in stored
        if is_kept and (own is None or name in candidates or not candidates):
            results[name] = name
            continue
        shaped = [
            each for each in candidates if own is None or changed.sketches[each].shape == own.shape
        ]
        if shaped:
            results[name] = shaped[0]
    return results
