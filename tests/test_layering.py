"""Data moves one way, and reading never needs torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import modelexport

SOURCE = Path(modelexport.__file__).parent
ROOMS = [
    "errors",
    "garbage",
    "exporters",
    "options",
    "keywords",
    "modules",
    "graph",
    "onnx_file",
    "tagged",
    "capture",
    "attribution",
    "analysis",
    "report",
    "extraction",
    "graphml",
    "verification",
    "checks",
    "request",
    "source",
    "pipeline",
    "source_export",
    "batch",
    "cli",
]
"""Each room may import from itself and from those before it."""
TORCH_ROOMS = {"capture", "request", "source", "pipeline", "verification"}
HEAVY = ("torch", "transformers", "onnxruntime")

pytestmark = pytest.mark.must


def imports(path: Path) -> set[str]:
    """The modules that a file imports when it is imported, not those inside functions."""
    found = set()
    body = [node for node in ast.parse(path.read_text()).body if not _type_checking(node)]
    for node in body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


FILES = sorted(path for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_some_rooms_import_torch(path: Path) -> None:
    if any(name.partition(".")[0] in HEAVY for name in imports(path)):
        assert path.relative_to(SOURCE).parts[0].removesuffix(".py") in TORCH_ROOMS


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_arrows_point_one_way(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "modelexport" and len(parts) > 1 and parts[1] in ROOMS:
            assert ROOMS.index(parts[1]) <= ROOMS.index(room), f"{path.name} imports {name}"


@pytest.mark.parametrize(
    "code",
    [
        "import modelexport",
        "import modelexport; modelexport.load; modelexport.strip; modelexport.ExportStrategy",
        "import modelexport as m; m.analyze, m.validate, m.compare, m.extract_module_subgraph",
        "import modelexport as m; m.export_graphml, m.import_onnx, m.extract, m.partition",
        "from modelexport.cli.main import main; main(['import-onnx', '--help'], standalone_mode=False)",
        "from modelexport.cli.main import main; main(['--help'], standalone_mode=False)",
        "from modelexport.cli.main import main; main(['export', '--help'], standalone_mode=False)",
        "from modelexport.cli.main import main; main(['demo', '--help'], standalone_mode=False)",
        "import modelexport.tagged.strip, modelexport.tagged.tables, modelexport.attribution.strategies",
    ],
)
def test_light_code_stays_light(code: str) -> None:
    check = f"{code}\nimport sys\nheavy = [m for m in {HEAVY!r} if m in sys.modules]\nassert not heavy, heavy"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


ROOT = Path(__file__).parents[1]


def declared(*extras: str) -> set[str]:
    """Names of the distributions that pyproject.toml asks for, with those of some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    return {re.split(r"[^\w.-]", line)[0].lower() for line in wanted}


def imported_distributions(folder: Path) -> dict[str, set[str]]:
    """For each top-level name that the files of a folder import from elsewhere, the distributions that have it."""
    trees = (ast.walk(ast.parse(path.read_text())) for path in folder.rglob("*.py"))
    found = {
        name.partition(".")[0]
        for node in (node for tree in trees for node in tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    known = packages_distributions()
    return {
        name: {distribution.lower() for distribution in known[name]}
        for name in found - sys.stdlib_module_names - {"modelexport"}
        if name in known
    }


@pytest.mark.regression
@pytest.mark.parametrize(
    ("folder", "extras"),
    [("src", ("hf", "runtime", "ray")), ("tests", ("hf", "runtime", "ray", "dev"))],
)
def test_imports_are_declared(folder: str, extras: tuple[str, ...]) -> None:
    """An import that only another package's dependencies bring along breaks when that package drops it."""
    known = declared(*extras)
    missing = {
        name: found
        for name, found in imported_distributions(ROOT / folder).items()
        if not found & known
    }
    assert not missing
