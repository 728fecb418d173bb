"""Samples to calibrate and to measure on, and the error of a quantized model on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from modelexport.errors import ArgumentError, FormatError, plural
from modelexport.onnx_file.model_file import StrPath, as_path
from modelexport.tagged.example_inputs import Array, numeric_kind
from modelexport.tagged.model import TaggedModel
from modelexport.verification.feeds import make_feeds
from modelexport.verification.runtime import OPTIMIZED, Session

SampleSource = StrPath | Mapping[str, Array] | Sequence[Mapping[str, Array]]
"""An `.npz` file with an array for each input, a folder of such files, or the arrays themselves."""


class Samples(NamedTuple):
    """Values by input name, one mapping a run, and where they come from."""

    feeds: tuple[dict[str, Array], ...]
    source: str
    """In words: `4 files in calibration`, `the inputs in x.npz` or `the recorded inputs`."""
    is_given: bool
    """Whether the caller gave them, instead of what the export recorded."""


def read_samples(model: TaggedModel, given: SampleSource | None) -> Samples:
    """Read samples, or draw one as the export recorded its inputs.

    Args:
        model: The file that they are for.
        given: What the caller passed; None for the recorded inputs.

    Raises:
        ArgumentError: An input is missing in one of them, or there are none.
        FileError: A file cannot be read.
        FormatError: A file is not an `.npz` file of numbers.
    """
    if given is None or isinstance(given, Mapping):
        feeds = make_feeds(model, given)
        return Samples((feeds.values,), feeds.source, given is not None)
    if isinstance(given, Sequence) and not isinstance(given, str):
        if not given:
            raise ArgumentError("there is no sample", hint="pass at least one mapping of arrays")
        return Samples(
            tuple(make_feeds(model, each).values for each in given),
            plural(len(given), "given sample"),
            True,
        )
    path = as_path(given)
    if not path.is_dir():
        feeds = make_feeds(model, path)
        return Samples((feeds.values,), feeds.source, True)
    files = sorted(path.glob("*.npz"))
    if not files:
        raise ArgumentError(
            f"the folder {path} has no .npz file", hint="save each sample with numpy.savez"
        )
    samples = tuple(make_feeds(model, file).values for file in files)
    return Samples(samples, f"{plural(len(files), 'file')} in {path.name}", True)


class OutputError(msgspec.Struct, frozen=True):
    """The error at the outputs: of all outputs, the one with the largest relative error."""

    output: str
    max_abs: float | None
    """The largest absolute difference; null where a value is not finite that was finite."""
    relative: float | None
    """The RMS of the differences divided by the RMS of the values; null as for `max_abs`."""
    cosine: float | None
    sqnr_db: float | None
    """The signal-to-quantization-noise ratio in decibels; null also where nothing differs."""

    @property
    def size(self) -> float:
        """The relative error, infinite where it is not finite."""
        return math.inf if self.relative is None else self.relative


def run_samples(path: Path, samples: Samples) -> list[dict[str, Array]]:
    """Run a file on samples as it is deployed, optimized by ONNX Runtime.

    Raises:
        SourceError: ONNX Runtime is not installed.
        FormatError: It rejects the model, or cannot run it.
    """
    session = Session(path, settings=OPTIMIZED)
    return [session.run(feeds) for feeds in samples.feeds]


def compare_outputs(
    expected: Sequence[Mapping[str, Array]], actual: Sequence[Mapping[str, Array]]
) -> OutputError:
    """Measure the error of each output over all samples, and return the largest.

    Outputs that are not floats are left out if there are floats: a class that flips is not a
    relative error.

    Raises:
        FormatError: An output is missing or has another shape.
    """
    names = list(expected[0])
    floats = [name for name in names if numeric_kind(expected[0][name].dtype) == "f"]
    errors = []
    for name in floats or names:
        pairs = []
        for before, after in zip(expected, actual, strict=True):
            if name not in after or after[name].shape != before[name].shape:
                raise FormatError(f"the output {name!r} is missing or has another shape")
            pairs.append((before[name], after[name]))
        errors.append(_measure(name, pairs))
    if not errors:
        raise FormatError("the model has no output that is a tensor")
    return max(errors, key=lambda error: error.size)


def _measure(name: str, pairs: Sequence[tuple[Array, Array]]) -> OutputError:
    first = np.concatenate([pair[0].reshape(-1).astype(np.float64) for pair in pairs])
    second = np.concatenate([pair[1].reshape(-1).astype(np.float64) for pair in pairs])
    # Equal infinities do not differ, nor do two NaNs, as in the scores of masked positions.
    counted = ~((first == second) & ~np.isfinite(first) | (np.isnan(first) & np.isnan(second)))
    first, second = first[counted], second[counted]
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return OutputError(name, None, None, None, None)
    difference = first - second
    noise, signal = float(np.linalg.norm(difference)), float(np.linalg.norm(first))
    largest = float(np.abs(difference).max(initial=0.0))
    if noise == 0.0:
        return OutputError(name, 0.0, 0.0, 1.0, None)
    norms = signal * float(np.linalg.norm(second))
    cosine = float(first @ second) / norms if norms else 0.0
    if signal == 0.0:
        return OutputError(name, largest, None, cosine, None)
    relative = noise / signal
    return OutputError(name, largest, relative, cosine, -20 * math.log10(relative))
