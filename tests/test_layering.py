"""Rooms import in one direction, and reading never needs torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import modelexport
import quick
from modelexport.cli.main import COMMANDS
from modelexport.exporters import EXPORTERS
from modelexport.packages import EXTRAS
from zoo import ZOO

ROOT = Path(__file__).parents[1]
SOURCE = Path(modelexport.__file__).parent
ROOMS = [
    "errors",
    "packages",
    "exporters",
    "options",
    "option_values",
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
    "retagging",
    "profiling",
    "quantization",
    "viewing",
    "model_explorer",
    "request",
    "source",
    "staged_export",
    "pipeline",
    "generation",
    "source_export",
    "batch",
    "cli",
]
"""Each room may import from itself and from those before it."""
TORCH_ROOMS = {"capture", "source", "staged_export", "pipeline", "generation", "verification"}
HEAVY = ("torch", "onnxscript", "onnx_ir", "transformers", "onnxruntime", "ray")
COMMAND = "from modelexport.cli.main import main; main"

pytestmark = pytest.mark.must


def imported_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the modules that some statements import."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports when it is imported, not inside functions."""
    return imported_names(ast.parse(path.read_text()).body)


def source_imports() -> Iterator[tuple[str, str, str]]:
    """Yield each import of the source as (room, file, imported module)."""
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE)
        for name in sorted(imports(path)):
            yield file.parts[0].removesuffix(".py"), str(file), name


def test_only_some_rooms_import_torch() -> None:
    offences = [
        f"{file} imports {name}"
        for room, file, name in source_imports()
        if name.partition(".")[0] in HEAVY and room not in TORCH_ROOMS
    ]
    assert offences == []


def test_torch_is_not_imported_by_a_function_elsewhere() -> None:
    offences = []
    for path in sorted(SOURCE.rglob("*.py")):
        functions = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
        ]
        names = imported_names(each for function in functions for each in ast.walk(function))
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room not in TORCH_ROOMS and any(name.partition(".")[0] == "torch" for name in names):
            offences.append(str(path))
    assert offences == []


def test_rooms_import_in_one_direction() -> None:
    offences = []
    for room, file, name in source_imports():
        package, _, inner = name.partition(".")
        imported = inner.partition(".")[0]
        if package != "modelexport" or imported not in ROOMS or room in ("__init__", "__main__"):
            continue
        if room not in ROOMS:
            offences.append(f"{file} is in none of the rooms listed here")
        elif ROOMS.index(imported) > ROOMS.index(room):
            offences.append(f"{file} imports {name}")
    assert offences == []


def test_every_file_is_imported() -> None:
    """A file that nothing imports is left over from a change."""
    imported = {
        *(f"modelexport.cli.{place.partition(':')[0]}" for place, _ in COMMANDS.values()),
        *(exporter.capture for exporter in EXPORTERS),
        "modelexport.__main__",  # python -m modelexport
        "modelexport.model_explorer.main",  # model-explorer --extensions=modelexport.model_explorer
    }
    files = {}
    for path in sorted(SOURCE.rglob("*.py")):
        own = ".".join((SOURCE.name, *path.relative_to(SOURCE).with_suffix("").parts))
        imported |= imported_names(ast.walk(ast.parse(path.read_text()))) - {own}
        if path.name != "__init__.py":
            files[own] = path
    assert [str(path.relative_to(ROOT)) for own, path in files.items() if own not in imported] == []


def test_quick_names_what_exists() -> None:
    assert [file for file in quick.FILES if not (ROOT / file).exists()] == []
    assert {*quick.MODELS} <= {*ZOO}


@pytest.mark.parametrize(
    "code",
    [
        "import modelexport",
        "import modelexport; modelexport.load; modelexport.strip; modelexport.ExportStrategy",
        "import modelexport as m; m.analyze, m.validate, m.compare, m.extract_module_subgraph",
        "import modelexport as m; m.export_graphml, m.import_onnx, m.extract, m.partition",
        "import modelexport as m; m.select, m.quantize, m.measure_sensitivity",
        "import modelexport as m; m.to_functions, m.from_functions",
        f"{COMMAND}(['import-onnx', '--help'], standalone_mode=False)",
        f"{COMMAND}(['--help'], standalone_mode=False)",
        f"{COMMAND}(['export', '--help'], standalone_mode=False)",
        f"{COMMAND}(['demo', '--help'], standalone_mode=False)",
        "import modelexport.tagged.strip, modelexport.tagged.tables",
        "import modelexport.attribution.strategies",
    ],
)
def test_light_code_stays_light(code: str) -> None:
    check = f"import sys\n{code}\nassert not {{*{HEAVY!r}}} & {{*sys.modules}}"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def declared(*extras: str) -> set[str]:
    """Return the distributions that pyproject.toml requires, with those of some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    names = {re.split(r"[^\w.-]", line)[0].lower() for line in lines}
    own = (re.match(r"modelexport\[(.*)\]", line) for line in lines)
    implied = [extra for match in own if match for extra in match[1].split(",")]
    return names | declared(*implied) if implied else names


def imported_distributions(folder: Path) -> dict[str, set[str]]:
    """Return, for each package that the files of a folder import, the distributions with it."""
    trees = (ast.walk(ast.parse(path.read_text())) for path in folder.rglob("*.py"))
    names = {
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
        for name in names - sys.stdlib_module_names - {"modelexport"}
        if name in known
    }


def test_reading_needs_the_base_package_only() -> None:
    """What a file outside the rooms with torch imports is installed without any extra."""
    known, base = packages_distributions(), declared()
    offences = [
        f"{file} imports {name}"
        for room, file, name in source_imports()
        if room not in TORCH_ROOMS
        for package in [name.partition(".")[0]]
        if package not in sys.stdlib_module_names | {"modelexport", "__future__"}
        if not base & {distribution.lower() for distribution in known[package]}
    ]
    assert offences == []


def test_every_optional_package_is_in_its_extra() -> None:
    known = packages_distributions()
    for package, extra in EXTRAS.items():
        names = {distribution.lower() for distribution in known[package]}
        assert names & (declared(extra) - declared()), package


@pytest.mark.regression
@pytest.mark.parametrize(
    ("folder", "extras"),
    [("src", ("hf", "runtime", "ray")), ("tests", ("hf", "runtime", "ray", "dev"))],
)
def test_imports_are_declared(folder: str, extras: tuple[str, ...]) -> None:
    """An import that another package depends on breaks when that package drops it."""
    known = declared(*extras)
    missing = {
        name: distributions
        for name, distributions in imported_distributions(ROOT / folder).items()
        if not distributions & known
    }
    assert not missing
