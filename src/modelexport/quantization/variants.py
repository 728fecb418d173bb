"""A workbench: quantize a model with some nodes left in float, and measure the error of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import onnx

from modelexport.errors import ArgumentError, suggest_name
from modelexport.graph.nested import Subgraph
from modelexport.onnx_file.digests import initializer_sizes
from modelexport.onnx_file.model_file import open_mapped, parse_model
from modelexport.option_values import spell_option
from modelexport.quantization.convert import KEPT_COPY, Target, convert
from modelexport.quantization.prepare import Prepared, default_preprocess, prepare
from modelexport.quantization.samples import (
    OutputError,
    Samples,
    SampleSource,
    compare_outputs,
    read_samples,
    run_samples,
)
from modelexport.quantization.select import as_patterns, find_nodes
from modelexport.tagged.example_inputs import Array
from modelexport.tagged.model import TaggedModel, load, require_tags

_MOST_MEASURED = 8
"""On how many calibration samples errors are measured."""


class Variant(NamedTuple):
    """A quantized file: its error, and how many bytes of initializers it saves."""

    error: OutputError
    saved: int


def parse_target(to: str) -> Target:
    """Return the target of a name.

    Raises:
        ArgumentError: There is none of that name.
    """
    try:
        return Target(to)
    except ValueError as error:
        known = [str(target) for target in Target]
        raise ArgumentError(
            f"{to!r} is not a quantization target", hint=suggest_name(str(to), known)
        ) from error


class Workbench:
    """A prepared copy of a model, and the values that its variants are compared with.

    Args:
        original: The tagged file.
        folder: An empty work folder.
        to: What to quantize to.
        preprocess: Whether ONNX Runtime preprocesses the copy; None for the default of `to`.
        calibration: The samples that a static quantization measures ranges on.
        inputs: The samples that errors are measured on; None for the calibration samples, and
            without these the recorded inputs.
        step: Called with a line of progress.

    Raises:
        ArgumentError: A sample has no value for an input.
        FileError: A file cannot be read or written.
        FormatError: A file is not a model, or does not run.
        SourceError: ONNX Runtime is not installed.
    """

    def __init__(
        self,
        original: Path,
        folder: Path,
        to: Target,
        *,
        preprocess: bool | None,
        calibration: SampleSource | None,
        inputs: SampleSource | None,
        step: Callable[[str], None],
    ) -> None:
        model = load(original)
        self.to = to
        self.folder = folder
        self.original = original
        self.calibration: Samples = read_samples(model, calibration)
        self.samples: Samples = (
            read_samples(model, inputs)
            if inputs is not None
            else self.calibration._replace(feeds=self.calibration.feeds[:_MOST_MEASURED])
        )
        step(f"run {original.name}")
        self.expected: Sequence[Mapping[str, Array]] = run_samples(original, self.samples)
        self.preprocess: bool = default_preprocess(to, preprocess)
        self.prepared: Prepared = prepare(
            original, folder, to, self.preprocess, self.samples.feeds[0], step
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about the inputs and the copy."""
        notes = self.prepared.notes
        if self.to is Target.INT8_STATIC and not self.calibration.is_given:
            notes += (
                f"calibrated on {self.calibration.source}: real data gives better ranges (pass it "
                f"as {spell_option('calibration')})",
            )
        return notes

    def write(self, kept: Collection[int], target: Path) -> None:
        """Quantize the copy with some nodes left in float, given by their indices."""
        excluded = {self.prepared.names[index] for index in kept}
        convert(
            self.prepared.path,
            target,
            self.to,
            excluded,
            calibration=self.calibration.feeds,
            cache=self.folder / "ranges.json",
            is_large=self.prepared.is_large,
        )

    def measure(self, target: Path) -> Variant:
        """Run a quantized file, and compare its outputs with those of the original.

        Raises:
            FormatError: ONNX Runtime does not run it.
        """
        error = compare_outputs(self.expected, run_samples(target, self.samples))
        return Variant(error, self.prepared.bytes - stored_bytes(target))

    def try_variant(self, kept: Set[int]) -> Variant:
        """Quantize with some nodes left in float, measure the error, and remove the file."""
        target = self.folder / "variant.onnx"
        try:
            self.write(kept, target)
            return self.measure(target)
        finally:
            _remove(target)

    def converted_nodes(self) -> frozenset[int]:
        """Find the nodes that ONNX Runtime converts if none is left in float."""
        target = self.folder / "whole.onnx"
        try:
            self.write((), target)
            return changed_nodes(self.prepared, target)
        finally:
            _remove(target)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)


def _read(path: Path) -> onnx.ModelProto:
    with open_mapped(path) as data:
        return parse_model(data, path)


def stored_bytes(path: Path) -> int:
    """Return the size of the initializers of a file."""
    return sum(each.bytes for each in initializer_sizes(_read(path)))


def changed_nodes(prepared: Prepared, target: Path) -> frozenset[int]:
    """Find the nodes of a copy that a quantized file lacks, or has with other inputs.

    A node counts as well if one of its initializers has another type, or its result is in half
    precision. Which operators these are is the tool's own affair.
    """
    before, after = _read(prepared.path).graph, _read(target).graph
    left = {_identity(node) for node in _all_nodes(after)}
    nodes = {node.name: node for node in _all_nodes(before)}
    old, new = _types(before), _types(after)
    changed = {
        name
        for name, kind in new.items()
        if old.get(name, kind) != kind or (name not in old and kind == onnx.TensorProto.FLOAT16)
    }
    return frozenset(
        index
        for index, node in enumerate(nodes[name] for name in prepared.names)
        if _identity(node) not in left or not changed.isdisjoint((*node.input, *node.output))
    )


def _identity(node: onnx.NodeProto) -> tuple[str, str, tuple[str, ...]]:
    """Return what a node keeps if it is not converted."""
    return node.name, node.op_type, tuple(name.removesuffix(KEPT_COPY) for name in node.input)


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    return (node for subgraph in Subgraph(graph) for node in subgraph.nodes)


def _types(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the element types of the values and initializers that a graph declares."""
    types = {
        value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)
    }
    return {**types, **{tensor.name: tensor.data_type for tensor in graph.initializer}}


def nodes_in_float(
    model: TaggedModel, keep: str | Sequence[str], only: str | Sequence[str]
) -> frozenset[int]:
    """Find the nodes that patterns leave in float.

    Args:
        model: The file.
        keep: The modules that stay in float, with the nodes that implement parts of them.
        only: The modules that are quantized; all if empty.

    Raises:
        ArgumentError: A pattern matches nothing, or nothing is left to quantize.
        FormatError: The file has no tags.
    """
    require_tags(model)
    every, keep, only = range(len(model.graph.nodes)), as_patterns(keep), as_patterns(only)
    kept = find_nodes(model, keep, covering=True) if keep else set()
    chosen = find_nodes(model, only) if only else set(every)
    if chosen <= kept:
        raise ArgumentError(
            "nothing is left to quantize: every node stays in float",
            hint="keep fewer modules, or leave them out of only" if only else "keep fewer modules",
        )
    return frozenset(every) - chosen | kept
