"""Make example inputs for a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram

# Private by its name only: torch's own way to flatten nested arguments.
from torch.utils._pytree import tree_flatten, tree_unflatten

from modelexport.capture.inputs import (
    ModelInputs,
    bind_inputs,
    can_run,
    check_model_runs,
    name_inputs,
    parse_inputs,
)
from modelexport.capture.module_tree import forward_args, named_args
from modelexport.capture.pytrees import holds_tree, named_leaves
from modelexport.errors import SourceError
from modelexport.option_values import spell_option
from modelexport.source.huggingface import find_processors, process_examples
from modelexport.source.input_specs import (
    InputSpec,
    format_specs,
    guess_inputs,
    input_error,
    make_tensor,
    read_specs,
    shape_text,
    suggest_specs,
)
from modelexport.source.load import LoadedModel

NamedInputs = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


class ExampleInputs(NamedTuple):
    """Example inputs, where they come from, and how to make them at another size."""

    inputs: Any
    origin: str
    other_size: Callable[[], NamedInputs] | None = None
    """None if only resizing these gives another size."""


class InputRequest(NamedTuple):
    """What a user says about the inputs; the main input's shape has the empty name."""

    specs: Path | None = None
    text: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = {}


def make_example_inputs(source: LoadedModel, wanted: InputRequest, seed: int) -> ExampleInputs:
    """Make the inputs to export with, from the first origin that has any.

    Raises:
        SourceError: There are no inputs, or none as the user wants them.
        ModelRunError: The model does not run on the inputs that the user describes.
    """
    model = source.model
    if isinstance(model, ExportedProgram):
        if wanted != InputRequest():
            raise SourceError(
                f"{source.name} has its inputs in it", hint="leave the options about inputs out"
            )
        return ExampleInputs(None, "the program's own")
    generator = torch.Generator().manual_seed(seed)
    if wanted.specs is not None:
        return _from_specs(model, wanted, wanted.specs, generator)
    example = _from_processors(source, model, wanted.text)
    if example is None and wanted.text is not None:
        raise SourceError(
            f"there is no tokenizer to read {spell_option('input_text')} with",
            hint=f"use {spell_option('input_shapes')} or {spell_option('input_specs')}",
        )
    if example is None and source.inputs is not None:
        example = ExampleInputs(source.inputs, "the factory's own")
    example = (
        example
        or _from_dummies(model)
        or _from_guesses(model, generator)
        or _from_shapes(model, wanted.shapes, generator)
    )
    if example is None:
        raise _no_inputs(model)
    if not wanted.shapes:
        return example
    bound = bind_inputs(model, parse_inputs(example.inputs))
    resized = _resize_inputs(model, bound, wanted.shapes, generator)
    check_model_runs(model, resized)
    args, kwargs = resized.args, resized.kwargs
    inputs = (*args, kwargs) if args and kwargs else kwargs or args
    return ExampleInputs(inputs, f"{example.origin}, at the shape asked for")


def _no_inputs(model: nn.Module) -> SourceError:
    """Build the error for a model without inputs, with a specs file to start from."""
    # Without annotations, which fill a screen.
    parameters = [
        str(parameter.replace(annotation=parameter.empty))
        for parameter in inspect.signature(model.forward).parameters.values()
    ]
    return SourceError(
        f"no example inputs for {type(model).__name__}",
        hint=f"pass {spell_option('input_shapes')} or {spell_option('input_specs')}, "
        "or name a factory that returns the model and its inputs",
        details=[
            f"forward({', '.join(parameters)})",
            f"A specs file to start from, for {spell_option('input_specs')}:",
            *format_specs(suggest_specs(model)).splitlines(),
        ],
    )


def _from_specs(
    model: nn.Module, wanted: InputRequest, path: Path, generator: torch.Generator
) -> ExampleInputs:
    """Make the inputs that a specs file describes."""
    for option, value in (("input_text", wanted.text), ("input_shapes", wanted.shapes)):
        if value:
            raise SourceError(
                f"{spell_option(option)} and {spell_option('input_specs')} "
                "both say what the inputs are",
                hint="give one of them",
            )
    specs = read_specs(path)
    arguments = forward_args(model)
    takes_any = any(name.startswith("**") for name in arguments)
    unknown = [] if takes_any else [name for name in specs if name not in arguments]
    if unknown:
        known = ", ".join(name for name in arguments if not name.startswith("*"))
        raise SourceError(
            f"{path} describes {unknown[0]!r}, which {type(model).__name__}.forward does not take",
            hint=f"it takes {known}",
        )
    missing = [name for name, needed in named_args(model).items() if needed and name not in specs]
    if missing:
        raise SourceError(
            f"{path} lacks {', '.join(missing)}, which {type(model).__name__}.forward needs",
            hint="describe it as well",
            details=format_specs(suggest_specs(model)).splitlines(),
        )
    inputs = {
        name: make_tensor(spec, generator) if isinstance(spec, InputSpec) else spec
        for name, spec in specs.items()
    }
    check_model_runs(model, parse_inputs(inputs))
    return ExampleInputs(inputs, f"--input-specs {path.name}")


