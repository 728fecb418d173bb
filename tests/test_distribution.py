"""The wheel and the source distribution hold the package, all of it, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest

import modelexport
from exports import shared_folder

ROOT = Path(__file__).parents[1]
UNTRACKED = (
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist",
    "node_modules", "demo-output",
)  # fmt: skip
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
    assert set(metadata.get_all("Provides-Extra", [])) == {"export", "hf", "runtime", "ray", "dev"}
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
