"""Finds example inputs for a model: the rungs of a ladder, from what the user wrote to a guess."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram

from modelexport.baseline.calling import ModelInputs, as_called, can_run, check_runs, read_inputs
from modelexport.errors import SourceError
from modelexport.hierarchy.capture import forward_args, named_args
from modelexport.source.guess import guesses, suggestion
from modelexport.source.load import Source
from modelexport.source.processors import find_processors, processed
from modelexport.source.resize import resize_inputs
from modelexport.source.specs import InputSpec, make_tensor, read_specs, written

Named = dict[str, Any]


class Example(NamedTuple):
    """Example inputs, where they came from, and how to make them at another size (None: by changing these)."""

    inputs: Any
    rung: str
    other_size: Callable[[], Named] | None = None


class Wanted(NamedTuple):
    """What a user says about the inputs; a shape under the empty name is the main input's."""

    specs: Path | None = None
    text: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = {}


def example_inputs(source: Source, wanted: Wanted, seed: int) -> Example:
    """The inputs to export with, from the highest rung that has any."""
    if isinstance(source.model, ExportedProgram):
        if wanted != Wanted():
            raise SourceError(f"{source.name} has its inputs in it", hint="leave the --input options out")
        return Example(None, "the program's own")
    model = source.model
    generator = torch.Generator().manual_seed(seed)
    if wanted.specs is not None:
        _refuse(wanted, "--input-specs")
        inputs = _from_specs(model, wanted.specs, generator)
        check_runs(model, read_inputs(inputs))
        return Example(inputs, f"--input-specs {wanted.specs.name}")
    example = _from_processors(source, model, wanted.text)
    if example is None and wanted.text is not None:
        raise SourceError("there is no tokenizer to read --input-text with", hint="use --input-shape or --input-specs")
    if example is None and source.inputs is not None:
        example = Example(source.inputs, "the factory's own")
    if example is None:
        example = _from_dummies(model) or _from_guesses(model, generator)
    if example is None:
        example = _from_shapes(model, wanted.shapes, generator)
    if example is None:
        raise no_inputs(model)
    if not wanted.shapes:
        return example
    resized = resize_inputs(model, as_called(model, read_inputs(example.inputs)), wanted.shapes, generator)
    check_runs(model, resized)
    return Example(_as_given(resized), f"{example.rung}, at the shape asked for")


def no_inputs(model: nn.Module) -> SourceError:
    """The error that helps to write a specs file."""
    return SourceError(
        f"no example inputs for {type(model).__name__}",
        hint="pass --input-specs, or name a factory that returns the model and its inputs",
        details=[
            f"forward{_signature(model)}",
            "A specs file to start from, for --input-specs:",
            *written(suggestion(model)).splitlines(),
        ],
    )


def _signature(model: nn.Module) -> str:
    """forward's arguments without their types, which fill a screen."""
    parameters = inspect.signature(model.forward).parameters.values()
    return f"({', '.join(str(item.replace(annotation=item.empty)) for item in parameters)})"


def _refuse(wanted: Wanted, with_what: str) -> None:
    for option, value in (("--input-text", wanted.text), ("--input-shape", wanted.shapes)):
        if value:
            raise SourceError(f"{option} and {with_what} both say what the inputs are", hint="give one of them")


def _as_given(inputs: ModelInputs) -> Any:
    if inputs.args and inputs.kwargs:
        return (*inputs.args, inputs.kwargs)
    return inputs.kwargs or inputs.args


def _from_specs(model: nn.Module, path: Path, generator: torch.Generator) -> Named:
    specs = read_specs(path)
    takes_any = any(name.startswith("**") for name in forward_args(model))
    accepted = specs if takes_any else _accepted(model, specs)
    names = [name for name in forward_args(model) if not name.startswith("*")]
    for name in specs:
        if name not in accepted:
            raise SourceError(
                f"{path} describes {name!r}, which {type(model).__name__}.forward does not take",
                hint=f"it takes {', '.join(names)}",
            )
    missing = [name for name, required in named_args(model).items() if required and name not in specs]
    if missing:
        raise SourceError(
            f"{path} lacks {', '.join(missing)}, which {type(model).__name__}.forward needs",
            hint="describe it as well",
            details=written(suggestion(model)).splitlines(),
        )
    return {name: make_tensor(spec, generator) if isinstance(spec, InputSpec) else spec for name, spec in specs.items()}


