"""Make example inputs for a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram

from modelexport.capture.inputs import (
    ModelInputs,
    bind_inputs,
    can_run,
    check_model_runs,
    parse_inputs,
)
from modelexport.capture.module_tree import forward_args, named_args
from modelexport.errors import SourceError
from modelexport.source.guess import guesses, suggestion
from modelexport.source.huggingface import find_processors, process_examples
from modelexport.source.input_specs import (
    InputSpec,
    format_specs,
    input_error,
    make_tensor,
    read_specs,
    shape_text,
)
from modelexport.source.load import LoadedModel

Named = dict[str, Any]


class ExampleInputs(NamedTuple):
    """Example inputs, where they came from, and how to make them at another size (None: by changing these)."""

    inputs: Any
    rung: str
    other_size: Callable[[], Named] | None = None


class InputRequest(NamedTuple):
    """What a user says about the inputs; a shape under the empty name is the main input's."""

    specs: Path | None = None
    text: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = {}


def make_example_inputs(source: LoadedModel, wanted: InputRequest, seed: int) -> ExampleInputs:
    """The inputs to export with, from the highest rung that has any."""
    if isinstance(source.model, ExportedProgram):
        if wanted != InputRequest():
            raise SourceError(
                f"{source.name} has its inputs in it", hint="leave the --input options out"
            )
        return ExampleInputs(None, "the program's own")
    model = source.model
    generator = torch.Generator().manual_seed(seed)
    if wanted.specs is not None:
        _refuse(wanted, "--input-specs")
        inputs = _from_specs(model, wanted.specs, generator)
        check_model_runs(model, parse_inputs(inputs))
        return ExampleInputs(inputs, f"--input-specs {wanted.specs.name}")
    example = _from_processors(source, model, wanted.text)
    if example is None and wanted.text is not None:
        raise SourceError(
            "there is no tokenizer to read --input-text with",
            hint="use --input-shape or --input-specs",
        )
    if example is None and source.inputs is not None:
        example = ExampleInputs(source.inputs, "the factory's own")
    if example is None:
        example = _from_dummies(model) or _from_guesses(model, generator)
    if example is None:
        example = _from_shapes(model, wanted.shapes, generator)
    if example is None:
        raise no_inputs(model)
    if not wanted.shapes:
        return example
    resized = resize_inputs(
        model, bind_inputs(model, parse_inputs(example.inputs)), wanted.shapes, generator
    )
    check_model_runs(model, resized)
    return ExampleInputs(_as_given(resized), f"{example.rung}, at the shape asked for")


def no_inputs(model: nn.Module) -> SourceError:
    """The error that helps to write a specs file."""
    return SourceError(
        f"no example inputs for {type(model).__name__}",
        hint="pass --input-specs, or name a factory that returns the model and its inputs",
        details=[
            f"forward{_signature(model)}",
            "A specs file to start from, for --input-specs:",
            *format_specs(suggestion(model)).splitlines(),
        ],
    )


def _signature(model: nn.Module) -> str:
    """forward's arguments without their types, which fill a screen."""
    parameters = inspect.signature(model.forward).parameters.values()
    return f"({', '.join(str(item.replace(annotation=item.empty)) for item in parameters)})"


def _refuse(wanted: InputRequest, with_what: str) -> None:
    for option, value in (("--input-text", wanted.text), ("--input-shape", wanted.shapes)):
        if value:
            raise SourceError(
                f"{option} and {with_what} both say what the inputs are", hint="give one of them"
            )


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
    missing = [
        name for name, required in named_args(model).items() if required and name not in specs
    ]
    if missing:
        raise SourceError(
            f"{path} lacks {', '.join(missing)}, which {type(model).__name__}.forward needs",
            hint="describe it as well",
            details=format_specs(suggestion(model)).splitlines(),
        )
    return {
        name: make_tensor(spec, generator) if isinstance(spec, InputSpec) else spec
        for name, spec in specs.items()
    }


def _from_processors(
    source: LoadedModel, model: nn.Module, text: str | None
) -> ExampleInputs | None:
    if source.hub is None:
        return None
    processors = find_processors(source.hub)
    if text is not None and processors.tokenizer is None:
        return None

    def make(batch: int = 1, longer: bool = False) -> tuple[Named, list[str]]:
        """What the model takes of it; masks and the like only with what they describe."""
        parts = process_examples(processors, text, batch, longer)
        fitting = [
            part
            for part in parts
            if part.by == "processor" or _accepted(model, {next(iter(part.tensors)): 0})
        ]
        inputs = _accepted(
            model, {name: value for part in fitting for name, value in part.tensors.items()}
        )
        return _fitted(model, _with_decoder_inputs(model, inputs)) if inputs else {}, [
            part.by for part in fitting
        ]

    inputs, makers = make()
    if not inputs:
        return None
    return ExampleInputs(
        inputs, f"the model's {' and '.join(makers)}", lambda: make(batch=2, longer=True)[0]
    )


