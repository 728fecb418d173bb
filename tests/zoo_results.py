"""Modules whose results exporters fold, fuse, reorder or overwrite."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import Block, Example, animal, x


class WeightOnly(nn.Module):
    """`child` never runs: only its weight is used."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.fc(x), self.child.weight) * 3


@animal()
def child_only_by_weight() -> Example:
    return WeightOnly(), (x(2, 8),)


class ConvNorm(nn.Module):
    def __init__(self, padding: Any = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=padding, padding_mode="zeros", bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


@animal()
def conv_batch_norm() -> Example:
    return nn.Sequential(ConvNorm(), nn.Flatten(), nn.Linear(4 * 36, 2)), (x(1, 3, 6, 6),)


class PaddedConvNorm(nn.Module):
    """The padding stays a node of its own when the convolution is fused into the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) + 1


@animal()
def padded_conv_batch_norm() -> Example:
    return PaddedConvNorm(), (x(1, 3, 6, 6),)


class StartsTransposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.transpose(1, 2).contiguous())


class Scaler(nn.Module):
    """Computes its result with functions, not modules, and ends in a transposition."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 3).sigmoid().transpose(1, 2)


class CancellingTransposes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Scaler()
        self.b = StartsTransposed()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@animal()
def cancelling_transposes() -> Example:
    return CancellingTransposes(), (x(2, 4, 8),)


class Splitter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.fc(x).split(4, dim=-1)


class UsesSplit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split = Splitter()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.out(q * k) + v.chunk(2, dim=-1)[0].repeat(1, 2)


@animal()
def split_outputs() -> Example:
    return UsesSplit(), (x(2, 8),)


class Frozen(nn.Module):
    """Position codes that depend on nothing but the shape are folded into a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(6), persistent=False)
        self.embed = nn.Embedding(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.positions[: x.shape[1]])


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coder = Frozen()
        self.unused = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + self.coder(x))


@animal()
def folded_module() -> Example:
    return Positions(), (x(2, 4, 8),)


class ReturnsConstant(nn.Module):
    """Returns a tensor that no operation computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def forward(self) -> Tensor:
        return self.table


class AddsConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.table = ReturnsConstant()

    def forward(self, x: Tensor) -> Tensor:
        offset = self.table()
        return self.fc(x * 2) + offset


@animal()
def returns_a_constant() -> Example:
    return AddsConstant(), (x(2, 8),)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.block = Block()
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


@animal()
def tied_weights() -> Example:
    return Tied(), (torch.arange(6).reshape(2, 3),)


class Residual(nn.Module):
    """Pass-through children, in-place operations, a value that is both returned and consumed."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.block = Block()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.drop(self.block(self.skip(x)))
        z = self.act(y + x)
        z += 1
        return z, y


@animal()
def pass_through_children() -> Example:
    return Residual(), (x(2, 8),)


@animal()
def weight_norm() -> Example:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.GELU(), Block()
    ), (x(2, 8),)


class NoWeights(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x @ x.T, dim=-1)


@animal()
def no_parameters() -> Example:
    return NoWeights(), (x(3, 8),)


class Reshapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Flatten()
        self.back = nn.Unflatten(1, (4, 8))
        self.norm = nn.GroupNorm(2, 4)
        self.pool = nn.AdaptiveAvgPool1d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.norm(self.back(self.flat(x))))


@animal()
def flatten_unflatten() -> Example:
    return Reshapes(), (x(2, 4, 2, 4),)


class AsksForSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        for _ in range(150):
            x.size(0)
        return torch.tanh(self.fc(x))


@animal()
def many_dead_operations() -> Example:
    return AsksForSizes(), (x(2, 8),)


class Scales(nn.Module):
    """Returns a folded constant beside what it computes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = x.abs().sum(1, keepdim=True)
        return x / scale, torch.zeros_like(scale), scale


class UsesScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaler = Scales()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, offset, scale = self.scaler(x)
        return self.fc(y) + torch.cat([offset.abs().log1p(), scale.log(), scale, offset], -1)


@animal()
def folded_constant_beside_a_value() -> Example:
    return UsesScales(), (x(2, 8),)


class TurnsAtTheEnd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).transpose(1, 2)


class TurnsBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.transpose(1, 2))


class TurnsTwice(nn.Module):
    """The result of the first is not in the file: exporters remove both transpositions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TurnsAtTheEnd()
        self.second = TurnsBack()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@animal()
def turns_that_cancel() -> Example:
    return TurnsTwice(), (x(2, 3, 8),)


class WritesThroughAView(nn.Module):
    """Returns a value after a write to a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y[:, :2] *= 2
        return y


class SetsAColumn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).relu_()
        y[:, 0] = 1
        return y


@animal()
def writes_through_views() -> Example:
    return nn.Sequential(WritesThroughAView(), SetsAColumn(), nn.Tanh()), (x(2, 8),)


class ChangedByItsCaller(nn.Module):
    """The result of `inner` is the value before the caller wrote to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SetsAColumn()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        z = self.fc(y)
        y[0] += 1
        return y + z


@animal()
def changed_by_its_caller() -> Example:
    return ChangedByItsCaller(), (x(2, 8),)


class ReturnsAViewOfWhatChanges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        flat = y.view(-1)
        y.add_(1)
        return flat


@animal("torchscript")  # its file computes something else
def view_of_what_changes() -> Example:
    return nn.Sequential(ReturnsAViewOfWhatChanges(), nn.Tanh()), (x(2, 8),)