def _from_processors(
    source: LoadedModel, model: nn.Module, text: str | None
) -> ExampleInputs | None:
    """Make inputs with the processors that come with the model."""
    if source.hub is None:
        return None
    processors = find_processors(source.hub)
    if text is not None and processors.tokenizer is None:
        return None

    def make(batch: int = 1, longer: bool = False) -> tuple[NamedInputs, list[str]]:
        # A mask is of no use to a model that does not take the tensor it describes.
        outputs = [
            output
            for output in process_examples(processors, text, batch, longer)
            if output.processor == "processor"
            or _filter_accepted(model, {next(iter(output.tensors)): None})
        ]
        tensors = {name: tensor for output in outputs for name, tensor in output.tensors.items()}
        inputs = _filter_accepted(model, tensors)
        if inputs:
            inputs = _match_precision(model, _add_decoder_inputs(model, inputs))
        return inputs, [output.processor for output in outputs]

    inputs, names = make()
    if not inputs:
        return None
    return ExampleInputs(
        inputs, f"the model's {' and '.join(names)}", lambda: make(batch=2, longer=True)[0]
    )


def _add_decoder_inputs(model: nn.Module, inputs: NamedInputs) -> NamedInputs:
    """Add the tokens that a decoder starts from, which no processor makes."""
    name, config = "decoder_input_ids", getattr(model, "config", None)
    is_decoder = getattr(config, "is_encoder_decoder", False) and name in forward_args(model)
    if not is_decoder or name in inputs:
        return inputs
    tokens = inputs.get("input_ids")
    if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
        return {**inputs, name: tokens[:, : max(2, tokens.shape[1] // 2)].clone()}
    starts = (getattr(config, field, None) for field in ("decoder_start_token_id", "bos_token_id"))
    start = next(filter(None, starts), 0)
    batch = next(iter(inputs.values())).shape[0]
    return {**inputs, name: torch.full((batch, 4), int(start))}


def _match_precision(model: nn.Module, inputs: NamedInputs) -> NamedInputs:
    """Cast float inputs to the dtype of the model's parameters, if those all have the same."""
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if len(dtypes) != 1:
        return inputs
    (dtype,) = dtypes
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }


def _from_dummies(model: nn.Module) -> ExampleInputs | None:
    """Take the model's own `dummy_inputs`, if it runs on them."""
    dummies = getattr(model, "dummy_inputs", None)
    if not isinstance(dummies, Mapping):
        return None
    inputs = _filter_accepted(model, dummies)
    main = getattr(model, "main_input_name", None)
    lacks_main = isinstance(main, str) and main not in inputs
    if not inputs or lacks_main or not can_run(model, parse_inputs(inputs)):
        return None
    return ExampleInputs(inputs, "the model's dummy_inputs")


def _from_guesses(model: nn.Module, generator: torch.Generator) -> ExampleInputs | None:
    """Take the first guess that the model runs on; only for models of transformers."""
    if getattr(model, "main_input_name", None) is None:
        return None
    inputs = _first_that_runs(model, guess_inputs(model), generator)
    if inputs is None:
        return None
    return ExampleInputs(inputs, "a guess by the configuration and forward's arguments")


def _from_shapes(
    model: nn.Module, shapes: Shapes, generator: torch.Generator
) -> ExampleInputs | None:
    """Make noise at the shapes that the user wants: floats, or tokens if only those work."""
    names = [name for name in forward_args(model) if not name.startswith("*")]
    if not shapes or not names:
        return None
    specs = [
        {name or names[0]: InputSpec(shape, dtype) for name, shape in shapes.items()}
        for dtype in ("float32", "int64")
    ]
    inputs = _first_that_runs(model, specs, generator)
    if inputs is None:  # running the model on these will give the error
        inputs = _make_inputs(model, specs[0], generator)
    return ExampleInputs(inputs, "noise")


def _first_that_runs(
    model: nn.Module, choices: Iterable[Mapping[str, InputSpec]], generator: torch.Generator
) -> NamedInputs | None:
    """Make inputs by each set of specs, and return the first that the model runs on."""
    for specs in choices:
        inputs = _make_inputs(model, specs, generator)
        if can_run(model, parse_inputs(inputs)):
            return inputs
    return None


def _make_inputs(
    model: nn.Module, specs: Mapping[str, InputSpec], generator: torch.Generator
) -> NamedInputs:
    """Make random inputs in the precision of the model."""
    tensors = {name: make_tensor(spec, generator) for name, spec in specs.items()}
    return _match_precision(model, tensors)


def _filter_accepted(model: nn.Module, inputs: Mapping[str, Any]) -> NamedInputs:
    """Keep the inputs that the model's forward takes."""
    arguments = forward_args(model)
    takes_any = len(arguments) == 1 and arguments[0].startswith("**")
    return {name: value for name, value in inputs.items() if takes_any or name in arguments}


def named_tensors(model: nn.Module, inputs: ModelInputs) -> dict[str, torch.Tensor]:
    """Return the tensors among the inputs by the names of forward's arguments.

    What an object such as a cache holds has the name that it has in the file.
    """
    return {
        leaf: item
        for name, value in name_inputs(model, inputs).items()
        if isinstance(value, torch.Tensor) or holds_tree(value)
        for leaf, item in named_leaves(name, value)
        if isinstance(item, torch.Tensor)
    }


def replace_tensors(
    model: nn.Module, inputs: ModelInputs, changed: Mapping[str, torch.Tensor]
) -> ModelInputs:
    """Replace inputs by the names of forward's arguments, and in objects by their own names."""

    def replace(name: str, value: Any) -> Any:
        if not holds_tree(value):
            return changed.get(name, value)
        leaves, spec = tree_flatten(value)
        names = [leaf for leaf, _ in named_leaves(name, value)]
        return tree_unflatten(map(changed.get, names, leaves), spec)

    names = forward_args(model)
    args = tuple(
        replace(names[index], value) if index < len(names) else value
        for index, value in enumerate(inputs.args)
    )
    return ModelInputs(args, {name: replace(name, value) for name, value in inputs.kwargs.items()})


def _resize_inputs(
    model: nn.Module, inputs: ModelInputs, shapes: Shapes, generator: torch.Generator
) -> ModelInputs:
    """Resize inputs to the shapes that the user wants.

    An input with the same shape as a resized one is resized with it, as a mask with its tokens, and
    one with the same batch size gets the new batch size.
    """
    tensors = named_tensors(model, inputs)
    wanted = {_input_name(model, tensors, name): shape for name, shape in shapes.items()}
    changed: dict[str, torch.Tensor] = {}
    for name, shape in wanted.items():
        before = tensors[name].shape
        changed[name] = _resize(tensors[name], shape, generator)
        for other, tensor in tensors.items():
            if other in wanted or other in changed or not shape:
                continue
            if tensor.shape == before:
                changed[other] = _resize(tensor, shape, generator)
            elif tensor.dim() and before and tensor.shape[0] == before[0] != shape[0]:
                changed[other] = _resize(tensor, (shape[0], *tensor.shape[1:]), generator)
    return replace_tensors(model, inputs, changed)


def _input_name(model: nn.Module, tensors: Mapping[str, Any], name: str) -> str:
    """Check the name of an input; the empty one is the main input's."""
    if not tensors:
        raise SourceError(
            "there is no input to give a shape to: none is a tensor by itself",
            hint=f"use {spell_option('input_specs')}",
        )
    if name and name not in tensors:
        raise SourceError(
            f"there is no input {name!r} to give a shape to", hint=f"there is {', '.join(tensors)}"
        )
    main = getattr(model, "main_input_name", None)
    return name or (main if isinstance(main, str) and main in tensors else next(iter(tensors)))


def _resize(
    tensor: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Repeat or cut the values along each axis; for another rank, make new ones."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dim() != len(shape) or not tensor.numel():
        if not tensor.is_floating_point():
            raise SourceError(
                f"the shape {shape_text(shape)} does not fit an input of shape "
                f"{shape_text(tensor.shape)}",
                hint="give as many sizes as the input has axes",
            )
        return make_tensor(InputSpec(shape, dtype), generator)
    try:
        for axis, size in enumerate(shape):
            tensor = resize_axis(tensor, axis, size)
    except (RuntimeError, MemoryError) as error:
        raise input_error(shape, dtype, error) from error
    return tensor


def resize_axis(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Repeat or cut the values of a tensor along one axis."""
    return tensor.index_select(axis, torch.arange(size) % tensor.shape[axis]).contiguous()
