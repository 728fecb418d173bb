"""Export a small language model in parts, and compare the tokens it generates with PyTorch's."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from transformers.models.auto import modeling_auto

import modelexport
from modelexport.capture.inputs import ModelInputs
from modelexport.capture.transformers_exporter import ALL_AXES
from modelexport.generation.check import generate_with_pytorch
from modelexport.generation.export import widen_inputs
from modelexport.generation.parts import ModelPart, greedy_generation, split_model
from modelexport.generation.prompt import make_prompt
from modelexport.generation.records import GenerationFile, read_generation
from scopes import RecordedScopes, differences
from sweep.examples import CannotBuildError, build_smallest
from sweep.judge import Outcome
from zoo import distinct

GENERATES = "generates"
"""The column of the page, beside the strategies."""
_TOKENS = 8
_HEADS = {
    "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSpeechSeq2Seq": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
"""With an encoder first: the decoder alone of such a model may be a causal model as well."""


def generative_types() -> list[str]:
    """List the model types that have a head for text."""
    return sorted({name for names in _HEADS.values() for name in names})


def build_generative(model_type: str) -> tuple[Any, dict[str, Any]]:
    """Build the smallest model of this type that generates in PyTorch, and its inputs."""

    def adapt(config: Any) -> None:
        if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
            config.is_decoder = True
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0

    def run(model: Any, inputs: dict[str, Any]) -> None:
        model.generate(**copy.deepcopy(inputs), max_new_tokens=2, do_sample=False)

    return build_smallest(
        model_type,
        getattr(transformers, next(head for head, names in _HEADS.items() if model_type in names)),
        run,
        adapt=adapt,
        takes=lambda name: not name.startswith("decoder_"),
    )


def judge_generation(model_type: str) -> Outcome:
    """Export the parts of a model, generate with them, and judge the tokens and the maps."""
    outcome = Outcome(model_type, GENERATES, "exported")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, inputs = build_generative(model_type)
            distinct(model)
            with tempfile.TemporaryDirectory() as folder:
                return _judge(outcome, model, inputs, Path(folder))
    except CannotBuildError as error:
        return msgspec.structs.replace(outcome, status="not-built", reason=str(error))


def _judge(outcome: Outcome, model: Any, inputs: dict[str, Any], folder: Path) -> Outcome:
    def fail(status: str, reason: str) -> Outcome:
        return msgspec.structs.replace(outcome, status=status, reason=reason)

    try:
        report = modelexport.export_generation(model, inputs, folder / "m")
    except modelexport.ArgumentError as error:
        return fail("refused", error.message)
    except modelexport.ModelExportError as error:
        cause = " ".join(line.strip() for line in error.details) or error.message
        if not _plain_export_works(model, inputs):
            return fail("torch-cannot", cause)
        wrong = _wrong_at_a_later_step(model, inputs, folder)
        return fail("torch-wrong" if wrong else "we-fail", wrong or cause)
    assert report.generation_path is not None
    outcome = msgspec.structs.replace(
        outcome, nodes=sum(part.nodes for part in report.parts.values())
    )
    record = read_generation(report.generation_path)
    parts = split_model(model, widen_inputs(inputs)).parts
    for part in parts:
        tagged = modelexport.load(report.parts[part.name].onnx_path)
        if any(tag is None for _, tag in tagged.items()):
            return fail("we-fail", f"{part.name} has nodes without a tag")
        wrong = differences(tagged, part.model, RecordedScopes(part.model))
        if wrong:
            return fail("we-fail", f"not in the module that torch recorded: {wrong[0]}")
    try:
        difference = _compare_tokens(report.generation_path, record, model, inputs)
    except modelexport.ModelExportError as error:
        difference = error.message
    if not difference:
        return outcome
    # The bytes are those of transformers: if the values of a part differ, it is wrong.
    paths = {name: part.onnx_path for name, part in report.parts.items()}
    wrong_part = _wrong_part(parts, paths)
    if not wrong_part:
        longer = split_model(model, widen_inputs(_lengthen(inputs))).parts
        wrong_part = _wrong_part(longer, paths, " for a longer prompt")
    return fail("torch-wrong" if wrong_part else "we-fail", wrong_part or difference)


def _wrong_part(parts: Iterable[ModelPart], paths: Mapping[str, Path], where: str = "") -> str:
    """Compare parts with PyTorch on what `generate` passes to them; describe a difference."""
    for part in parts:
        try:
            given = ModelInputs((), part.inputs)
            result = modelexport.verify(part.model, given, paths[part.name], atol=1e-2, rtol=1e-1)
        except modelexport.ModelExportError as error:
            return f"{part.name}{where}: {error.message}"
        if not result.agrees:
            return f"{part.name} differs from PyTorch{where}, first in {result.first!r}"
    return ""


def _wrong_at_a_later_step(model: Any, inputs: dict[str, Any], folder: Path) -> str:
    """Export the part `decode` alone, and compare a later step with PyTorch."""
    wide = widen_inputs(inputs)
    decode = split_model(model, wide).parts[-1]
    path, given = folder / "alone.onnx", ModelInputs((), decode.inputs)
    modelexport.export_model(
        decode.model, given, path, exporter="transformers", dynamic_shapes=ALL_AXES
    )
    if _wrong_part([decode], {decode.name: path}):
        return ""  # another reason than that of the refusal
    last = _last_step(model, wide)
    later = decode._replace(inputs={name: last[name] for name in decode.inputs})
    return _wrong_part([later], {decode.name: path}, " at a later step")


def _last_step(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return what `generate` passes to a model at the last of some steps."""
    steps: list[dict[str, Any]] = []

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        steps.append(copy.deepcopy(kwargs))

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with greedy_generation(model) as config:
            config.max_new_tokens, config.eos_token_id = _TOKENS, None
            model.generate(**copy.deepcopy(inputs), generation_config=config)
    finally:
        handle.remove()
    return steps[-1]


def _lengthen(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs of one row with a longer prompt."""
    first = {name: value[:1] for name, value in inputs.items()}
    for name in ("input_ids", "attention_mask"):
        if name in first:
            first[name] = torch.cat([first[name], first[name][:, :3]], 1)
    return first


def _compare_tokens(path: Path, record: GenerationFile, model: Any, inputs: dict[str, Any]) -> str:
    """Generate from a longer prompt than that of the export; describe a difference."""
    arrays = {name: value.numpy() for name, value in _lengthen(inputs).items()}
    tokens = arrays.pop("input_ids", None)
    ids = None if tokens is None else tokens[0].tolist()
    result = modelexport.generate(path, input_ids=ids, inputs=arrays, max_new_tokens=_TOKENS)
    # With a mask of ones, as ours: PyTorch would mask a token of the prompt that means padding.
    prompt = make_prompt(record, None, None, ids, arrays)
    expected = generate_with_pytorch(model, prompt, record, _TOKENS)
    if result.tokens == expected:
        return ""
    return f"generated {list(result.tokens)}, PyTorch {list(expected)}"


def _plain_export_works(model: Any, inputs: dict[str, Any]) -> bool:
    """Return whether transformers alone can export the parts."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    try:
        for part in split_model(model, widen_inputs(inputs)).parts:
            OnnxExporter().export(part.model, dict(part.inputs), OnnxConfig(dynamic=True))
    except Exception:
        return False
    return True
