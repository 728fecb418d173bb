"""Where the inputs of a part come from, by what `generate` passed at each step."""

from __future__ import annotations

import pytest
import torch

from modelexport.generation.parts import Observation
from modelexport.generation.records import GenerationInput
from modelexport.generation.records import InputRole as Role
from modelexport.generation.roles import find_roles
from modelexport.generation.run import step_mask

pytestmark = pytest.mark.sanity


def steps(**inputs: list[torch.Tensor]) -> Observation:
    """Return three steps with a prompt of four tokens in two rows, and further inputs."""
    tokens = [torch.randint(5, 9, (2, count)) for count in (4, 1, 1)]
    all_inputs = {"input_ids": tokens, **inputs}
    return Observation(
        given={"input_ids": tokens[0]},
        steps=tuple(
            {name: values[step] for name, values in all_inputs.items()} for step in range(3)
        ),
        to_encode={},
        encoded={},
    )


def role(observed: Observation, name: str = "x", outputs: tuple[str, ...] = ()) -> GenerationInput:
    return find_roles("decode", [name], outputs, observed)[name]


def test_tokens_and_masks() -> None:
    grows = steps(x=[torch.ones(2, size, dtype=torch.long) for size in (4, 5, 6)])
    assert role(grows).role == Role.MASK
    assert role(grows, "input_ids").role == Role.TOKENS
    zeros = steps(x=[torch.zeros(2, size, dtype=torch.long) for size in (4, 5, 6)])
    assert role(zeros).role == Role.OTHER


def test_a_mask_hides_what_the_cache_drops_if_positions_are_an_input() -> None:
    observed = steps(
        x=[torch.ones(2, size, dtype=torch.long) for size in (4, 5, 6)],
        y=[one.expand(2, -1) for one in (torch.arange(4), torch.tensor([4]), torch.tensor([5]))],
    )._replace(window=3)
    assert role(observed) == GenerationInput(Role.MASK)
    found = find_roles("decode", ["x", "y"], (), observed)
    assert found["x"] == GenerationInput(Role.MASK, window=3)


@pytest.mark.parametrize(
    ("window", "past", "expected"),
    [(0, 5, [1] * 6), (3, 0, [1]), (3, 2, [1, 1, 1]), (3, 5, [0, 0, 0, 1, 1, 1])],
)
def test_the_mask_of_a_step(window: int, past: int, expected: list[int]) -> None:
    assert step_mask(window, past, 1).tolist() == [expected]


@pytest.mark.parametrize("first", [0, 2])
def test_positions(first: int) -> None:
    numbers = [torch.arange(4) + first, torch.tensor([4 + first]), torch.tensor([5 + first])]
    observed = steps(x=[one.expand(2, -1) for one in numbers])
    assert role(observed) == GenerationInput(Role.POSITIONS, start=first)


def test_a_mask_of_a_cache_of_fixed_size() -> None:
    rows = [(torch.arange(8) <= past).expand(2, 1, 1, 8) for past in (3, 4, 5)]
    assert role(steps(x=rows)).role == Role.CAUSAL_MASK
    wrong = [(torch.arange(8) <= 4).expand(2, 1, 1, 8)] * 3
    assert role(steps(x=wrong)).role == Role.OTHER


def test_a_state_is_the_output_of_the_step_before() -> None:
    observed = steps(x=[torch.rand(2, 3, size, 5) for size in (4, 5, 6)])
    expected = GenerationInput(Role.STATE, "output.x", empty=(1, 3, 0, 5))
    assert role(observed, "input.x", ("logits", "output.x")) == expected


def test_what_is_the_same_at_each_step() -> None:
    encoded, source = torch.rand(2, 7, 3), torch.randint(5, 9, (2, 7))
    observed = steps(x=[encoded] * 3, y=[source] * 3, z=[torch.zeros(2, 1, dtype=torch.long)] * 3)
    observed = observed._replace(given={"y": source}, encoded={"hidden": encoded})
    assert role(observed) == GenerationInput(Role.RESULT, "hidden")
    assert role(observed, "y") == GenerationInput(Role.PROMPT, "y")
    assert role(observed, "z") == GenerationInput(Role.CONSTANT)