def _with_decoder_inputs(model: nn.Module, inputs: Named) -> Named:
    """A model that decodes needs something to start from, which no processor makes."""
    name, config = "decoder_input_ids", getattr(model, "config", None)
    if (
        not getattr(config, "is_encoder_decoder", False)
        or name not in forward_args(model)
        or name in inputs
    ):
        return inputs
    tokens = inputs.get("input_ids")
    if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
        half = max(2, tokens.shape[1] // 2)
        return {**inputs, name: tokens[:, :half].clone()}
    start = (
        getattr(config, "decoder_start_token_id", None)
        or getattr(config, "bos_token_id", None)
        or 0
    )
    batch = next(iter(inputs.values())).shape[0]
    return {**inputs, name: torch.full((batch, 4), int(start))}


def _fitted(model: nn.Module, inputs: Named) -> Named:
    """Numbers in the precision of the model's weights, where those all have the same."""
    kinds = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if len(kinds) != 1:
        return inputs
    kind = kinds.pop()
    return {
        name: value.to(kind) if value.is_floating_point() else value
        for name, value in inputs.items()
    }


def _from_dummies(model: nn.Module) -> ExampleInputs | None:
    dummies = getattr(model, "dummy_inputs", None)
    if not isinstance(dummies, Mapping):
        return None
    inputs = _accepted(model, dummies)
    main = getattr(model, "main_input_name", None)
    if (
        not inputs
        or (isinstance(main, str) and main not in inputs)
        or not can_run(model, parse_inputs(inputs))
    ):
        return None
    return ExampleInputs(inputs, "the model's dummy_inputs")


def _from_guesses(model: nn.Module, generator: torch.Generator) -> ExampleInputs | None:
    if getattr(model, "main_input_name", None) is None:
        return None
    for specs in guesses(model):
        inputs = _fitted(
            model, {name: make_tensor(spec, generator) for name, spec in specs.items()}
        )
        if can_run(model, parse_inputs(inputs)):
            return ExampleInputs(inputs, "a guess by the configuration and forward's arguments")
    return None


def _from_shapes(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator
) -> ExampleInputs | None:
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
        inputs = _fitted(
            model, {name: make_tensor(spec, generator) for name, spec in specs.items()}
        )
        found.append(inputs)
        if can_run(model, parse_inputs(inputs)):
            return ExampleInputs(inputs, "noise")
    return ExampleInputs(found[0], "noise")


def _accepted(model: nn.Module, inputs: Mapping[str, Any]) -> Named:
    """Those inputs that the model's forward takes."""
    names = forward_args(model)
    takes_any = any(name.startswith("**") for name in names)
    return {
        name: value
        for name, value in inputs.items()
        if name in names or (takes_any and len(names) == 1)
    }


def named_tensors(model: nn.Module, inputs: ModelInputs) -> dict[str, torch.Tensor]:
    """The tensors among the inputs by the names of forward's arguments."""
    positional = dict(zip(forward_args(model), inputs.args, strict=False))
    return {
        name: value
        for name, value in {**positional, **inputs.kwargs}.items()
        if isinstance(value, torch.Tensor)
    }


def with_tensors(
    model: nn.Module, inputs: ModelInputs, changed: Mapping[str, torch.Tensor]
) -> ModelInputs:
    """The inputs with other tensors in some places."""
    names = list(forward_args(model))
    args = tuple(
        changed.get(names[place], value) if place < len(names) else value
        for place, value in enumerate(inputs.args)
    )
    return ModelInputs(
        args, {name: changed.get(name, value) for name, value in inputs.kwargs.items()}
    )


def resize_inputs(
    model: nn.Module,
    inputs: ModelInputs,
    shapes: Mapping[str, tuple[int, ...]],
    generator: torch.Generator,
) -> ModelInputs:
    """The inputs at the shapes asked for; a shape under the empty name is the main input's.

    An input of the same shape as a changed one changes with it (a mask with its tokens), and one
    of the same batch size takes the new batch size.
    """
    tensors = named_tensors(model, inputs)
    wanted = {_name(model, tensors, name): shape for name, shape in shapes.items()}
    changed: dict[str, torch.Tensor] = {}
    for name, shape in wanted.items():
        before = tensors[name].shape
        changed[name] = _resized(tensors[name], shape, generator)
        for other, tensor in tensors.items():
            if other in wanted or other in changed or not shape:
                continue
            if tensor.shape == before:
                changed[other] = _resized(tensor, shape, generator)
            elif tensor.dim() and before and tensor.shape[0] == before[0] != shape[0]:
                changed[other] = _resized(tensor, (shape[0], *tensor.shape[1:]), generator)
    return with_tensors(model, inputs, changed)


def _name(model: nn.Module, tensors: Mapping[str, Any], name: str) -> str:
    if not tensors:
        raise SourceError(
            "there is no input to give a shape to: none is a tensor by itself",
            hint="use --input-specs",
        )
    if name and name not in tensors:
        raise SourceError(
            f"there is no input {name!r} to give a shape to", hint=f"there is {', '.join(tensors)}"
        )
    if name:
        return name
    main = getattr(model, "main_input_name", None)
    return main if isinstance(main, str) and main in tensors else next(iter(tensors))


def _resized(
    tensor: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """The same values, repeated or cut along each axis; new ones of the same range for another rank."""
    if tensor.dim() != len(shape) or not tensor.numel():
        if not tensor.is_floating_point():
            raise SourceError(
                f"the shape {shape_text(shape)} does not fit an input of shape {shape_text(tensor.shape)}",
                hint="give as many sizes as the input has axes",
            )
        return make_tensor(InputSpec(shape, str(tensor.dtype).removeprefix("torch.")), generator)
    try:
        for axis, size in enumerate(shape):
            tensor = resized_along(tensor, axis, size)
    except (RuntimeError, MemoryError) as error:
        raise input_error(shape, str(tensor.dtype).removeprefix("torch."), error) from error
    return tensor


def resized_along(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """The same values, repeated or cut along one axis."""
    return tensor.index_select(axis, torch.arange(size) % tensor.shape[axis]).contiguous()
