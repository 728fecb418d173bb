"""Export with the ONNX exporter of transformers."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelexport.capture.dynamo import read_baseline, watch_branches
from modelexport.capture.dynamo_evidence import read_trace, watch_translation
from modelexport.capture.fx_trace import FxTraceReader
from modelexport.capture.graph_inputs import transformers_names
from modelexport.capture.hooks import record_calls
from modelexport.capture.inputs import ModelInputs, name_inputs
from modelexport.capture.model_state import preserve_model, silence_torch
from modelexport.capture.trace import Baseline, TorchOptions
from modelexport.errors import ArgumentError, SourceError, first_line
from modelexport.modules.tree import ModuleTree

ALL_AXES = torch.export.Dim.AUTO
"""The dynamic shapes that make every axis symbolic that can be, those of caches included."""


def import_exporters() -> Any:
    """Import the exporters of transformers.

    Raises:
        SourceError: If transformers is not installed, or is too old to have them.
    """
    try:
        return importlib.import_module("transformers.exporters")
    except ImportError as error:
        raise SourceError(
            f"this needs transformers with its exporters: {first_line(error)}",
            hint="pip install --upgrade 'modelexport[hf]'",
        ) from error


def export(
    model: nn.Module,
    tree: ModuleTree,
    inputs: ModelInputs,
    target: Path,
    options: TorchOptions,
) -> Baseline:
    """Write a file, and its data file beside it, with `transformers.exporters.OnnxExporter`.

    It patches the model where torch alone would fail, takes caches among the inputs and returns
    them among the outputs, and calls `torch.onnx.export` on what `torch.export` captured.

    Args:
        model: The model, which is left as it was.
        tree: Its modules.
        inputs: The example inputs; the exporter takes all of them by name.
        target: The file.
        options: The arguments for the exporter.

    Returns:
        The baseline and its evidence.

    Raises:
        ArgumentError: The options choose names, which this exporter does itself.
        SourceError: transformers is not installed, or has no exporters.
    """
    if options.input_names or options.output_names:
        raise ArgumentError(
            "the transformers exporter names inputs and outputs itself",
            hint="leave input_names and output_names out, or use another exporter",
        )
    exporters = import_exporters()
    named = name_inputs(model, inputs)
    reader = FxTraceReader()
    with (
        silence_torch(options.verbose),
        preserve_model(model),
        record_calls(model, tree, reader) as recorder,
        watch_branches(model, tree) as branches,
        watch_translation() as translation,
    ):
        config = exporters.OnnxConfig(
            output_path=str(target),
            opset_version=options.opset_version,
            optimize=options.optimize,
            external_data=options.external_data is not False,
            **_shape_options(named, options.dynamic_shapes),
        )
        # The exporter removes flags from the inputs, and a cache changes when the model runs.
        written = exporters.OnnxExporter().export(model, copy.deepcopy(named), config)
    if options.needs_given_inputs:
        check_inputs(model, inputs, written.model.graph)
    trace = read_trace(written, tree, recorder.log(), reader, translation, hooks_ran=True)
    trace = branches.complete(trace, written.model.graph)
    return read_baseline(written, trace, target, options)


def check_inputs(model: nn.Module, inputs: ModelInputs, graph: Any) -> None:
    """Check that a graph takes the example inputs only, and not what the exporter made of them.

    Raises:
        ValueError: It takes another input.
    """
    given = transformers_names(model, inputs)
    others = [value.name for value in graph.inputs if value.name not in given]
    if others:
        raise ValueError(f"the file would take inputs that were not given: {', '.join(others)}")


def _shape_options(named: Mapping[str, Any], dynamic_shapes: Any) -> dict[str, Any]:
    """Return the options of the exporter for dynamic shapes.

    It takes axes as `torch.export` does, which has no names for them without a range, and an entry
    for every input.
    """
    if dynamic_shapes is None:
        return {}
    if dynamic_shapes is ALL_AXES:
        return {"dynamic": True}
    if not isinstance(dynamic_shapes, Mapping):
        return {"dynamic_shapes": dynamic_shapes}
    axes = {name: dynamic_shapes.get(name) for name in named}
    return {"dynamic_shapes": {name: _unnamed_axes(one) for name, one in axes.items()}}


def _unnamed_axes(axes: Any) -> Any:
    if not isinstance(axes, Mapping):
        return axes
    return {axis: ALL_AXES if isinstance(one, str) else one for axis, one in axes.items()}
