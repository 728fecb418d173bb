"""Awkward modules: each is small, valid PyTorch that a careless map gets wrong.

`ZOO` maps a name to a factory of (model, example inputs). `TORCH_CANNOT` names what torch itself
cannot export; everything else has to work with both exporters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = tuple[nn.Module, Any]
ZOO: dict[str, Callable[[], Example]] = {}
TORCH_CANNOT: dict[str, set[str]] = {"dynamo": set(), "torchscript": set()}


def animal(*cannot: str) -> Callable[[Callable[[], Example]], Callable[[], Example]]:
    def register(factory: Callable[[], Example]) -> Callable[[], Example]:
        ZOO[factory.__name__] = factory
        for exporter in cannot:
            TORCH_CANNOT[exporter].add(factory.__name__)
        return factory

    return register


def distinct(model: nn.Module, seed: int = 7) -> nn.Module:
    """Give every parameter and running statistic random values, so that none can be merged."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class TwiceBesideOne(nn.Module):
    """`ln` runs twice beside a real `ln_1`: a scope called ln_1 may be either."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(8)
        self.ln_1 = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln_1(self.fc(self.ln(self.ln(x)))) + 1


@animal()
def ln_twice_beside_ln_1() -> Example:
    return TwiceBesideOne(), (x(2, 8),)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.fc(x)))


class ThreeTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


@animal()
def block_three_times() -> Example:
    return ThreeTimes(), x(2, 8)


class TwoNames(nn.Module):
    """One object under two names, called by both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = self.first
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x) * 2))


@animal()
def same_object_two_names() -> Example:
    return TwoNames(), (x(2, 8),)


class TwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(2))
        self.up = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.down:
            x = block(x)
        for block in reversed(self.up):
            x = block(x)
        return x


@animal()
def two_module_lists() -> Example:
    return TwoLists(), (x(2, 8),)


def _other_block() -> type[nn.Module]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((8,), 1.5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x * self.scale)

    return Block


class TwoClassesOneName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = _other_block()()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@animal()
def two_classes_one_name() -> Example:
    return TwoClassesOneName(), (x(2, 8),)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.ReLU()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.fc(x))) * 2


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.yes = Branch()
        self.no = Branch()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return torch.cond(x.sum() > 0, lambda v: self.yes(v), lambda v: self.no(v), (x,)) + 1


@animal("torchscript")
def conditional_bodies() -> Example:
    return Conditional(), (x(2, 8),)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, (hidden, _) = self.lstm(x)
        return self.head(out), hidden


@animal()
def lstm() -> Example:
    return Recurrent(), (x(2, 5, 8),)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.gru(x)
        return self.cell(out[:, -1], hidden[0])


@animal()
def gru_and_cell() -> Example:
    return Gated(), (x(2, 4, 8),)


@animal()
def sequential_root() -> Example:
    return nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 2)
    ), (x(2, 8),)


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 8)

    def forward(self, *, value: Tensor, gate: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        gated = torch.sigmoid(self.gate(gate))
        return {"zeta": self.fc(value) * gated * scale, "alpha": gated}


@animal()
def keyword_only_forward() -> Example:
    return KeywordOnly(), {"value": x(2, 8), "gate": x(2, 8) + 1}


class OddKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"a/b": Block(), "a b": Block(), "größe": Block(), "a%2Fb": Block()}
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


@animal()
def module_dict_odd_keys() -> Example:
    return OddKeys(), (x(2, 8),)


