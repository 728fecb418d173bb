"""Awkward modules: each is small, valid PyTorch that a careless map gets wrong.

`ZOO` maps a name to a factory of (model, example inputs). `TORCH_CANNOT` names what torch itself
cannot export; everything else has to work with both exporters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
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


@animal()
def sequential_root() -> Example:
    return nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 2)
    ), (x(2, 8),)


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


@animal()
def one_leaf_root() -> Example:
    return nn.Linear(8, 4), (x(2, 8),)


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


# These add to the zoo.
import zoo_ownership  # noqa: E402, F401
import zoo_results  # noqa: E402, F401
import zoo_signatures  # noqa: E402, F401
