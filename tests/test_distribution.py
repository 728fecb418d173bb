"""The wheel and the source distribution are complete, and so are the types of what is installed."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

import modelexport
from exports import shared_folder

ROOT = Path(__file__).parents[1]
UNTRACKED = (
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist",
    "node_modules", "demo-output",
)  # fmt: skip
PROGRAM = ROOT / "tests" / "typed_program.py"
INFO = f"modelexport-{modelexport.__version__}.dist-info"

pytestmark = pytest.mark.integration


@pytest.fixture
def built() -> Path:
    """Return a folder with both distributions, the wheel built from the source distribution."""

    def build(folder: Path) -> None:
        source = folder / "source"  # a copy: building leaves files
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*UNTRACKED))
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "source"]
        subprocess.run(command, check=True, cwd=folder, capture_output=True)

    return shared_folder("distribution", build) / "dist"


def package_files(folder: Path) -> set[str]:
    """Return the files of the package below a folder."""
    return {
        str(path.relative_to(folder))
        for path in (folder / "modelexport").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def open_wheel(built: Path) -> ZipFile:
    return ZipFile(next(built.glob("*.whl")))


def read_metadata(built: Path) -> Message:
    return HeaderParser().parsestr(open_wheel(built).read(f"{INFO}/METADATA").decode())


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    names = set(open_wheel(built).namelist())
    own = {name for name in names if not name.startswith(f"{INFO}/")}
    assert own == package_files(ROOT / "src")
    assert {f"modelexport/{name}" for name in ("py.typed", "viewing/bundle/page.js")} <= own
    assert any(name.startswith("modelexport/cli/demo_model/") for name in own)
    assert f"{INFO}/licenses/LICENSE" in names


def test_the_source_distribution_holds_what_the_wheel_is_built_from(built: Path) -> None:
    root = f"modelexport-{modelexport.__version__}"
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.removeprefix(f"{root}/") for name in archive.getnames()}
        files = {member.name.removeprefix(f"{root}/") for member in archive if member.isfile()}
    assert {name.partition("/")[0] for name in names - {root}} == {
        "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md",
        "pyproject.toml", "setup.cfg", "src", "viewer",
    }  # fmt: skip
    in_source = {name.removeprefix("src/") for name in files if name.startswith("src/")}
    assert package_files(ROOT / "src") == {
        name for name in in_source if not name.startswith("modelexport.egg-info/")
    }
    assert not [name for name in files if name.startswith(("viewer/test", "viewer/node_modules"))]


def test_the_metadata(built: Path) -> None:
    metadata = read_metadata(built)
    assert metadata["Version"] == modelexport.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = {"export", "hf", "runtime", "ray", "docs", "dev"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    required = metadata.get_all("Requires-Dist", [])
    base = {re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line}
    assert base == {"onnx", "msgspec", "click", "rich", "lxml", "numpy", "protobuf"}
    entry_points = open_wheel(built).read(f"{INFO}/entry_points.txt").decode()
    assert "modelexport = modelexport.cli.main:main" in entry_points


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    latest = re.search(r"^## (\S+) \((.*)\)$", changes, re.MULTILINE)
    assert latest is not None
    assert latest[1] == modelexport.__version__
    assert f"\nversion: {latest[1]}\ndate-released: {latest[2]}\n" in citation


@pytest.fixture
def installed(built: Path) -> Path:
    """Return an environment with the wheel, and with the other packages of this one."""

    def install(folder: Path) -> None:
        venv.create(folder / "env", symlinks=True)
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        open_wheel(built).extractall(site)
        (site / "others.pth").write_text(sysconfig.get_path("purelib"))

    return shared_folder("installed", install) / "env"


def run_checker(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a type checker in a folder, for the environment alone."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["PATH"] = os.pathsep.join([str(installed / "bin"), env["PATH"]])
    line = [sys.executable, "-m", *command]
    return subprocess.run(line, capture_output=True, text=True, cwd=folder, env=env)


def test_the_typed_program_uses_every_public_name() -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse(PROGRAM.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "m"
    }
    assert used == {*modelexport.__all__}


def test_mypy_accepts_a_strict_program(installed: Path, tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path / "program.py")
    options = ["--strict", "--python-executable", str(installed / "bin" / "python")]
    options += ["--cache-dir", str(ROOT / ".mypy_cache" / "program")]  # torch takes half a minute
    result = run_checker(installed, tmp_path, "mypy", *options, "program.py")
    assert result.returncode == 0, result.stdout + result.stderr


def run_pyright(installed: Path, folder: Path, *options: str) -> Any:
    pytest.importorskip("pyright", reason="pyright is not installed")
    if shutil.which("node") is None:
        pytest.skip("pyright needs Node.js")
    return json.loads(run_checker(installed, folder, "pyright", "--outputjson", *options).stdout)


def test_pyright_accepts_a_strict_program(installed: Path, tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path / "program.py")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    result = run_pyright(installed, tmp_path)
    assert result["summary"]["filesAnalyzed"] == 1
    assert [problem["message"] for problem in result["generalDiagnostics"]] == []


def test_every_type_is_known(installed: Path, tmp_path: Path) -> None:
    """Types that are missing, or that checkers may infer differently, are Any to some callers."""
    result = run_pyright(installed, tmp_path, "--verifytypes", "modelexport", "--ignoreexternal")
    completeness = result["typeCompleteness"]
    assert completeness["pyTypedPath"].startswith(str(installed))
    unknown = [symbol["name"] for symbol in completeness["symbols"] if not symbol["isTypeKnown"]]
    # Derived from classes of Model Explorer, which is neither a dependency nor typed.
    extension = "modelexport.model_explorer."
    assert [name for name in unknown if not name.startswith(extension)] == []
