"""Split a generative model into parts, and observe how `generate` feeds them."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from modelexport.capture.model_state import preserve_model, silence_torch, swap_attributes
from modelexport.capture.pytrees import is_tree, named_tensors, register_caches
from modelexport.capture.transformers_exporter import import_exporters
from modelexport.errors import ArgumentError, ModelRunError, first_line
from modelexport.generation.caches import common_window, growing_cache, slides
from modelexport.generation.records import (
    CACHE,
    DECODE,
    DECODER_TOKENS,
    ENCODE,
    PREFILL,
    TOKENS,
    TokenIds,
)
from modelexport.option_values import spell_option

_STEPS = 3
"""How many steps of `generate` the exporter captures: the first one, and two more to merge."""

_CHANGES_SCORES = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_eos_token_id"),
    *("repetition_penalty", "no_repeat_ngram_size", "min_length", "min_new_tokens"),
)
"""Fields of the configuration of `generate` by which not the token of the highest score follows."""

Leaves = dict[str, torch.Tensor]
"""Tensors by their path in the arguments of `forward`."""


class ModelPart(NamedTuple):
    """A module to export, and the example inputs that `generate` gave it."""

    name: str
    model: nn.Module
    inputs: dict[str, Any]


class Observation(NamedTuple):
    """What `generate` passed to the model and to its encoder."""

    given: Leaves
    """What `generate` itself was given."""
    steps: tuple[Leaves, ...]
    """What each step passed, one token at a time after the first one."""
    to_encode: Leaves
    """What `generate` passed to the module that encodes the prompt; nothing without one."""
    encoded: Leaves
    """What that module returned."""
    window: int = 0
    """How many tokens the model's own cache keeps in all of its layers; 0 for all tokens."""


class SplitModel(NamedTuple):
    """The parts of a model in the order in which they run, and how `generate` feeds them."""

    parts: tuple[ModelPart, ...]
    observed: Observation


def check_can_generate(model: nn.Module) -> None:
    """Check that a model is one of transformers that generates text.

    Raises:
        ArgumentError: It is not.
    """
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        raise ArgumentError(
            f"{type(model).__name__} does not generate text: it has no `generate`",
            hint="load it with its language-model head, for example --task text-generation",
        )


def split_model(
    model: nn.Module, inputs: Mapping[str, Any], max_cache_length: int | None = None
) -> SplitModel:
    """Split a model into the parts that transformers' exporter exports for generation.

    Args:
        model: The model, which is left as it was.
        inputs: What `model.generate` takes by name, at least two rows of it.
        max_cache_length: The number of tokens that a cache of fixed size holds; None for a cache
            that grows.

    Returns:
        The parts, each with the inputs that `generate` gave it.

    Raises:
        ArgumentError: The model cannot generate.
        ModelRunError: `generate` fails on these inputs.
    """
    check_can_generate(model)
    import_exporters()
    register_caches(model)
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    wanted = dict(inputs)
    with greedy_generation(model) as config:
        if max_cache_length is not None:
            wanted.update(_fixed_cache(model, wanted, config, max_cache_length))
        elif slides(model):
            # The length of a window that is not full yet would be fixed by the export. The model
            # masks what is outside the window, or the mask that `generate` passes does.
            wanted[CACHE] = growing_cache(has_encoder)
        with _observe(model, has_encoder) as observer:
            stages = _decompose(model, wanted, config, has_encoder)
        first = _first_step(observer.steps) if has_encoder else 0
        if first:
            stages = _stages_from(model, observer.steps[first:])
        steps = tuple(dict(named_tensors(step)) for step in observer.steps[first:][:_STEPS])
        _check_steps(model, steps)
        if max_cache_length is None and _is_recurrent(steps):
            # Two steps at once are another computation than one after the other.
            stages = _decompose(model, wanted, config, has_encoder, at_once=False)
    parts = [ModelPart(name, part, _caches_last(args)) for name, (part, args) in stages.items()]
    to_encode: Leaves = {}
    if has_encoder:
        encoder = ModelPart(ENCODE, *observer.encoder_call())
        to_encode = dict(named_tensors(encoder.inputs))
        parts.insert(0, encoder)
    given = dict(named_tensors(inputs))
    window = common_window(model)
    return SplitModel(tuple(parts), Observation(given, steps, to_encode, observer.encoded, window))


