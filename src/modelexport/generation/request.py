"""The options of an export in parts, checked before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

from modelexport.attribution.strategies import ExportStrategy
from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type
from modelexport.exporters import EXPORTERS
from modelexport.generation.records import DECODE, part_path
from modelexport.onnx_file.atomic_write import check_output_path, check_writable
from modelexport.option_values import spell_option
from modelexport.options import ExportOptions

_ONE_FILE = ("graphml_output", "jit_graph", "fx_graph")
"""Options that name one file, which several exports would write to."""


def check_generation_options(output_path: object, options: ExportOptions) -> Path:
    """Check the options of an export in parts, and return the stem of its files.

    Raises:
        ArgumentError: An option cannot go with it, or the folder does not exist.
        ArgumentTypeError: The output is not a path.
        FileError: The folder cannot be written to.
    """
    if not isinstance(output_path, str | os.PathLike):
        kind = describe_type(output_path)
        raise ArgumentTypeError(f"the output path is {kind}", hint="pass a path such as m.onnx")
    path = Path(output_path)
    # A folder may have the name of the stem, as that of the model often does; not so `models/`.
    if not path.name or os.fspath(output_path).endswith(os.sep):
        raise ArgumentError(
            f"the output {os.fspath(output_path)!r} is a folder",
            hint="name the files, for example llama for llama_decode.onnx",
        )
    stem = path.with_suffix("") if path.suffix == ".onnx" else path
    check_writable(check_output_path(part_path(stem, DECODE)).parent)
    generation = spell_option("generation")
    able = exporter_name()
    if options.exporter not in (None, able):
        raise ArgumentError(
            f"{generation} exports with the {able} exporter, not {options.exporter}",
            hint=f"leave {spell_option('exporter')} out",
        )
    if options.strategy not in (ExportStrategy.AUTO, ExportStrategy.FX):
        raise ArgumentError(
            f"{generation} goes with the strategy {ExportStrategy.FX}, not {options.strategy}",
            hint=f"leave {spell_option('strategy')} out",
        )
    if options.dynamic_axes:
        raise ArgumentError(
            f"{generation} makes all axes symbolic that {spell_option('dynamic_axes')} could name",
            hint="leave it out",
        )
    for name in _ONE_FILE:
        if getattr(options, name) is not None:
            raise ArgumentError(
                f"{spell_option(name)} names one file, and {generation} exports several models",
                hint="leave it out",
            )
    return stem


def exporter_name() -> str:
    """Return the name of the exporter that splits models."""
    return next(one.name for one in EXPORTERS if one.splits_models)
