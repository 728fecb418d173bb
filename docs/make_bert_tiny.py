"""Writes docs/bert-tiny.md, the tiny BERT of the demo counted out: `python docs/make_bert_tiny.py [OUT]`.

Everything on the page is read from the files that `modelexport demo` writes, with the public functions of the
library; tests/test_bert_tiny.py counts the same things without them.
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
    """One module's part of a file. An edge is one use of a tensor: a node that reads it twice makes two.

    `weights` are the initializers that its nodes read, `parameters` the values in them, and `only_here` those of
    the values that no node outside reads.
    """

    operations: int
    operators: dict[str, int]
    inside: int
    entering: int
    leaving: int
    weights: int
    parameters: int
    only_here: int


def export_demo(folder: Path) -> dict[str, Path]:
    """The files of the demo by strategy, made by its command."""
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
    """Counts one module's part, from the whole graph and the list of its operations."""
    graph = modelexport.load(path).graph
    members = set(modelexport.extract_module_subgraph(path, None, module).operations)
    facts = next(facts for facts in modelexport.analyze(path).modules if facts.module == module)
    made = {name for node in graph.nodes if node.key in members for name in node.outputs}
    sizes = {
        tensor.name: math.prod(tensor.dims)
        for tensor in modelexport.load(path).proto.graph.initializer
    }
    read: set[str] = set()
    inside = entering = 0
    leaving = sum(name in made for name in graph.outputs)
    for node in graph.nodes:
        if node.key in members:
            inside += sum(name in made for name in node.inputs)
            entering += sum(name not in made and name not in sizes for name in node.inputs)
            read.update(name for name in node.inputs if name in sizes)
        else:
            leaving += sum(name in made for name in node.inputs)
    whole = sum(sizes[name] for name in read)
    return Component(
        len(members),
        facts.operators,
        inside,
        entering,
        leaving,
        len(read),
        whole,
        facts.stored_values,
    )


def page(files: dict[str, Path]) -> str:
    """The whole page, from the files of the demo."""
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
    yield from ("# The tiny BERT, counted out", "")
    yield from _text(
        "The model of `modelexport demo`, a BERT with two layers, exported with both of torch's exporters: what the "
        f"map says of its {len(fx.modules)} modules, {shown} of them with a tag. `docs/make_bert_tiny.py` writes this "
        f"page ({versions}), and `tests/test_bert_tiny.py` counts everything again with plain `onnx`, from the "
        "`doc_string` of each node."
    )
    yield from (
        "",
        "```sh",
        f"modelexport demo fx --strategy fx          # dynamo: {fx.totals.nodes} nodes in fx/bert-tiny.onnx",
        f"modelexport demo htp --strategy htp        # torchscript: {htp.totals.nodes} nodes in htp/bert-tiny.onnx",
        "modelexport analyze fx/bert-tiny.onnx --output-format detailed",
        "modelexport analyze fx/bert-tiny.onnx --filter-tag encoder.layer.0.attention",
        "modelexport extract htp/bert-tiny.onnx encoder.layer.0 layer0.onnx",
        "python docs/make_bert_tiny.py              # this page",
        "```",
        "",
    )
    yield from _noteworthy(fx, htp)


