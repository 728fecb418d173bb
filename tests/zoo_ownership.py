"""Modules whose nodes a map may attribute to others: results are removed, merged or fused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import Example, animal, x


class RootMeanSquare(nn.Module):
    """A norm of several operations, with or without a weight."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.weight = None if width is None else nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scaled if self.weight is None else self.weight * scaled


class Stack(nn.Module):
    """The norm is followed by a dropout, which does nothing, and that by the end of the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.final_norm = RootMeanSquare(8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.dropout(self.final_norm(self.fc(x)))}


class TwoStacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack()
        self.decoder = Stack()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        encoded = self.encoder(x)["hidden"]
        return self.decoder(encoded)["hidden"], encoded


@animal()
def norm_before_dropout() -> Example:
    return TwoStacks(), (x(2, 8),)


class NormsWithoutWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 24)
        self.b_norm, self.c_norm = RootMeanSquare(), RootMeanSquare()

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.fc(x).split(8, dim=-1)
        return a * self.b_norm(b) + self.c_norm(c)


@animal()
def norms_without_weights() -> Example:
    return nn.Sequential(NormsWithoutWeights(), nn.Linear(8, 8)), (x(2, 8),)


class Patches(nn.Module):
    """Ends in a permutation that the next module undoes, after adding an embedding of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 8, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 4, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.projection(x).permute(0, 2, 3, 1) + self.positions).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return (x + self.fc(self.norm(x))).permute(0, 3, 1, 2)


class Encoder(nn.Module):
    """A container whose last permutation cancels with the first one of the module after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1))


@animal()
def permutations_that_cancel() -> Example:
    return nn.Sequential(Patches(), Encoder(), ChannelsLast()), (x(1, 3, 8, 8),)


class Residual(nn.Module):
    """Ends in a step without effect."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.conv(x).tanh())


class BeginsWithAPad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class BeginsWithARoundTrip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.flatten(2).reshape(x.shape).transpose(1, 2).transpose(1, 2))


LAST_STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda x: x / 1.0,
    "multiplied": lambda x: x * 1.0,
    "added": lambda x: x + 0.0,
    "viewed": lambda x: x.view(x.shape),
}


def _register_steps_without_effect() -> None:
    for ending, step in LAST_STEPS.items():
        for beginning, following in {
            "pad": BeginsWithAPad,
            "round_trip": BeginsWithARoundTrip,
        }.items():

            def build(step: Any = step, following: Any = following) -> Example:
                return nn.Sequential(Residual(step), following()), (x(1, 4, 8, 8),)

            build.__name__ = f"{ending}_before_a_{beginning}"
            animal()(build)


_register_steps_without_effect()


class Renamed(nn.Module):
    """The last step has no effect, so that another module's node gets the name of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"result": self.dropout(self.fc(x)) * 1.0}


@animal()
def output_named_after_a_step_without_effect() -> Example:
    return Renamed(), (x(2, 8),)


class TransposesHalfWay(nn.Module):
    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.axes)


@animal()
def transposes_that_become_one() -> Example:
    layers = (
        nn.Linear(8, 8),
        TransposesHalfWay(1, 0, 2),
        TransposesHalfWay(0, 2, 1),
        nn.Linear(4, 4),
    )
    return nn.Sequential(*layers), (x(4, 3, 8),)


class SameInput(nn.Module):
    """Modules that do the same to the same input: an exporter does it once."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Tanh(), nn.Tanh()
        self.first, self.second = RootMeanSquare(), RootMeanSquare()
        self.ln_1, self.ln_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        tanhs = self.left(x) * self.right(x).sigmoid()
        return tanhs + self.first(x) * self.second(x).relu() + self.ln_1(x) * self.ln_2(x).relu()


@animal()
def twice_the_same() -> Example:
    return SameInput(), (x(2, 8),)


@animal()
def encoder_and_decoder_of_torch() -> Example:
    """The tracer fails on the first try: it makes tensors of the flags among forward's defaults."""
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    return model, {"src": x(1, 5, 16), "tgt": x(1, 5, 16) + 1}


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-0.5, 0.5) * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        low, high, two = (
            g.op("Constant", value_t=torch.tensor(value)) for value in (-0.5, 0.5, 2.0)
        )
        return g.op("Mul", g.op("Clip", x, low, high), two)


class AppliesAFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Clipped.apply(x)


@animal("dynamo")  # which has no function of that kind
def autograd_function() -> Example:
    return nn.Sequential(nn.Linear(8, 8), AppliesAFunction(), nn.Linear(8, 8)), (x(2, 8),)


def scaled_relu(x: Tensor) -> Tensor:
    return torch.relu(x) * 3.0


class CallsAScriptedFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self.function = torch.jit.script(scaled_relu)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@animal()
def scripted_function() -> Example:
    return nn.Sequential(nn.Linear(8, 8), CallsAScriptedFunction(), nn.Linear(8, 8)), (x(2, 8),)


class WithoutGradients(nn.Module):
    """A block in another gradient mode: dynamo makes it one operation, and inlines it later."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scores = self.query(x) * self.norm(self.key(x)).sigmoid()
            mask = scores > scores.mean()
        return self.out(x).masked_fill(mask, 0.0) + scores


@animal()
def modules_without_gradients() -> Example:
    return WithoutGradients(), (x(2, 8),)


class BetweenDropouts(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(self.drop(x)))


@animal()
def result_renamed_after_copies() -> Example:
    """The exporter gives the result of the tanh the name of the last of the copies after it."""
    last = BetweenDropouts(BetweenDropouts(nn.Tanh()))
    return BetweenDropouts(nn.Sequential(nn.Linear(8, 8), last)), (x(2, 8),)


class UsesItsSine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * 2 + x


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class ReturnsTheSineToo(nn.Module):
    """What the last module returns is merged into an operation of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.first, self.second = UsesItsSine(), Sine()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return self.first(y), self.second(y)


@animal()
def output_merged_into_another_operation() -> Example:
    return ReturnsTheSineToo(), (x(2, 8),)


@animal()
def relu_fused_into_a_clip() -> Example:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Hardtanh(-1, 2), nn.Tanh()), (x(2, 8),)
