"""Build a small model of any model type of transformers, with inputs that it runs on."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from modelexport.capture.inputs import in_signature_order, parse_inputs
from modelexport.errors import first_line
from modelexport.source.huggingface import use_exportable_experts
from modelexport.source.input_specs import guess_inputs, make_tensor
from sweep.shrink import shrink_config

_MOST_PARAMETERS = 60_000_000


class CannotBuildError(Exception):
    """No small model of this type could be built and run."""


def model_types() -> list[str]:
    """List the model types that the installed transformers has a base model for."""
    return sorted(MODEL_MAPPING_NAMES)


def build(model_type: str) -> tuple[nn.Module, dict[str, Any]]:
    """Build the smallest model of this type that runs in PyTorch, and the inputs it runs on."""
    try:
        config = transformers.CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise CannotBuildError(f"no default configuration: {_describe(error)}") from error
    reasons: list[str] = []
    for smaller in shrink_config(config):
        try:
            model = _build(smaller)
        except Exception as error:
            reasons.append(_describe(error))
            continue
        for specs in guess_inputs(model):
            generator = torch.Generator().manual_seed(0)
            inputs = {name: make_tensor(spec, generator) for name, spec in specs.items()}
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model(**inputs)
            except Exception as error:  # whatever it raises, the next guess may do
                reasons.append(_describe(error))
            else:
                return model, in_signature_order(model, parse_inputs(inputs)).kwargs
    raise CannotBuildError(reasons[0] if reasons else "no smaller configuration")


def _build(config: Any) -> nn.Module:
    """Build a model with random weights, if it is small enough."""
    with torch.device("meta"):
        size = sum(
            parameter.numel()
            for parameter in transformers.AutoModel.from_config(config).parameters()
        )
    if size > _MOST_PARAMETERS:
        raise ValueError(f"too large even when small: {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return use_exportable_experts(transformers.AutoModel.from_config(config).eval())


def _describe(error: BaseException) -> str:
    """Describe an error in one line."""
    return f"{type(error).__name__}: {first_line(error)}"[:160]
