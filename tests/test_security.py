"""The promises of SECURITY.md: hostile content of a file is only ever printed, and escaped."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import modelexport
from modelexport.cli.main import main

pytestmark = pytest.mark.must

SOURCE = Path(modelexport.__file__).parent
HOSTILE = "a\x1b[31m\x9b2J\x07\u202e|`<script>=1+1"
"""A name that controls terminals, reverses text, and would end table cells, code and tags."""
STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a model whose names are all hostile: modules, nodes, values, doc_string."""
    folder = tmp_path_factory.mktemp("hostile")
    model = nn.Sequential()
    model.add_module(HOSTILE, nn.LayerNorm(4))
    model.add_module("=cmd", nn.Linear(4, 4))
    path = folder / "m.onnx"
    names = {"input_names": [HOSTILE], "output_names": [f"@{HOSTILE}"]}
    modelexport.export_model(
        model, torch.ones(1, 4), path, strategy="htp", with_report=True, **names
    )
    proto = onnx.load(str(path))
    for number, node in enumerate(proto.graph.node):
        node.name = f"{HOSTILE}{number}"
    proto.graph.doc_string = HOSTILE
    onnx.save(proto, str(path))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


COMMANDS: dict[str, Callable[[Path], list[object]]] = {
    "analyze": lambda path: ["analyze", path],
    "analyze detailed": lambda path: ["analyze", path, "--output-format", "detailed"],
    "analyze json": lambda path: ["analyze", path, "--output-format", "json"],
    "analyze csv": lambda path: ["analyze", path, "--output-format", "csv"],
    "analyze nothing": lambda path: ["analyze", path, "--filter-tag", HOSTILE],
    "validate": lambda path: ["validate", path, "--check-consistency"],
    "validate json": lambda path: [
        "validate",
        path,
        "--check-consistency",
        "--output-format",
        "json",
    ],
    "compare": lambda path: ["compare", path, path.with_name("other.onnx")],
    "compare json": lambda path: [
        "compare",
        path,
        path.with_name("other.onnx"),
        "--output-format",
        "json",
    ],
    "list": lambda path: ["extract", path, "--list"],
    "extract": lambda path: ["extract", path, HOSTILE, path.with_name("extracted.onnx")],
    "extract nothing": lambda path: [
        "extract",
        path,
        f"{HOSTILE}?",
        path.with_name("extracted.onnx"),
    ],
    "graphml": lambda path: ["export-graphml", path],
    "import": lambda path: [
        "import-onnx",
        path.with_name("m_hierarchical_graph.graphml"),
        path.with_name("back.onnx"),
    ],
    "strip": lambda path: ["strip", path, path.with_name("bare.onnx")],
    "no such file": lambda path: ["analyze", path.with_name(f"{HOSTILE[:12]}.onnx")],
    "no such source": lambda path: ["export", f"{HOSTILE}.py:make", path.with_name("x.onnx")],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_name_steers_a_terminal(name: str, hostile: Path) -> None:
    other = onnx.load(str(hostile))
    other.graph.node[0].attribute.add(name="x\x1b]0;title\x07", type=onnx.AttributeProto.INT, i=1)
    onnx.save(other, str(hostile.with_name("other.onnx")))
    if name == "import":
        run("export-graphml", hostile)
    result = run(*COMMANDS[name](hostile))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.stdout + result.stderr
    assert not STEERING.search(result.stdout), repr(STEERING.search(result.stdout))
    assert not STEERING.search(result.stderr)


def test_names_are_whole_in_json(hostile: Path) -> None:
    analysis = json.loads(run("analyze", hostile, "--output-format", "json").stdout)
    assert HOSTILE in [row["module"] for row in analysis["modules"]]


def test_no_cell_is_a_formula(hostile: Path) -> None:
    rows = list(csv.reader(io.StringIO(run("analyze", hostile, "--output-format", "csv").stdout)))
    assert any(cell.startswith("'=") for row in rows for cell in row)
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "+", "@"))]


def test_the_pages_written_have_no_markup_of_a_name(hostile: Path) -> None:
    page = hostile.with_name("m_report.md").read_text()
    assert "<script>" not in page
    assert not STEERING.search(page)
    run("export-graphml", hostile)
    drawing = hostile.with_name("m_hierarchical_graph.graphml").read_text()
    assert "<script>" not in drawing
    assert not STEERING.search(drawing.replace("\t", ""))


READING = """
import sys
from pathlib import Path
import modelexport
from modelexport.cli.main import main

def guard(event, arguments):
    if event.startswith(("socket.", "urllib.", "http.")):
        raise SystemExit(f"reads the network: {event} {arguments}")
    if event in ("pickle.find_class", "subprocess.Popen"):
        raise SystemExit(f"runs something: {event} {arguments}")

sys.addaudithook(guard)
path = sys.argv[1]
for words in (
    ["analyze", path],
    ["validate", path, "--check-consistency"],
    ["compare", path, path],
    ["extract", path, "--list"],
    ["extract", path, "0", path + ".extracted.onnx"],
    ["strip", path, path + ".bare.onnx"],
    ["export-graphml", path, path + ".graphml"],
    ["import-onnx", path + ".graphml", path + ".back.onnx"],
):
    main(words, standalone_mode=False)
assert "torch" not in sys.modules
print("read everything")
"""


