"""Write docs/bert-tiny.md, the map of the demo's model: `python docs/make_bert_tiny.py [OUT]`.

All figures are read from the files of `modelexport demo`, with the public functions of the library.
tests/test_bert_tiny.py counts them again without these functions.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import modelexport
from modelexport.analysis.analyze import Analysis, ModuleFacts
from modelexport.cli.main import main as command_line

STRATEGIES = {"fx": "dynamo", "htp": "torchscript"}
Analyses = dict[str, Analysis]
COMPONENTS = (
    "embeddings",
    *(
        f"encoder.layer.{number}{part}"
        for number in (0, 1)
        for part in ("", ".attention", ".intermediate", ".output")
    ),
    "pooler",
)
PAGE = Path(__file__).with_name("bert-tiny.md")


class Component(NamedTuple):
    """One module with all modules below it.

    An edge is one use of a value: a node that consumes a value twice has two edges. `initializers`
    are those that the nodes consume, `stored_values` the number of elements in them, and
    `only_here` the elements that no node outside consumes.
    """

    operations: int
    operators: dict[str, int]
    inside: int
    entering: int
    leaving: int
    initializers: int
    stored_values: int
    only_here: int


def export_demo(folder: Path) -> dict[str, Path]:
    """Run the demo with each strategy, and return its files."""
    files = {}
    for strategy in STRATEGIES:
        with redirect_stdout(sys.stderr):
            failed = command_line(
                ["demo", str(folder / strategy), "--strategy", strategy], standalone_mode=False
            )
        if failed:
            raise SystemExit(failed)
        files[strategy] = folder / strategy / "bert-tiny.onnx"
    return files


def component(path: Path, module: str) -> Component:
    """Count the nodes, edges and initializers of one module."""
    graph = modelexport.load(path).graph
    members = set(modelexport.extract_module_subgraph(path, None, module).operations)
    facts = next(facts for facts in modelexport.analyze(path).modules if facts.module == module)
    produced = {name for node in graph.nodes if node.key in members for name in node.outputs}
    sizes = {
        tensor.name: math.prod(tensor.dims)
        for tensor in modelexport.load(path).proto.graph.initializer
    }
    consumed: set[str] = set()
    inside = entering = 0
    leaving = sum(name in produced for name in graph.outputs)
    for node in graph.nodes:
        if node.key in members:
            inside += sum(name in produced for name in node.inputs)
            entering += sum(name not in produced and name not in sizes for name in node.inputs)
            consumed.update(name for name in node.inputs if name in sizes)
        else:
            leaving += sum(name in produced for name in node.inputs)
    return Component(
        len(members),
        facts.operators,
        inside,
        entering,
        leaving,
        len(consumed),
        sum(sizes[name] for name in consumed),
        facts.stored_values,
    )


def page(files: dict[str, Path]) -> str:
    """Return the page for the files of the demo."""
    analyses = {strategy: modelexport.analyze(path) for strategy, path in files.items()}
    parts = (
        _opening(analyses),
        _shown(analyses),
        _hidden(analyses),
        _components(files),
        _operators(analyses),
    )
    return "\n".join(line for part in parts for line in part) + "\n"


def _opening(analyses: Analyses) -> Iterator[str]:
    fx, htp = analyses["fx"], analyses["htp"]
    shown = sum(facts.tag is not None for facts in fx.modules)
    versions = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "onnx"))
    yield from ("# Example: the map of a tiny BERT", "")
    yield from _text(
        "The model of `modelexport demo` is a BERT with two layers. This page lists its "
        f"{len(fx.modules)} modules, {shown} of them with a tag, as exported by each of torch's "
        f"exporters. `docs/make_bert_tiny.py` writes it ({versions}); `tests/test_bert_tiny.py` "
        "counts all figures again from the `doc_string` of each node."
    )
    yield from (
        "",
        "```sh",
        f"modelexport demo fx --strategy fx          # dynamo: {fx.totals.nodes} nodes",
        f"modelexport demo htp --strategy htp        # torchscript: {htp.totals.nodes} nodes",
        "modelexport analyze fx/bert-tiny.onnx --output-format detailed",
        "modelexport analyze fx/bert-tiny.onnx --filter-tag encoder.layer.0.attention",
        "modelexport extract htp/bert-tiny.onnx encoder.layer.0 layer0.onnx",
        "```",
        "",
    )
    yield from _explanations(fx, htp)


def _explanations(fx: Analysis, htp: Analysis) -> Iterator[str]:
    """Explain what stands out in the tables."""
    containers = [
        _code(facts) for facts in fx.modules if facts.tag is not None and facts.tag not in fx.by_tag
    ]
    more = Counter(htp.by_operator)
    more.subtract(fx.by_operator)
    rest = more.total() - more["Constant"] - more["Identity"]
    yield from _text(
        f"- **Tags without nodes of their own**: {', '.join(containers)} only call other modules. "
        f"The other {fx.totals.tags} tags are on nodes, in both files."
    )
    yield from _text(
        f"- **[Absorbed](glossary.md#absorbed)**: {len(fx.absorbed)} modules ran and have no "
        "nodes. They are dropouts, which are identities in evaluation mode."
    )
    yield from _text(
        f"- **Unused**: {len(fx.unused)} modules did not run. They are the dropouts of the "
        "attention, which passes their probability to torch's attention function instead."
    )
    yield from _text(
        f"- **{fx.totals.nodes} and {htp.totals.nodes} nodes**: torchscript writes "
        f"{more['Constant']} constants as nodes; dynamo writes them as initializers. torchscript "
        f"writes {more['Identity']} `Identity` nodes for parameters that are equal to another one, "
        "such as biases and norms of a new model. torchscript computes the attention mask in "
        f"{htp.modules[0].own_nodes} nodes of the root; dynamo folds it to "
        f"{fx.modules[0].own_nodes}. Without constants and identities, the difference is {rest} "
        "nodes ([operators](#operators))."
    )
    yield from _text(
        "- **The two layers differ by one node**, in both files. dynamo converts the mask to "
        "numbers once, in layer 0, and layer 1 consumes the result: the attention of layer 0 has "
        "one more outgoing edge. torchscript has one more `Identity` in layer 1, because the bias "
        "of its intermediate equals that of layer 0."
    )
    yield from _text(
        "- **The pooler** has a bias of zeros. dynamo removes it; torchscript consumes it through "
        "an `Identity`, and takes the index of the first token from an equal constant of the "
        "embeddings."
    )
    yield from _text(
        "- **Evidence**, such as [scope](glossary.md#scope): dynamo's nodes are tagged "
        f"{_list_counts(fx.by_method)}, torchscript's "
        f"{_list_counts(htp.by_method)}. torch records no scope for an `Identity` on a parameter, "
        "so it belongs to the module that consumes it."
    )


def _text(paragraph: str) -> list[str]:
    indent = "  " if paragraph.startswith("- ") else ""
    return textwrap.wrap(
        paragraph, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _version(name: str) -> str:
    """Return a version without its build tag, which differs between machines."""
    return importlib.metadata.version(name).partition("+")[0]


def _list_counts(counts: dict[str, int]) -> str:
    return " and ".join(f"by {method} ({count})" for method, count in counts.items())


def _shown(analyses: Analyses) -> Iterator[str]:
    pairs = [pair for pair in _pairs(analyses) if pair[0].tag is not None]
    yield from ("", f"## The {len(pairs)} modules with a tag", "")
    yield from _text(
        "**order** is the order of the first calls in PyTorch, of all modules, shown or hidden. "
        "**fx** and **htp** are the status in each file. **own** counts the nodes with this tag, "
        "including those of hidden modules; **all** also counts the tags below it."
    )
    yield ""
    rows: list[tuple[object, ...]] = []
    counts = [found.by_tag for found in analyses.values()]
    for pair in pairs:
        own = (by_tag.get(str(facts.tag), 0) for by_tag, facts in zip(counts, pair, strict=True))
        names = (f"`{pair[0].tag}`", _code(pair[0]), _class(pair[0]))
        rows.append(
            (_order(pair[0]), *names, *_status(pair), *own, *(facts.nodes for facts in pair))
        )
    rows.append(("", "sum", "", "", "", "", *(sum(by_tag.values()) for by_tag in counts), "", ""))
    titles = (
        "order",
        "tag",
        "module",
        "class",
        "fx",
        "htp",
        "own, fx",
        "own, htp",
        "all, fx",
        "all, htp",
    )
    yield from _table(titles, rows)


def _hidden(analyses: Analyses) -> Iterator[str]:
    yield from ("", "## The hidden modules", "")
    yield from _text(
        "Modules of torch's classes are hidden, except norms and embeddings "
        "([tags](tags.md#which-modules-are-shown)). A `ModuleList` is not called itself; it "
        "precedes the first module in it."
    )
    yield ""
    pairs = _pairs(analyses)
    tags = {pair[0].module: pair[0].tag for pair in pairs if pair[0].tag is not None}
    rows = []
    for pair in pairs:
        path = pair[0].module
        if path not in tags:
            above = max(
                (shown for shown in tags if not shown or path.startswith(f"{shown}.")), key=len
            )
            own = (facts.own_nodes for facts in pair)
            rows.append(
                (
                    _order(pair[0]),
                    f"`{path}`",
                    _class(pair[0]),
                    *_status(pair),
                    f"`{tags[above]}`",
                    *own,
                )
            )
    yield from _table(
        ("order", "module", "class", "fx", "htp", "tag of its nodes", "own, fx", "own, htp"), rows
    )


def _pairs(analyses: Analyses) -> list[tuple[ModuleFacts, ...]]:
    """Return the facts of each module in both files, in the order of the calls."""
    return list(zip(*(found.modules for found in analyses.values()), strict=True))


def _status(pair: tuple[ModuleFacts, ...]) -> Iterator[str]:
    return (facts.status for facts in pair)


def _order(facts: ModuleFacts) -> object:
    return "" if facts.execution_order is None else facts.execution_order


def _class(facts: ModuleFacts) -> str:
    return facts.class_.rpartition(".")[2]


def _code(facts: ModuleFacts) -> str:
    return f"`{facts.module}`" if facts.module else "(the model)"


def _components(files: dict[str, Path]) -> Iterator[str]:
    yield from ("", "## Components", "")
    yield from _text(
        "A component is a module with all modules below it. An **edge** is one use of a value by a "
        "node, or as an output of the model: **inside** between nodes of the component, **in** "
        "from a node outside or an input of the model, **out** to a node outside or an output of "
        "the model. **initializers** are those that its nodes consume, including constants, "
        "**stored values** the elements in them, and **only here** the elements that no node "
        "outside consumes. Equal parameters of several modules are one initializer."
    )
    titles = (
        "module",
        "operations",
        "inside",
        "in",
        "out",
        "initializers",
        "stored values",
        "only here",
        "operators",
    )
    for strategy, path in files.items():
        yield from ("", f"### {strategy}, by {STRATEGIES[strategy]}", "")
        rows = []
        for module in COMPONENTS:
            count = component(path, module)
            operators = ", ".join(f"{name} {number}" for name, number in count.operators.items())
            edges = (count.operations, count.inside, count.entering, count.leaving)
            rows.append(
                (
                    f"`{module}`",
                    *edges,
                    count.initializers,
                    f"{count.stored_values:,}",
                    f"{count.only_here:,}",
                    operators,
                )
            )
        yield from _table(titles, rows)


def _operators(analyses: Analyses) -> Iterator[str]:
    yield from ("", "## Operators", "")
    fx, htp = (analyses[strategy].by_operator for strategy in STRATEGIES)
    rows = [(name, fx.get(name, 0), htp.get(name, 0)) for name in sorted({*fx, *htp})]
    differences = [(*row, f"{row[2] - row[1]:+d}" if row[1] != row[2] else "") for row in rows]
    total = [sum(fx.values()), sum(htp.values())]
    yield from _table(
        ("operator", "fx", "htp", "difference"),
        [*differences, ("all", *total, f"{total[1] - total[0]:+d}")],
    )


def _table(titles: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = page(export_demo(Path(folder)))
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
