"""Reading works where torch is not installed, and writing says what to install."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import modelexport
from language_models import exported
from modelexport.packages import EXTRAS
from quantization.models import export_stack

pytestmark = pytest.mark.must

WITH_RUNTIME = [package for package, extra in EXTRAS.items() if extra != "runtime"]
"""What is missing where only the extra `runtime` is installed."""
INSTALL = "(pip install 'modelexport[export]')"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with an exported file, and what the commands make of it first."""
    shutil.copytree(export_stack().parent, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "stack.onnx"
    modelexport.strip(path, tmp_path / "bare.onnx")
    modelexport.export_graphml(path, tmp_path / "stack.graphml")
    modelexport.to_functions(path, tmp_path / "functions.onnx")
    (tmp_path / "jobs.toml").write_text('[[jobs]]\nmodel = "some/model"\nname = "a"\n')
    return tmp_path


def run(folder: Path, code: str, *absent: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that cannot import some packages."""
    block = f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n"
    command = [sys.executable, "-c", block + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def run_command(folder: Path, line: str, *absent: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in such a process."""
    code = f"from modelexport.cli.main import main\nmain({line.split()!r})"
    return run(folder, code, *absent)


READ = (
    "--version",
    "--help",
    "export --help",
    "analyze stack.onnx",
    "analyze stack.onnx --output-format json",
    "validate stack.onnx --check-consistency",
    "compare bare.onnx stack.onnx",
    "extract stack.onnx blocks.1 block.onnx",
    "extract stack.onnx --list",
    "strip stack.onnx again.onnx",
    "export-graphml stack.onnx out.graphml",
    "import-onnx stack.graphml out.onnx",
    "select stack.onnx blocks.1",
    "view stack.onnx out.html",
    "view stack.onnx out.json --format model-explorer",
    "functions stack.onnx out.onnx",
    "functions functions.onnx out.onnx --inline",
    "retag stack.onnx bare.onnx out.onnx --no-run",
)
RUN = (
    "import-onnx stack.graphml out.onnx --validate",
    "profile stack.onnx",
    "retag stack.onnx bare.onnx out.onnx",
    "quantize stack.onnx out.onnx",
    "quantize stack.onnx out.onnx --to int8-static",
    "quantize stack.onnx out.onnx --to float16",
    "quantize stack.onnx --sensitivity",
)


@pytest.mark.parametrize("line", READ)
def test_reading_needs_no_extra(line: str, folder: Path) -> None:
    result = run_command(folder, line, *EXTRAS)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("line", RUN)
def test_running_a_file_needs_onnxruntime_only(line: str, folder: Path) -> None:
    result = run_command(folder, line, *WITH_RUNTIME)
    assert result.returncode == 0, result.stderr


EXPORT = (
    "export some/model out.onnx",
    "verify some/model stack.onnx",
    "batch jobs.toml",
    "demo out",
)


@pytest.mark.parametrize("line", EXPORT)
def test_a_command_that_needs_torch_says_what_to_install(line: str, folder: Path) -> None:
    result = run_command(folder, line, "torch")
    assert result.returncode == 2
    *steps, error = result.stderr.splitlines()
    assert error.startswith("Error: this needs torch: ")
    assert error.endswith(INSTALL)
    assert not [step for step in steps if "Error" in step or "Traceback" in step]


FACTORY = """
import torch

def make_model():
    return torch.nn.Linear(4, 4), torch.ones(1, 4)
"""


def test_torch_without_onnxscript_is_no_reason_to_fall_back(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(FACTORY)
    result = run_command(tmp_path, "export made.py:make_model out.onnx", "onnxscript")
    assert result.returncode == 2
    error = result.stderr.splitlines()[-1]
    assert error == f"Error: this needs onnxscript: No module named 'onnxscript' {INSTALL}"


def test_generate_needs_the_runtime_only() -> None:
    folder = exported("llama").parent
    line = "generate m_generation.json --input-ids 5,6 --max-new-tokens 2"
    done = run_command(folder, line, *WITH_RUNTIME)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split(",")) == 2


def test_every_public_name_can_be_had_or_says_what_to_install(tmp_path: Path) -> None:
    code = """
import modelexport
needing = []
for name in modelexport.__all__:
    try:
        getattr(modelexport, name)
    except ImportError as error:
        assert isinstance(error, modelexport.MissingPackageError)
        assert error.hint == "pip install 'modelexport[export]'"
        needing.append(name)
print(*needing)
"""
    result = run(tmp_path, code, *EXTRAS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [
        "HierarchyExporter", "UnifiedExporter", "export_generation", "export_model",
        "recommend_strategy", "verify",
    ]  # fmt: skip