def _check_steps(model: nn.Module, steps: Sequence[Leaves]) -> None:
    """Raise an error unless each step after the first one takes the one token before it."""
    name, tokens = type(model).__name__, [step[token_input(step)] for step in steps]
    first, *later = (one.shape[1] for one in tokens)
    if tokens[0].dim() > 2:
        reason = f"{name} generates {tokens[0].shape[2]} sequences of tokens at once, not a text"
    elif later and later[0] > first:
        reason = f"{name} keeps no cache: generate() passes the whole text at each step"
    elif later and later[0] != 1:
        reason = f"{name} takes {later[0]} tokens at each step of generate(), not the last alone"
    else:
        return
    raise ArgumentError(reason, hint=f"leave {spell_option('generation')} out")


def _decompose(
    model: nn.Module, inputs: dict[str, Any], config: Any, has_encoder: bool, at_once: bool = True
) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Let transformers capture the inputs of each part; `at_once` for several tokens per step."""
    utils = importlib.import_module("transformers.exporters.utils")
    # The exporter of transformers takes an encoder for one of another modality than text.
    split = utils.decompose_prefill_decode if has_encoder else utils.decompose_for_generation
    try:
        stages: dict[str, tuple[nn.Module, dict[str, Any]]] = split(
            model, inputs, generation_config=config, multi_token_decode=at_once
        )
    except Exception as error:
        cause = error.__cause__ or error
        raise ModelRunError(
            f"generate() fails for {type(model).__name__}: {first_line(cause)}",
            hint="pass inputs that model.generate accepts",
        ) from error
    return stages


def _first_step(calls: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of the first call that is a step of generation: it passes a cache.

    `generate` may run a model before it, for example to find out the language of a sound.
    """
    numbers = (number for number, call in enumerate(calls) if call.get(CACHE) is not None)
    return next(numbers, 0)


def _stages_from(
    model: nn.Module, steps: Sequence[dict[str, Any]]
) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Make the parts as transformers does, from other calls than the first ones."""
    utils = importlib.import_module("transformers.exporters.utils")
    first, *later = (
        {name: value for name, value in step.items() if name != "logits_to_keep"}
        for step in steps[:_STEPS]
    )
    decode = utils._merge_decode_calls(copy.deepcopy(later))
    return {PREFILL: (copy.copy(model), first), DECODE: (copy.copy(model), decode)}


def _fixed_cache(model: Any, inputs: dict[str, Any], config: Any, length: int) -> dict[str, Any]:
    """Return an empty cache for a number of tokens.

    `generate` makes one without tensors, which the exporter would name wrongly: hence that of a
    later step, emptied.
    """
    hint = f"leave {spell_option('max_cache_length')} out"
    if model.config.is_encoder_decoder or slides(model):
        kind = f"the part {ENCODE}" if model.config.is_encoder_decoder else "a sliding window"
        raise ArgumentError(f"a model with {kind} has no cache of fixed size to export", hint=hint)
    # `generate` takes a greater one if the tokens of the steps do not fit.
    needed = inputs[TOKENS].shape[1] + _STEPS - 1 if TOKENS in inputs else 0
    if length < needed:
        raise ArgumentError(
            f"a cache of {length} tokens is too short for the example prompt: it needs {needed}",
            hint=f"pass a greater {spell_option('max_cache_length')}, or a shorter example",
        )
    static = copy.deepcopy(config)
    static.cache_implementation, static.max_cache_len = "static", length
    with _observe(model, has_encoder=False) as observer:
        _decompose(model, inputs, static, has_encoder=False)
    cache: Any = observer.steps[1].get(CACHE)
    if not is_tree(cache) or not getattr(cache, "is_compileable", False):
        name = type(model).__name__
        raise ArgumentError(f"{name} has no cache of fixed size", hint=hint)
    cache.reset()
    return {CACHE: cache}


def _is_recurrent(steps: Sequence[Leaves]) -> bool:
    """Return whether a step overwrites a state of fixed size, as state-space models do."""
    if len(steps) < _STEPS:
        return False
    before, after = steps[1:]
    return any(
        leaf.is_floating_point()
        and name in before
        and leaf.shape == before[name].shape
        and not torch.equal(leaf, before[name])
        for name, leaf in after.items()
    )


def _caches_last(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the inputs of a part: what may hold no tensor yet, as an empty cache, comes last.

    The exporter names inputs in their order after the model has run, when the cache is filled.
    Inputs behind an empty cache would get the names of its tensors.
    """
    ordered = sorted(inputs.items(), key=lambda item: not any(named_tensors(item[1])))
    return dict(ordered)