def test_reading_reaches_neither_the_network_nor_a_pickle(tmp_path: Path) -> None:
    modelexport.export_model(
        nn.Sequential(nn.LayerNorm(4)), torch.ones(1, 4), tmp_path / "m.onnx", strategy="htp"
    )
    process = subprocess.run(
        [sys.executable, "-c", READING, str(tmp_path / "m.onnx")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout.endswith("read everything\n"), process.stdout + process.stderr


def test_nothing_in_the_source_unpickles_or_evaluates() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                wrong += [
                    f"{path}: {name}" for name in names if name in ("marshal", "dill", "shelve")
                ]
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
                wrong += [f"{path}: {node.attr}"] if node.attr != "UnpicklingError" else []
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if called in (
                    "eval",
                    "exec",
                    "os.system",
                    "torch.load",
                    "xml.etree.ElementTree.parse",
                ):
                    wrong.append(f"{path}: {called}")
                if called == "np.load" and options.get("allow_pickle") != "False":
                    wrong.append(f"{path}: np.load")
                if options.get("shell") == "True":
                    wrong.append(f"{path}: shell=True")
    assert wrong == []


class Secret(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a_telling_variable = self.layer(x)
        return torch.where(a_telling_variable > 0, a_telling_variable, x)


@pytest.mark.parametrize("strategy", ["fx", "htp"])
@pytest.mark.parametrize(
    "options", [{}, {"clean": True}, {"external_data": True}], ids=["tagged", "clean", "external"]
)
def test_scrubbing_takes_the_words_and_leaves_the_graph(
    strategy: str, options: dict[str, bool], tmp_path: Path
) -> None:
    model = Secret()
    plain, scrubbed = tmp_path / "plain" / "m.onnx", tmp_path / "scrubbed" / "m.onnx"
    for path in (plain, scrubbed):
        path.parent.mkdir()
        modelexport.export_model(
            model, torch.ones(1, 4), path, strategy=strategy, scrub=path == scrubbed, **options
        )
    here = str(Path(__file__).parent)
    if strategy == "fx":
        assert here.encode() in plain.read_bytes()
        assert b"a_telling_variable" in plain.read_bytes()
    for path in scrubbed.parent.iterdir():
        assert here.encode() not in path.read_bytes()
        assert b"a_telling_variable = " not in path.read_bytes()
    assert modelexport.validate(scrubbed, check_consistency=True).valid
    assert modelexport.compare(plain, scrubbed).same_topology
    bare = onnx.load(
        str(modelexport.strip(scrubbed, tmp_path / "bare.onnx")), load_external_data=False
    )
    expected = onnx.load(
        str(modelexport.strip(plain, tmp_path / "baseline.onnx")), load_external_data=False
    )
    _silence(expected)
    assert bare.SerializeToString(deterministic=True) == expected.SerializeToString(
        deterministic=True
    )
    tags = {
        node.key: tag.hierarchy_path
        for node, tag in modelexport.load(scrubbed).items()
        if tag is not None
    }
    assert tags == {
        node.key: tag.hierarchy_path
        for node, tag in modelexport.load(plain).items()
        if tag is not None
    }


def _silence(message: object) -> None:
    """Clear every doc_string and metadata entry below a message, field by field."""
    for field, value in message.ListFields():  # type: ignore[attr-defined]
        if field.name in ("doc_string", "metadata_props"):
            message.ClearField(field.name)  # type: ignore[attr-defined]
        elif field.message_type is not None:
            for one in value if field.is_repeated else [value]:
                _silence(one)


def test_a_scrubbed_fallback_does_not_quote_the_model(tmp_path: Path) -> None:
    class Falls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if bool(x.sum() > 0) else x  # a line that nobody should read

    with pytest.warns(modelexport.FallbackWarning) as caught:
        report = modelexport.export_model(
            Falls(), torch.ones(1, 4), tmp_path / "m.onnx", scrub=True, with_report=True
        )
    messages = [str(caught[0].message), *report.notes]
    assert len(messages) == 2
    assert not any(".py" in line or "nobody should read" in line for line in messages)
    assert report.exporter == "torchscript"
    assert report.fallback_reason is not None
    assert re.fullmatch(r"\w+", report.fallback_reason)
    for path in tmp_path.iterdir():
        assert b"nobody should read" not in path.read_bytes()


def test_scrubbing_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    return nn.Linear(4, 4), (torch.ones(1, 4),)\n"
    )
    result = run("export", f"{tmp_path / 'model.py'}:make", tmp_path / "m.onnx", "--scrub")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "m_hierarchy.json").read_text())["export"]["scrubbed"] is True
    assert b"stack_trace" not in (tmp_path / "m.onnx").read_bytes()
