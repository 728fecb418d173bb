"""Write the figures of strategies.md: examples/small_vision.py, exported with each strategy.

python docs/make_strategies.py
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import modelexport
from generated import DOCS, between_marks, write
from modelexport.modules.record import Method
from modelexport.source.example_inputs import InputRequest, make_example_inputs
from modelexport.source.load import load_source

MODEL = DOCS.parent / "examples" / "small_vision.py"
SEED = 0


def pages() -> dict[Path, str]:
    """Return the page with its figures."""
    page = DOCS / "strategies.md"
    return {page: between_marks(page.read_text(), "figures", _figures())}


def _figures() -> str:
    source = load_source(f"{MODEL}:make_model")
    inputs = make_example_inputs(source, InputRequest(), SEED).inputs
    columns = {}
    for strategy in modelexport.ExportStrategy:
        with tempfile.TemporaryDirectory() as folder:
            report = modelexport.export_model(
                source.model, inputs, Path(folder) / "m.onnx", strategy
            )
            verified = modelexport.verify(source.model, inputs, report.onnx_path)
            columns[strategy.value] = _column(report, verified.outcomes)
    columns = {name: columns[name] for name in ("auto", "fx", "htp", "usage_based")}
    titles = next(iter(columns.values()))
    lines = [
        f"| | {' | '.join(f'`{name}`' for name in columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    return "\n".join(
        [*lines, *(f"| {row} | {' | '.join(c[row] for c in columns.values())} |" for row in titles)]
    )


def _column(report: modelexport.ExportReport, outcomes: dict[str, int]) -> dict[str, str]:
    facts = report.hierarchy.statistics
    untagged = Counter(node.op_type for node in report.hierarchy.nodes.values() if node.tag is None)
    untagged_text = ", ".join(
        f"{name} {count}"
        for name, count in sorted(untagged.items(), key=lambda item: (-item[1], item[0]))
    )
    return {
        "strategy and exporter": f"{report.strategy}, {report.exporter}",
        "nodes": str(facts.nodes),
        "nodes with a tag": f"{facts.tagged_nodes} ({facts.coverage:.0%})",
        **{f"by `{method}`": str(facts.methods.get(method.value, 0)) for method in Method},
        "without a tag": untagged_text or "none",
        "tags": str(facts.tags),
        **{
            f"modules: `{status}`": str(facts.module_status.get(status, 0))
            for status in ("nodes", "absorbed", "unused")
        },
        "calls whose results agree with PyTorch": str(outcomes.get("agrees", 0)),
        "calls whose results are not in the file": str(
            sum(outcomes.values()) - outcomes.get("agrees", 0)
        ),
    }


if __name__ == "__main__":
    write(pages())
