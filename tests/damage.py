"""Exported files to damage: copies, and edits as another program would make them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from modelexport.tagged.records import sidecar_path


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.second(torch.relu(self.first(x)))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Net(nn.Module):
    """A few levels of modules, shown and hidden, one absorbed and one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(8, 3)
        self.spare = Block()

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(x)
        return torch.softmax(self.head(y + x), -1)


def net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net().eval(), torch.randn(2, 8)


Damage = Callable[[onnx.ModelProto], object]


def copied(path: Path, folder: Path) -> Path:
    """Copy an export, with the files beside it, into a folder of its own."""
    shutil.copytree(path.parent, folder)
    return folder / path.name


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(path: Path, damage: Damage) -> None:
    """Read, change and write a model."""
    model = onnx.load(path, load_external_data=False)
    damage(model)
    path.write_bytes(model.SerializeToString())


def edit_sidecar(path: Path, damage: Callable[[dict[str, Any]], object]) -> None:
    sidecar = sidecar_path(path)
    content = json.loads(sidecar.read_text())
    damage(content)
    sidecar.write_text(json.dumps(content))
