"""Exported files to damage: copies of one's own, and edits as another program would make them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from modelexport.tagged.sidecar import sidecar_path

Damage = Callable[[onnx.ModelProto], object]


def copied(path: Path, folder: Path) -> Path:
    """The same export in a folder of its own, with everything that lies beside it."""
    shutil.copytree(path.parent, folder)
    return folder / path.name


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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
