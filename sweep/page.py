"""Write docs/compatibility.md from the outcomes of a sweep."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from sweep.generates import GENERATES
from sweep.judge import EXPORTERS, TRANSFORMERS, Outcome
from sweep.torch_versions import read_table

_MEANING = {
    "exported": "exported, every node tagged, every module passes the value test",
    "torch-cannot": "plain `torch.onnx.export` fails on the same model and inputs",
    "torch-wrong": "exported and tagged, but torch's own file is refused by ONNX Runtime or "
    "computes something else",
    "we-fail": "**we fail**: torch can, we cannot, or a module fails the value test",
    "refused": "not a language model that takes its last token and a cache at each step; one line "
    "says so before anything is exported",
    "no-answer": "no answer within the limits of time and memory",
    "not-built": "no small model could be built from the configuration, or it does not run in "
    "PyTorch",
}

_WAYS = (*EXPORTERS, TRANSFORMERS)
_FALLBACK = (
    "`transformers`: the exporter of that name, which `auto` tries where dynamo cannot export the",
    "model, before torchscript. It is swept for those models only. `any` is the best outcome of",
    "the three.",
)
_TORCH = (
    "torch 2.13 to 2.15 is supported. The project is developed on 2.13.0, with all tests.",
    "`make compat TORCH=...` runs the proof on another version: the values of every module, the",
    "architectures, and what the exporter recorded. torch 2.12.1 writes an invalid file for an",
    "LSTM with dynamo.",
)

_GENERATION = (
    "`generates`: language models with a cache, exported with `--generation`. Here `exported`",
    "means that every node of every part is tagged, no tag differs from torch's scopes, and 8",
    "tokens equal those of PyTorch's greedy `generate`, from a longer prompt than that of the",
    "export. The parts are the files of transformers' own ONNX exporter, so `torch-cannot` and",
    "`torch-wrong` are about that exporter. Its limits:",
    "",
    "- State-space layers loop over the prompt in Python, so `prefill` takes a fixed number of",
    "  tokens. `generate` passes what is left of another prompt to `decode`, token by token.",
    "- A cache that keeps a window of tokens has the length of the example in the file. Such",
    "  models are exported with a cache that keeps all tokens. The model masks those outside",
    "  the window, or relies on its cache to drop them, as Moshi does: `generate` masks them too",
    "  where all layers have the same window.",
    "- Models without a cache are refused, and so are models that take more than the last token",
    "  at each step, such as XLNet, or generate several sequences of tokens at once, such as Dia.",
    "  If `generate` has no value for an input of a part, the parts are written with a note.",
    "- A model that makes a Python number of the length of its cache, as ProphetNet does, would",
    "  have a part `decode` for the length of the example only. Such a model is refused once",
    "  `decode` is exported.",
    "- `--max-cache-length` is for models without an encoder, window or state-space layers: the",
    "  others count their tokens in Python, and the count of the example would be in the file.",
    "- An empty cache has no tensors, so an input after it would get a wrong name, as with",
    "  GPT-2. Caches are therefore passed last.",
    "- The parts of a multimodal model leave out how images or sounds are put among the tokens,",
    "  and, where `generate` encodes them beforehand as with Llava, the encoder. `generate` runs",
    "  `decode` on text alone.",
)
"""What the sweep of language models checks, and the limits of transformers' exporter."""

_FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")


def write_page(path: Path, outcomes: list[Outcome]) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = _page(outcomes, read_table(path))  # `make compat` adds the rows
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _page(outcomes: list[Outcome], torch_table: str) -> Iterator[str]:
    """Format the page, line by line."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "torch", "onnx")
    )
    by_type: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_type.setdefault(outcome.model_type, {})[outcome.strategy] = outcome
    yield "# Compatibility"
    yield ""
    yield (
        "Every model type of transformers with a base model, made small by generic rules and "
        "exported with"
    )
    yield f"`fx` and `htp`. Written by `make sweep` ({versions}); not edited by hand."
    yield ""
    yield from _TORCH
    yield ""
    yield torch_table
    yield ""
    yield from _table(("", *_WAYS, "any", GENERATES), _totals(by_type))
    yield ""
    yield from _FALLBACK
    yield ""
    yield from _GENERATION
    built = {name: found for name, found in by_type.items() if _best(found) != "not-built"}
    yield ""
    yield "## Architectures"
    yield ""
    yield (
        "Numbers are nodes. The value test looked for every tensor that every module returned; "
        "one whose last reshape"
    )
    yield "was merged with the next module's counts as found."
    yield ""
    yield from _table(
        ("model type", *_WAYS, GENERATES),
        [(name, *_cells(found)) for name, found in sorted(built.items())],
    )
    yield ""
    yield "## Not built"
    yield ""
    yield from _table(
        ("model type", "reason"),
        [
            (name, _text(next(iter(found.values())).reason))
            for name, found in sorted(by_type.items())
            if name not in built
        ],
    )


def _totals(by_type: dict[str, dict[str, Outcome]]) -> Iterator[tuple[str, ...]]:
    """Count the outcomes by exporter, and by the best of them."""
    counts = {
        name: Counter(found[name].status for found in by_type.values() if name in found)
        for name in (*_WAYS, GENERATES)
    }
    exported = [found for found in by_type.values() if not found.keys().isdisjoint(_WAYS)]
    best = Counter(map(_best, exported))
    for status, meaning in _MEANING.items():
        yield (
            f"`{status}`: {meaning}",
            *(str(counts[name][status]) for name in _WAYS),
            str(best[status]),
            str(counts[GENERATES][status]),
        )
    yield (
        "model types",
        *(str(sum(counts[name].values())) for name in _WAYS),
        str(len(exported)),
        str(sum(counts[GENERATES].values())),
    )


def _best(found: dict[str, Outcome]) -> str:
    """Return the best outcome of all exporters, but never hide a failure of ours.

    A type without a base model has only the outcome of its language model.
    """
    ways = [outcome.status for name, outcome in found.items() if name in _WAYS]
    statuses = ways or [outcome.status for outcome in found.values()]
    order = ["we-fail", *(status for status in _MEANING if status != "we-fail")]
    return min(statuses, key=order.index)


def _cells(found: dict[str, Outcome]) -> Iterator[str]:
    """Format the outcome of each exporter."""
    for name in (*_WAYS, GENERATES):
        outcome = found.get(name)
        if outcome is None:
            yield ""
        elif outcome.status == "exported":
            yield "yes" if name == GENERATES else str(outcome.nodes)
        else:
            yield f"{outcome.status}: {_text(outcome.reason)}"


def _table(titles: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Format a table in Markdown."""
    titles = list(titles)
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _text(reason: str) -> str:
    """Shorten a reason to one line, without folder names and what would break a table."""
    words = (
        _FOLDERS.sub("…/", " ".join(reason.split()))
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("`", "'")
    )
    return words if len(words) <= 200 else f"{words[:199]}…"
