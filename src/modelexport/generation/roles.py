"""Find out where the value of each input of a part comes from, by what `generate` passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from modelexport.capture.graph_inputs import INPUT_PREFIX
from modelexport.generation.parts import Observation, token_input
from modelexport.generation.records import ENCODE, MASK, OUTPUT_PREFIX, PREFILL, GenerationInput
from modelexport.generation.records import InputRole as Role

_OTHER = GenerationInput(Role.OTHER)


def find_roles(
    part: str, inputs: Iterable[str], outputs: Iterable[str], observed: Observation
) -> dict[str, GenerationInput]:
    """Find out where the value of each input of a part comes from.

    Args:
        part: The name of the part.
        inputs: The inputs of its graph.
        outputs: The outputs of the graphs of the steps.
        observed: What `generate` passed at each step.

    Returns:
        The origin of each input.
    """
    known = set(outputs)
    roles = {}
    for name in inputs:
        leaf = name.removeprefix(INPUT_PREFIX)
        output = next((one for one in (f"{OUTPUT_PREFIX}{leaf}", leaf) if one in known), None)
        if part == ENCODE:
            roles[name] = _prompt(observed.to_encode.get(leaf), leaf, observed)
        elif output is not None and leaf not in observed.given:
            roles[name] = GenerationInput(Role.STATE, output, empty=_empty_shape(leaf, observed))
        else:
            roles[name] = _step_role(leaf, observed, first=part == PREFILL)
    return _with_window(roles, observed.window)


def _with_window(roles: dict[str, GenerationInput], window: int) -> dict[str, GenerationInput]:
    """Let masks hide the tokens that the model's own cache drops.

    A model may rely on its cache for that, and for one that masks them itself it changes nothing.
    Not so if the model counts positions by the mask, in place of an input for them.
    """
    if not any(one.role is Role.POSITIONS for one in roles.values()):
        return roles
    return {
        name: GenerationInput(Role.MASK, window=window) if one.role is Role.MASK else one
        for name, one in roles.items()
    }


def _step_role(leaf: str, observed: Observation, first: bool) -> GenerationInput:
    """Return the role of an input of a step that is not the cache."""
    start, *later = observed.steps
    if leaf == token_input(start):
        return GenerationInput(Role.TOKENS)
    if first and not observed.encoded and leaf == MASK and start[leaf].dim() == 2:
        return GenerationInput(Role.MASK)
    if len(later) < 2 or any(leaf not in step for step in later):
        return _prompt(start.get(leaf), leaf, observed) if first else _OTHER
    before, after = later[0][leaf], later[1][leaf]
    if _grows_by_ones(before, after):
        return GenerationInput(Role.MASK)
    if before.shape != after.shape:
        return _OTHER
    past = start[token_input(start)].shape[1]
    if _is_causal(before, past) and _is_causal(after, past + 1):
        return GenerationInput(Role.CAUSAL_MASK)
    if not before.is_floating_point() and torch.equal(after, before + 1):
        return GenerationInput(
            Role.POSITIONS, start=_first_position(start.get(leaf), before, start)
        )
    if torch.equal(before, after):
        return _prompt(before, leaf, observed)
    return _OTHER


def _empty_shape(leaf: str, observed: Observation) -> tuple[int, ...]:
    """Return the shape of a state for one text without tokens."""
    seen = [step[leaf].shape for step in observed.steps if leaf in step]
    if not seen:
        return ()
    grows = [len(set(sizes)) > 1 for sizes in zip(*seen, strict=True)]
    sizes = [0 if one else size for one, size in zip(grows, seen[-1], strict=True)]
    rows = observed.steps[0][token_input(observed.steps[0])].shape[0]
    return tuple([1, *sizes[1:]] if sizes and sizes[0] == rows else sizes)


def _grows_by_ones(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.dim() != 2 or after.shape != (before.shape[0], before.shape[1] + 1):
        return False
    return torch.equal(after[:, :-1], before) and bool((after[:, -1] == 1).all())


def _is_causal(mask: torch.Tensor, past: int) -> bool:
    """Return whether the mask of one token shows all tokens before it, of the first text."""
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2] != 1:
        return False
    return torch.equal(mask[0, 0, 0].cpu(), torch.arange(mask.shape[3]) <= past)


def _first_position(
    first: torch.Tensor | None, second: torch.Tensor, step: Mapping[str, torch.Tensor]
) -> int:
    """Return the position of the first token; that of the second step less the tokens before."""
    if first is not None:
        return int(first.reshape(-1, first.shape[-1])[0, 0])
    return int(second.reshape(-1)[0]) - step[token_input(step)].shape[1]


def _prompt(value: torch.Tensor | None, leaf: str, observed: Observation) -> GenerationInput:
    """Return the role of a value that is the same at each step."""
    if value is None:
        return _OTHER
    for role, known in ((Role.RESULT, observed.encoded), (Role.PROMPT, observed.given)):
        # The same name first: two inputs may have the same values.
        for name in sorted(known, key=lambda name: not leaf.endswith(name)):
            if known[name].shape == value.shape and torch.equal(known[name].to(value), value):
                return GenerationInput(role, name)
    number = value.reshape(-1)[:1]
    if not value.is_floating_point() and value.numel() and bool((value == number).all()):
        return GenerationInput(Role.CONSTANT, start=int(number))
    return _OTHER
