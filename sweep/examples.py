"""Build a small model of any model type of transformers, with inputs that it runs on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
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

    def run(model: nn.Module, inputs: dict[str, Any]) -> None:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(**inputs)

    model, inputs = build_smallest(model_type, transformers.AutoModel, run)
    return model, in_signature_order(model, parse_inputs(inputs)).kwargs


def build_smallest(
    model_type: str,
    auto: Any,
    run: Callable[[Any, dict[str, Any]], None],
    *,
    adapt: Callable[[Any], None] = lambda config: None,
    takes: Callable[[str], bool] = lambda name: True,
) -> tuple[Any, dict[str, Any]]:
    """Build the smallest model of a type that runs, and the inputs it runs on.

    Args:
        model_type: The type, as transformers calls it.
        auto: The class of transformers that builds the model from a configuration.
        run: Run a model on guessed inputs; any exception leads to the next guess.
        adapt: Change a configuration before the model is built.
        takes: Whether an input of this name is passed.

    Raises:
        CannotBuildError: There is no such model.
    """
    try:
        config = transformers.CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise CannotBuildError(f"no default configuration: {describe_error(error)}") from error
    reasons: list[str] = []
    for smaller in shrink_config(config):
        adapt(smaller)
        try:
            model = _build(auto, smaller)
        except Exception as error:
            reasons.append(describe_error(error))
            continue
        for specs in guess_inputs(model):
            generator = torch.Generator().manual_seed(0)
            inputs = {
                name: make_tensor(spec, generator) for name, spec in specs.items() if takes(name)
            }
            try:
                run(model, inputs)
            except Exception as error:  # whatever it raises, the next guess may do
                reasons.append(describe_error(error))
            else:
                return model, inputs
    raise CannotBuildError(reasons[0] if reasons else "no smaller configuration")


def _build(auto: Any, config: Any) -> Any:
    """Build a model with random weights, if it is small enough."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"too large even when small: {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return use_exportable_experts(auto.from_config(config).eval())


def describe_error(error: BaseException) -> str:
    """Describe an error in one line."""
    return f"{type(error).__name__}: {first_line(error)}"[:160]