@contextmanager
def greedy_generation(model: Any) -> Iterator[Any]:
    """Let a model generate greedily, and yield the configuration to pass to `generate`.

    A configuration of the model may sample, search beams or forbid tokens; the model's own special
    tokens stay. A class with a `generate` of its own may need all of its configuration, and keeps
    it but for sampling, beams, and tokens that it forbids.
    """
    generation = importlib.import_module("transformers.generation")
    own = copy.deepcopy(model.generation_config)
    if type(model).generate is generation.GenerationMixin.generate:
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
        config = generation.GenerationConfig(**{name: getattr(own, name, None) for name in names})
    else:
        config = own
        for name in _CHANGES_SCORES:
            setattr(config, name, None)
    config.do_sample, config.num_beams, config.use_cache = False, 1, True
    if config.pad_token_id is None:
        eos = config.eos_token_id
        config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    with (
        silence_torch(verbose=False),
        preserve_model(model),
        swap_attributes(model, generation_config=copy.deepcopy(config)),
        torch.no_grad(),
    ):
        yield config


def read_token_ids(model: Any, split: SplitModel | None = None) -> TokenIds:
    """Read the special tokens of a model, and what `generate` began with."""
    config = model.generation_config
    eos = config.eos_token_id
    start: tuple[int, ...] = ()
    if split is not None and split.observed.encoded:
        tokens = split.observed.steps[0][token_input(split.observed.steps[0])]
        start = tuple(int(token) for token in tokens[0])
    pad = config.pad_token_id
    return TokenIds(
        bos=config.bos_token_id,
        eos=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        pad=pad[0] if isinstance(pad, list) else pad,
        decoder_start=start,
    )


def token_input(step: Mapping[str, torch.Tensor]) -> str:
    """Return the name under which transformers passes the tokens of a step.

    Raises:
        ModelRunError: It passes none.
    """
    for name in (DECODER_TOKENS, TOKENS):
        if name in step:
            return name
    raise ModelRunError("generate() passes no token ids to the model", hint=f"pass {TOKENS}")


class _Observer:
    """Forward hooks that copy what `generate` passes to the model and to its encoder."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.encoded: Leaves = {}
        self._encoder: tuple[nn.Module, dict[str, Any]] | None = None

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.steps.append(copy.deepcopy(kwargs))

    def before_encoder(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._generates():
            return
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        call: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            call.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        self._encoder = (module, copy.deepcopy(call))

    def after_encoder(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._generates():
            self.encoded = {name: tensor.clone() for name, tensor in named_tensors(output)}

    def _generates(self) -> bool:
        """Return whether a step has run; what is encoded later is another stretch of the input."""
        return any(step.get(CACHE) is not None for step in self.steps)

    def encoder_call(self) -> tuple[nn.Module, dict[str, Any]]:
        if self._encoder is None:
            raise ModelRunError(
                "generate() did not encode the prompt in a module of its own",
                hint="this model cannot be split into parts",
            )
        return self._encoder


@contextmanager
def _observe(model: Any, has_encoder: bool) -> Iterator[_Observer]:
    observer = _Observer()
    handles = [model.register_forward_pre_hook(observer.before, with_kwargs=True)]
    if has_encoder:
        module = model.get_encoder()
        handles += [
            module.register_forward_pre_hook(observer.before_encoder, with_kwargs=True),
            module.register_forward_hook(observer.after_encoder),
        ]
    try:
        yield observer
    finally:
        for handle in handles:
            handle.remove()
