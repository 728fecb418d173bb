"""export_generation(): export a language model as parts that share their weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

import msgspec
import torch
from torch import nn

from modelexport.capture.inputs import ModelInputs
from modelexport.capture.model_state import EXPORT_LOCK, check_model
from modelexport.capture.trace import Baseline
from modelexport.capture.transformers_exporter import ALL_AXES
from modelexport.errors import ArgumentError, ArgumentTypeError, ExportError, describe_type
from modelexport.generation.parts import (
    ModelPart,
    SplitModel,
    read_token_ids,
    split_model,
)
from modelexport.generation.records import (
    DECODE,
    FORMAT,
    LOGITS,
    MASK,
    PREFILL,
    RUN_PARTS,
    TOKENS,
    GenerationFile,
    GenerationPart,
    InputRole,
    data_path,
    encode_generation,
    generation_path,
    part_path,
)
from modelexport.generation.request import check_generation_options, exporter_name
from modelexport.generation.roles import find_roles
from modelexport.keywords import ModelKeywords
from modelexport.onnx_file.atomic_write import Transaction, transaction
from modelexport.onnx_file.shared_data import SharedData
from modelexport.option_values import check_flag, spell_option
from modelexport.options import MODEL_KEYWORDS, CallOptions, ExportOptions, StrPath, resolve_names
from modelexport.pipeline import split_options
from modelexport.report import ExportReport, Steps, warn_of_failures
from modelexport.request import check_options, check_request
from modelexport.staged_export import StagedExport, finish_export, stage_export

_LEAST = 2
"""The least size of an axis in the example inputs: torch takes a size of one as fixed."""


def export_generation(
    model: nn.Module,
    inputs: Mapping[str, Any],
    output_path: StrPath,
    optimize: bool = True,
    verbose: bool = False,
    tokenizer: StrPath | None = None,
    max_cache_length: int | None = None,
    **options: Unpack[ModelKeywords],
) -> ExportReport:
    """Export a model of transformers as the parts that generate text, with caches between them.

    Writes `<stem>_prefill.onnx` and `<stem>_decode.onnx`, `<stem>_encode.onnx` for a model with an
    encoder, a sidecar each, one data file with the weights of all, and `<stem>_generation.json`,
    which `generate` reads. Batch, sequence and cache lengths are symbolic.

    Args:
        model: A model of transformers with a `generate` method.
        inputs: What `model.generate` takes by name, such as `input_ids`.
        output_path: The stem of all files, with or without `.onnx`.
        optimize: Let the exporter optimise the graphs.
        verbose: Let torch print.
        tokenizer: The folder of the tokenizer, recorded for `generate`.
        max_cache_length: The number of tokens of a cache of fixed size; without it caches grow.
        **options: The options of `export_model`.

    Returns:
        The report of `decode`, with those of all parts in `parts`.

    Raises:
        UnknownOptionError: There is no option of this name.
        ArgumentError: A value cannot work, or the model does not generate text.
        ModelRunError: `generate` fails on the inputs.
        ExportError: transformers cannot export a part.
        ModelExportError: Any other error, such as a file that cannot be written.
    """
    named = {"optimize": optimize, **resolve_names(options, MODEL_KEYWORDS)}
    chosen, call = split_options(named)
    chosen = msgspec.structs.replace(chosen, generation=True, max_cache_length=max_cache_length)
    folder = None if tokenizer is None else os.fspath(tokenizer)
    check_flag("verbose", verbose)
    report = export_parts(model, inputs, output_path, chosen, call, verbose, folder)
    for part in report.parts.values():
        warn_of_failures(part)
    return report


def export_parts(
    model: nn.Module,
    inputs: Mapping[str, Any],
    output_path: StrPath,
    options: ExportOptions,
    call: CallOptions,
    verbose: bool = False,
    tokenizer: str | None = None,
) -> ExportReport:
    """Export the parts of a model as `export_generation` does, with the options in their records.

    All files are written or none. It does not warn.
    """
    stem = check_generation_options(output_path, options)
    check_options(options)
    options = msgspec.structs.replace(options, exporter=exporter_name())
    module = check_model(model)
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError("the model is a program", hint="pass the model itself")
    if call.on_step is not None:
        call.on_step("run generate")
    split = split_model(module, widen_inputs(inputs), options.max_cache_length)
    temp_dir = None if options.temp_dir is None else Path(options.temp_dir)
    name = data_path(stem).name
    with EXPORT_LOCK, transaction(stem.parent, temp_dir) as stage:
        shared = None
        if options.external_data is not False:
            shared = SharedData(stage.work / "data", name)
            stage.publish(shared.path, name)
        staged = {
            part.name: _stage_part(part, stem, options, call, verbose, stage, shared)
            for part in split.parts
        }
        reports = {part: one.report for part, one in staged.items()}
        data = () if shared is None else (name,)
        record = _describe(module, split, reports, options, call, _relative(tokenizer, stem), data)
        _check_cache_grows(record)
        path = generation_path(stem)
        stage.publish(stage.write("generation", [encode_generation(record)]), path.name)
        stage.commit()
    finished = {part: finish_export(one, Steps(call.on_step)) for part, one in staged.items()}
    paths = tuple(stem.with_name(one) for one in data)
    parts = {
        part: msgspec.structs.replace(report, data_paths=paths) for part, report in finished.items()
    }
    notes = (*parts[DECODE].notes, *_fixed_prompt(record, parts), *_unknown_inputs(record))
    return msgspec.structs.replace(parts[DECODE], parts=parts, generation_path=path, notes=notes)


def _fixed_prompt(record: GenerationFile, reports: Mapping[str, ExportReport]) -> Iterator[str]:
    """Yield a note if the first step takes a fixed number of tokens."""
    report = reports.get(PREFILL)
    if report is None or record.tokens.decoder_start:
        return
    inputs = record.parts[PREFILL].inputs
    for info in report.hierarchy.export.inputs:
        if inputs[info.name].role is InputRole.TOKENS and str(info.shape[-1]).isdecimal():
            yield (
                f"{report.onnx_path.name} takes {info.shape[-1]} tokens, since the model loops "
                "over them; generate passes those of other prompts to decode, one at a time"
            )


def _unknown_inputs(record: GenerationFile) -> Iterator[str]:
    """Yield a note for each part that `generate` cannot run."""
    for name in RUN_PARTS:
        part = record.parts.get(name)
        if part is not None and part.unknown_inputs:
            yield (
                f"generate cannot run {part.onnx}: the origin of its input "
                f"{part.unknown_inputs[0]!r} is not known"
            )


def _check_cache_grows(record: GenerationFile) -> None:
    """Raise an error if the exporter fixed the length of a cache that grows with the text.

    It does where a model makes a Python number of that length.
    """
    for info in record.cache:
        empty = record.parts[DECODE].inputs[info.name].empty
        for size, length in zip(info.shape, empty, strict=False):
            if length == 0 and str(size).isdecimal():
                name = record.parts[DECODE].class_.rpartition(".")[2]
                raise ExportError(
                    f"{name} makes a Python number of the length of its cache, so that the file of "
                    f"the part {DECODE} would take a cache of {size} tokens only",
                    hint=f"leave {spell_option('generation')} out",
                )


def widen_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of `generate` with two rows or more, and the first token of the last masked.

    `generate` leaves out a mask of ones, and then the files would have none for texts of different
    lengths.
    """
    if not isinstance(inputs, Mapping):
        raise ArgumentTypeError(
            f"inputs is {describe_type(inputs)}", hint="pass a dict, as model.generate takes it"
        )
    wide = {name: value for name, value in inputs.items() if value is not None}
    for name, value in wide.items():
        if isinstance(value, torch.Tensor) and value.dim():
            rows = max(value.shape[0], _LEAST)
            wide[name] = value[torch.arange(rows) % value.shape[0]]
    tokens = wide.get(TOKENS)
    if tokens is None:
        return wide
    for name in (TOKENS, MASK):
        value = wide.get(name, tokens)
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or not value.numel():
            raise ArgumentTypeError(
                f"{name} is {describe_type(value)}; it must be a tensor with a row for each text",
                hint='let the tokenizer return tensors, with return_tensors="pt"',
            )
    if MASK in wide and wide[MASK].shape != tokens.shape:
        raise ArgumentError(
            f"{MASK} has the shape {list(wide[MASK].shape)}, and {TOKENS} {list(tokens.shape)}",
            hint="pass both as the tokenizer returns them",
        )
    length = max(tokens.shape[1], _LEAST + 1)
    for name in (TOKENS, MASK):
        if name in wide:
            wide[name] = wide[name][:, torch.arange(length) % tokens.shape[1]]
    mask = torch.ones_like(wide[TOKENS])
    mask[-1, 0] = 0
    return {**wide, MASK: mask}


