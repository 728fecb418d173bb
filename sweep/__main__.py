"""`python -m sweep [MODEL_TYPE ...]`: export every architecture with both strategies.

Language models are exported in parts as well, and generate text.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from sweep.examples import CannotBuildError, build, model_types
from sweep.generates import GENERATES, generative_types, judge_generation
from sweep.isolated import LimitError, run_isolated
from sweep.judge import EXPORTERS, TRANSFORMERS, Outcome, judge, warm_up
from sweep.page import write_page

_ROOT = Path(__file__).parents[1]


def sweep_one(model_type: str, seconds: float) -> list[Outcome]:
    """Export one architecture with both strategies, and with transformers where dynamo cannot.

    The model is built once, in a process that forks another for each export.
    """

    def all_ways() -> list[Outcome]:
        try:
            model, inputs = build(model_type)
        except CannotBuildError as error:
            return [
                Outcome(model_type, strategy, "not-built", str(error)) for strategy in EXPORTERS
            ]

        def attempt(strategy: str) -> Outcome:
            job = partial(judge, model_type, strategy, model, inputs)
            return _judge_in_time(model_type, strategy, job, seconds)

        outcomes = list(map(attempt, EXPORTERS))
        if outcomes[0].status in ("torch-cannot", "no-answer"):
            outcomes.append(attempt(TRANSFORMERS))
        return outcomes

    if model_type not in model_types():  # it has a head for text, and no base model
        return _sweep_generation(model_type, seconds)
    try:
        outcomes = msgspec.convert(run_isolated(all_ways, 4 * seconds), list[Outcome])
    except LimitError as error:
        outcomes = [
            Outcome(model_type, strategy, "not-built", str(error)) for strategy in EXPORTERS
        ]
    return [*outcomes, *_sweep_generation(model_type, seconds)]


def _sweep_generation(model_type: str, seconds: float) -> list[Outcome]:
    """Export a language model in parts; nothing for other models."""
    if model_type not in generative_types():
        return []
    job = partial(judge_generation, model_type)
    return [_judge_in_time(model_type, GENERATES, job, seconds)]


def _judge_in_time(
    model_type: str, strategy: str, job: partial[Outcome], seconds: float
) -> Outcome:
    """Run a job in its own process, and measure how long it takes."""
    start = time.monotonic()
    try:
        outcome = msgspec.convert(run_isolated(job, seconds), Outcome)
    except LimitError as error:
        outcome = Outcome(model_type, strategy, "no-answer", str(error))
    return msgspec.structs.replace(outcome, seconds=round(time.monotonic() - start, 1))


def sweep(names: list[str], jobs: int, seconds: float) -> Iterator[Outcome]:
    """Export architectures, several at a time, and give their outcomes in order."""
    with ThreadPoolExecutor(jobs) as pool:
        for outcomes in pool.map(lambda name: sweep_one(name, seconds), names):
            yield from outcomes


def main() -> None:
    """Sweep the architectures that the command line names, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m sweep", description=__doc__)
    parser.add_argument(
        "model_types", nargs="*", help="model types of transformers; all of them if none is named"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--seconds", type=float, default=300, help="time limit of one export and its value test"
    )
    parser.add_argument("--results", type=Path, default=_ROOT / "build" / "sweep.jsonl")
    parser.add_argument("--page", type=Path, default=_ROOT / "docs" / "compatibility.md")
    options = parser.parse_args()
    known: dict[tuple[str, str], Outcome] = {}
    if options.model_types and options.results.exists():  # only these again: keep the others
        known = {(o.model_type, o.strategy): o for o in _read(options.results)}
    names = options.model_types or sorted({*model_types(), *generative_types()})
    warm_up()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.with_suffix(".partial").open("wb") as partial_results:
        for number, outcome in enumerate(sweep(names, options.jobs, options.seconds), 1):
            known[outcome.model_type, outcome.strategy] = outcome
            partial_results.write(msgspec.json.encode(outcome) + b"\n")
            partial_results.flush()
            print(
                f"{number:5}  {outcome.seconds:6.1f} s  "
                f"{outcome.model_type:28.28} {outcome.strategy:9} {outcome.status:12} "
                f"{outcome.reason[:60]!r}",
                flush=True,
            )
    options.results.write_bytes(
        b"".join(msgspec.json.encode(known[key]) + b"\n" for key in sorted(known))
    )
    write_page(options.page, [known[key] for key in sorted(known)])


def _read(path: Path) -> list[Outcome]:
    """Read the outcomes of an earlier sweep."""
    return [msgspec.json.decode(line, type=Outcome) for line in path.read_bytes().splitlines()]


if __name__ == "__main__":
    main()