def _noteworthy(fx: Analysis, htp: Analysis) -> Iterator[str]:
    """What a reader of the tables would ask; the figures are those of the files."""
    holders = [
        _code(facts) for facts in fx.modules if facts.tag is not None and facts.tag not in fx.by_tag
    ]
    more = Counter(htp.by_operator)
    more.subtract(fx.by_operator)
    rest = more.total() - more["Constant"] - more["Identity"]
    yield from _text(
        f"- **Tags without nodes of their own**: {', '.join(holders)} only call others. The other {fx.totals.tags} "
        "tags are on nodes, in both files."
    )
    yield from _text(
        f"- **Absorbed**: {len(fx.absorbed)} modules ran and left nothing in the file. They are dropouts, which hand "
        "on what they are given when a model is not in training."
    )
    yield from _text(
        f"- **Unused**: {len(fx.unused)} modules never ran. They are the dropouts of the attention, whose probability "
        "goes to torch's attention function as a number."
    )
    yield from _text(
        f"- **{fx.totals.nodes} nodes or {htp.totals.nodes}**: torchscript writes {more['Constant']} constants as "
        f"nodes, dynamo has them among the weights. {more['Identity']} `Identity` nodes stand for weights that are "
        "equal to another one, as the biases and the norms of a fresh model are. And torchscript computes the "
        "attention mask step by step, where dynamo folds what fixed shapes decide: of the model's own nodes there are "
        f"{htp.modules[0].own_nodes} and {fx.modules[0].own_nodes}. Constants and identities aside, the difference is "
        f"{rest} nodes (last table)."
    )
    yield from _text(
        "- **The two layers differ by a node**, in both files. dynamo turns the mask into numbers once, in layer 0, "
        "and layer 1 reads it there: one edge more leaves the attention of layer 0. torchscript has an `Identity` more "
        "in layer 1, since the bias of its intermediate is equal to that of layer 0."
    )
    yield from _text(
        "- **The pooler** has a bias of zeros here. dynamo drops it; torchscript reads it through an `Identity`, and "
        "takes the index of the first token from a constant of the embeddings that has the same value."
    )
    yield from _text(
        f"- **Evidence**: dynamo's nodes are placed {_spelled(fx.by_method)}, torchscript's {_spelled(htp.by_method)}: "
        "torch does not say where an `Identity` on a weight belongs, so it goes to the module that reads it."
    )


def _text(paragraph: str) -> list[str]:
    indent = "  " if paragraph.startswith("- ") else ""
    return textwrap.wrap(
        paragraph, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _version(name: str) -> str:
    """Without the kind of build, which differs between machines."""
    return importlib.metadata.version(name).partition("+")[0]


def _spelled(counts: dict[str, int]) -> str:
    return " and ".join(f"by {method} ({count})" for method, count in counts.items())


def _shown(analyses: Analyses) -> Iterator[str]:
    pairs = [pair for pair in _pairs(analyses) if pair[0].tag is not None]
    yield from ("", f"## The {len(pairs)} modules with a tag", "")
    yield from _text(
        "**order** is that of the first calls in PyTorch, over all modules, shown or hidden; **fx** and **htp** are "
        "the status in either file. **own** counts the nodes with exactly this tag, those of hidden modules included; "
        "**all** those of the tags below too. Own nodes add up to the nodes of the file."
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
        "Classes of torch have no tag, norms and embeddings excepted. Their nodes carry the tag of the nearest module "
        "above that has one, and their own path in `hierarchy_module`; with `--torch-nn all` they have tags too. A "
        "`ModuleList` is never called itself and has no nodes but those of the modules in it: its place is before the "
        "first of them."
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
        ("order", "module", "class", "fx", "htp", "carry the tag", "own, fx", "own, htp"), rows
    )


def _pairs(analyses: Analyses) -> list[tuple[ModuleFacts, ...]]:
    """Each module as it is in both files, in the order of the calls."""
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
        "A component is a module with everything below it. An **edge** is one use of a tensor by a node, or as an "
        "output of the model: **inside** from one node of the component to another, **in** from a node outside or an "
        "input of the model, **out** to a node outside or an output of the model. **weights** are the initializers "
        "that its nodes read, **stored values** the values in them, **only here** those that no node outside reads. "
        "What dynamo keeps as an initializer counts, constants too, and equal weights of several modules are one."
    )
    titles = (
        "module",
        "operations",
        "inside",
        "in",
        "out",
        "weights",
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
                    count.weights,
                    f"{count.parameters:,}",
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
        ("operator", "fx", "htp", "more"),
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