def _from_processors(source: Source, model: nn.Module, text: str | None) -> Example | None:
    if source.hub is None:
        return None
    processors = find_processors(source.hub)
    if text is not None and processors.tokenizer is None:
        return None

    def make(batch: int = 1, longer: bool = False) -> tuple[Named, list[str]]:
        """What the model takes of it; masks and the like only with what they describe."""
        parts = processed(processors, text, batch, longer)
        fitting = [part for part in parts if part.by == "processor" or _accepted(model, {next(iter(part.tensors)): 0})]
        inputs = _accepted(model, {name: value for part in fitting for name, value in part.tensors.items()})
        return _fitted(model, _with_decoder_inputs(model, inputs)) if inputs else {}, [part.by for part in fitting]

    inputs, makers = make()
    if not inputs:
        return None
    return Example(inputs, f"the model's {' and '.join(makers)}", lambda: make(batch=2, longer=True)[0])


def _with_decoder_inputs(model: nn.Module, inputs: Named) -> Named:
    """A model that decodes needs something to start from, which no processor makes."""
    name, config = "decoder_input_ids", getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or name not in forward_args(model) or name in inputs:
        return inputs
    tokens = inputs.get("input_ids")
    if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
        half = max(2, tokens.shape[1] // 2)
        return {**inputs, name: tokens[:, :half].clone()}
    start = getattr(config, "decoder_start_token_id", None) or getattr(config, "bos_token_id", None) or 0
    batch = next(iter(inputs.values())).shape[0]
    return {**inputs, name: torch.full((batch, 4), int(start))}


def _fitted(model: nn.Module, inputs: Named) -> Named:
    """Numbers in the precision of the model's weights, where those all have the same."""
    kinds = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if len(kinds) != 1:
        return inputs
    kind = kinds.pop()
    return {name: value.to(kind) if value.is_floating_point() else value for name, value in inputs.items()}


def _from_dummies(model: nn.Module) -> Example | None:
    dummies = getattr(model, "dummy_inputs", None)
    if not isinstance(dummies, Mapping):
        return None
    inputs = _accepted(model, dummies)
    main = getattr(model, "main_input_name", None)
    if not inputs or (isinstance(main, str) and main not in inputs) or not can_run(model, read_inputs(inputs)):
        return None
    return Example(inputs, "the model's dummy_inputs")


def _from_guesses(model: nn.Module, generator: torch.Generator) -> Example | None:
    if getattr(model, "main_input_name", None) is None:
        return None
    for specs in guesses(model):
        inputs = _fitted(model, {name: make_tensor(spec, generator) for name, spec in specs.items()})
        if can_run(model, read_inputs(inputs)):
            return Example(inputs, "a guess by the configuration and forward's arguments")
    return None


def _from_shapes(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator) -> Example | None:
    """Noise at the shapes that were asked for: tried as numbers, and as tokens if the model wants those."""
    if not shapes:
        return None
    names = [name for name in forward_args(model) if not name.startswith("*")]
    if not names:
        return None
    named = {name or names[0]: shape for name, shape in shapes.items()}
    found: list[Named] = []
    for dtype in ("float32", "int64"):
        specs = {name: InputSpec(shape, dtype) for name, shape in named.items()}
        inputs = _fitted(model, {name: make_tensor(spec, generator) for name, spec in specs.items()})
        found.append(inputs)
        if can_run(model, read_inputs(inputs)):
            return Example(inputs, "noise")
    return Example(found[0], "noise")


def _accepted(model: nn.Module, inputs: Mapping[str, Any]) -> Named:
    """Those inputs that the model's forward takes."""
    names = forward_args(model)
    takes_any = any(name.startswith("**") for name in names)
    return {name: value for name, value in inputs.items() if name in names or (takes_any and len(names) == 1)}