def _stage_part(
    part: ModelPart,
    stem: Path,
    options: ExportOptions,
    call: CallOptions,
    verbose: bool,
    stage: Transaction,
    shared: SharedData | None,
) -> StagedExport:
    """Export one part into the transaction of all."""
    further = msgspec.structs.replace(call, dynamic_shapes=ALL_AXES, part=part.name)
    inputs = ModelInputs((), part.inputs)
    request = check_request(
        part.model, inputs, part_path(stem, part.name), options, further, verbose
    )

    def share(baseline: Baseline) -> Baseline:
        if shared is None:
            return baseline
        data = memoryview(shared.adopt(baseline.data, baseline.files))
        return msgspec.structs.replace(baseline, data=data, files={})

    steps = Steps(_with_part(call.on_step, part.name))
    return stage_export(request, stage, steps, f"{part.name}-", share)


def _with_part(on_step: Callable[[str], None] | None, part: str) -> Callable[[str], None] | None:
    return None if on_step is None else lambda step: on_step(f"{part}: {step}")


def _describe(
    model: nn.Module,
    split: SplitModel,
    reports: Mapping[str, ExportReport],
    options: ExportOptions,
    call: CallOptions,
    tokenizer: str | None,
    data: tuple[str, ...],
) -> GenerationFile:
    """Describe the parts, and how the values of each step reach the next."""
    exports = {part: report.hierarchy.export for part, report in reports.items()}
    decode = {info.name for info in exports[DECODE].outputs}
    parts = {}
    for part, export in exports.items():
        outputs = tuple(info.name for info in export.outputs)
        inputs = [info.name for info in export.inputs]
        parts[part] = GenerationPart(
            onnx=reports[part].onnx_path.name,
            inputs=find_roles(part, inputs, decode, split.observed),
            outputs=outputs,
            logits=LOGITS if LOGITS in outputs else None,
            class_=reports[part].hierarchy.model.class_,
        )
    return GenerationFile(
        format=FORMAT,
        source=call.source or reports[DECODE].hierarchy.model.class_,
        parts=parts,
        cache=tuple(
            info
            for info in exports[DECODE].inputs
            if parts[DECODE].inputs[info.name].role is InputRole.STATE
        ),
        max_cache_length=options.max_cache_length,
        tokens=read_token_ids(model, split),
        tokenizer=tokenizer,
        data=data,
    )


def _relative(folder: str | None, stem: Path) -> str | None:
    """Return a folder relative to that of the output; the name of a hub stays."""
    if folder is None or not os.path.isdir(folder):
        return folder
    return os.path.relpath(folder, stem.parent)
