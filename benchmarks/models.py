"""The models to measure: BERT at two sizes, tiny architectures, and towers of many modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from architectures import ARCHITECTURES

SIZES = {
    "bert-tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
    },
    "bert-base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
}


def bert(size: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build a BERT with random weights, and its inputs."""
    torch.manual_seed(0)
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModel.from_config(transformers.BertConfig(**SIZES[size])).eval()
    tokens = torch.randint(0, 30522, (1, 16))
    mask = torch.ones(1, 16, dtype=torch.long)
    # Both exporters take these two positional arguments without a wrapper.
    forward = model.forward
    model.forward = lambda input_ids, attention_mask: tuple(
        forward(input_ids, attention_mask).values()
    )
    return model, (tokens, mask)


class Unit(nn.Module):
    """Four modules: itself, and three that produce one node each."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.fc(x)))


class Tower(nn.Module):
    """A sequence of units."""

    def __init__(self, modules: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(modules // 4))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def tower(modules: int) -> tuple[nn.Module, Any]:
    """Build a tower of this many modules, and its inputs."""
    torch.manual_seed(0)
    return Tower(modules).eval(), (torch.randn(1, 4),)


def tiny(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build an architecture of the tests with positional inputs, which a plain export accepts."""
    model, inputs = ARCHITECTURES[name]()
    forward, names = model.forward, tuple(inputs)
    model.forward = lambda *values: tuple(forward(**dict(zip(names, values, strict=True))).values())
    return model, tuple(inputs.values())


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "bert-tiny": partial(bert, "bert-tiny"),
    **{f"{name}, tiny": partial(tiny, name) for name in ("t5", "vit", "resnet")},
    "a tower of 500 modules": partial(tower, 500),
    "bert-base": partial(bert, "bert-base"),
}