class Nest(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner: nn.Module = Nest(depth - 1) if depth else nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


@animal()
def sixty_levels() -> Example:
    return Nest(60), (x(2, 8),)


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


class Forwarder(nn.Module):
    """Calls a module that is not its child."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, helper: nn.Module) -> Tensor:
        return helper(self.fc(x)) * 2


class Lends(nn.Module):
    """Two helpers of one class and one local name, run by modules elsewhere in the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleDict({"helper": nn.Linear(8, 8)})
        self.right = nn.ModuleDict({"helper": nn.Linear(8, 8)})
        self.runner = Forwarder()

    def forward(self, x: Tensor) -> Tensor:
        x = self.runner(x, self.right["helper"])
        return self.runner(x, self.left["helper"])


@animal()
def lent_modules() -> Example:
    return Lends(), (x(2, 8),)


class Grandchild(nn.Module):
    """The root calls modules below its children."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleDict({"fc": nn.Linear(8, 8)})
        self.b = nn.ModuleDict({"fc": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        return self.b["fc"](torch.relu(self.a["fc"](x)))


@animal()
def called_past_the_parent() -> Example:
    return Grandchild(), (x(2, 8),)


@dataclass
class Result:
    score: Tensor
    cache: object
    hidden: tuple[Tensor, ...]


class Cache:
    pass


class MixedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Result:
        y = self.fc(x)
        return Result(y.sum(-1), Cache(), (y, torch.relu(y)))


@animal()
def outputs_not_tensors() -> Example:
    return MixedOutput(), (x(2, 8),)


class Counting(nn.Module):
    """Keeps state in forward: a counter, and the last value seen."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.last = y
        return torch.relu(y)


@animal()
def keeps_state() -> Example:
    return Counting(), (x(2, 8),)


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


@animal()
def encoder_layer() -> Example:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (x(2, 5, 16),)


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.norm(x + y)


@animal()
def multi_head_attention() -> Example:
    return OwnAttention(), (x(2, 5, 16),)


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


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(4, 8)

    def forward(self, pair: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        return (self.a(pair[0]) + self.b(pair[1])) * mask


@animal()
def nested_inputs() -> Example:
    return TwoInputs(), ((x(2, 8), x(2, 4)), torch.ones(2, 8))


class Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.extra = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        return self.extra[1:](x)


@animal()
def sliced_lists() -> Example:
    return Slices(), (x(2, 8),)


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


@animal()
def one_leaf_root() -> Example:
    return nn.Linear(8, 4), (x(2, 8),)


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


class StepByStep(nn.Module):
    """One cell that runs along the time axis, with sizes that nothing needs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for step in range(x.shape[1]):
            state = torch.tanh(self.cell(x[:, step] + state))
        return state


@animal()
def cell_in_a_loop() -> Example:
    return StepByStep(), (x(2, 4, 8),)


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


@animal()
def hook_changes_the_output() -> Example:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: output * 3 + 1)
    return model, (x(2, 8),)


class HookedBefore(nn.Module):
    """A hook runs another module before this one's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.second.register_forward_pre_hook(lambda module, args: (self.first(args[0]),))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) * 2


@animal()
def hook_calls_a_module() -> Example:
    return HookedBefore(), (x(2, 8),)


class CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        return x if depth == 0 else self(torch.tanh(self.fc(x)), depth - 1) * 2


@animal()
def recursive_root() -> Example:
    return CallsItself(), (x(2, 8),)


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


class BranchesWithoutWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.yes = nn.ReLU()
        self.no = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.cond(y.sum() > 0, lambda v: self.yes(v), lambda v: self.no(v), (y,))


@animal("torchscript")
def conditional_without_weights() -> Example:
    return BranchesWithoutWeights(), (x(2, 8),)


class TakesPlainValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, shape: list[int], flag: bool = False) -> Tensor:
        y = self.fc(x).reshape(shape)
        return -y if flag else y


@animal("torchscript")
def plain_values_as_inputs() -> Example:
    return TakesPlainValues(), {"x": x(2, 8), "shape": [4, 4], "flag": True}


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


class HasDefaultNumbers(nn.Module):
    """The tracer would turn the numbers into inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 2.0, keep: int = 3) -> Tensor:
        return (self.fc(x) * scale)[:, :keep]


@animal()
def default_numbers() -> Example:
    return HasDefaultNumbers(), {"x": x(2, 8)}


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


class PlainRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.rnn(x)
        return self.fc(y), state


@animal()
def plain_recurrent() -> Example:
    return PlainRecurrent(), (x(5, 2, 8),)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.fc(x).chunk(2, -1)


class Extremes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        return least, most


class ReadsOneOfSeveral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halves = Halves()
        self.extremes = Extremes()

    def forward(self, x: Tensor) -> Tensor:
        second = self.halves(x)[1]
        return second.relu() * self.extremes(second)[1]


@animal()
def one_of_several_results() -> Example:
    return ReadsOneOfSeveral(), (x(2, 8),)


class HoldsATracedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Deprecated; the category of the warning depends on the version of torch.
        with warnings.catch_warnings(action="ignore"):
            self.traced = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), x(2, 8))
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.traced(x))


@animal("torchscript")
def holds_a_traced_module() -> Example:
    return HoldsATracedModule(), (x(2, 8),)


class KeysLikeInnerNames(nn.Module):
    """Keys that the graph already uses: an input, an initializer, operations."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        centred = x - x.mean(-1, keepdim=True)
        y = self.fc(centred)
        return {
            "mean": y,
            "x": self.gate(x).relu(),
            "fc.weight": y * 2,
            "linear": y + 1,
            "": y - 1,
            "0": y.tanh(),
        }


@animal()
def keys_like_inner_names() -> Example:
    return KeysLikeInnerNames(), (x(2, 8),)


class TakesADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, scale: Tensor, fields: dict[str, Tensor]) -> Tensor:
        return self.fc(fields["left"]) * scale + fields["right"]


@animal()
def dict_at_the_end() -> Example:
    return TakesADict(), (x(1), {"left": x(2, 8), "right": x(2, 8) + 1})


class TakesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.fc(first) * second


@animal()
def keywords_out_of_order() -> Example:
    return TakesTwo(), {"second": x(2, 1), "first": x(2, 8)}


import zoo_ownership  # noqa: E402, F401 - it adds to the zoo
