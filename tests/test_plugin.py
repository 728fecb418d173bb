"""The example package with a strategy works once it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import modelexport
from modelexport.attribution.strategies import find_strategy
from modelexport.errors import ArgumentError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "examples" / "strategy_plugin"

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as pip installs it, built from a copy: building leaves files."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PACKAGE, folder / "source")
    flags = [
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--quiet",
        "--disable-pip-version-check",
    ]
    target = ["--target", str(folder / "site"), str(folder / "source")]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *flags, *target], check=True, cwd=folder
    )
    return folder / "site"


def test_its_strategy_is_found_and_used(installed: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(
        filter(None, [str(installed), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    )
    program = [sys.executable, "-c", "from modelexport.cli.main import main; main()"]
    line = [
        "export",
        f"{ROOT / 'examples' / 'small_vision.py'}:make_model",
        "m.onnx",
        "--strategy",
        "weights",
    ]
    exported = subprocess.run(
        [*program, *line],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert exported.returncode == 0, exported.stderr
    assert "strategy weights, exporter dynamo" in exported.stdout
    assert modelexport.validate(tmp_path / "m.onnx", check_consistency=True).valid
    found = modelexport.load(tmp_path / "m.onnx")
    assert found.coverage == 1.0
    assert {tag.hierarchy_method for tag in found.tags if tag is not None} == {
        "weights",
        "upstream",
    }
    activations = [
        tag.hierarchy_module
        for node, tag in found.items()
        if node.op_type == "Relu" and tag is not None
    ]
    assert activations == ["block.mix", "block.mix"], "they follow the layer in front of them"


def test_it_is_not_there_without_the_package() -> None:
    with pytest.raises(ArgumentError, match="there is no strategy 'weights'"):
        find_strategy("weights")
