"""Generated pages and schemas are up to date and true, and quoted messages are in the source."""

from __future__ import annotations

import ast
import copy
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import onnx
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import modelexport
from language_models import exported
from modelexport.cli import demo
from modelexport.cli.main import main
from modelexport.tagged.records import METADATA_KEY
from pages import blocks, prose
from test_layering import ROOMS, TORCH_ROOMS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = Path(modelexport.__file__).parent
GENERATORS = sorted(path.stem for path in DOCS.glob("make_*.py"))

pytestmark = pytest.mark.sanity


def generator(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@pytest.mark.parametrize(
    "name", [name for name in GENERATORS if name != "make_bert_tiny"]
)  # test_bert_tiny.py has it
def test_generated_pages_are_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in generator(name, monkeypatch).pages().items():
        assert path.read_text() == text, f"{path.name} is out of date: make docs"


def test_make_docs_runs_all_generators() -> None:
    recipe = (ROOT / "Makefile").read_text()
    assert all(f"docs/{name}.py" in recipe for name in GENERATORS)


def test_every_schema_belongs_to_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    written = set(generator("make_schemas", monkeypatch).pages())
    assert set((DOCS / "schemas").iterdir()) <= written


def test_the_api_page_has_every_public_name() -> None:
    titles = re.findall(r"^### (\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert set(modelexport.__all__) <= set(titles)


def test_every_public_name_says_what_it_is() -> None:
    for name in modelexport.__all__:
        assert len(getattr(modelexport, name).__doc__ or "") > 20, name


def test_every_file_is_in_the_code_map() -> None:
    page = (DOCS / "architecture.md").read_text()
    rooms = dict(re.findall(r"\*\*(\S+)/\*\*(.*?)(?=\n\*\*|<!-- end)", page, re.DOTALL))
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parent.name or "src/modelexport"
        assert path.name == "__init__.py" or f"| `{path.name}` |" in rooms[room], path


def test_the_picture_shows_the_rooms_in_their_order() -> None:
    page = (DOCS / "architecture.md").read_text()
    picture = next(block.text for block in blocks(page) if block.text.startswith("room "))
    lines = [line.split() for line in picture.splitlines()[1:]]
    assert [line[0] for line in lines] == ROOMS
    assert {line[0] for line in lines if line[1] == "torch"} == TORCH_ROOMS


def test_the_drawing_shows_every_room(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = generator("make_drawing", monkeypatch)
    steps = [room for room, _ in drawing.WRITE]
    read = [room for room, _ in drawing.READ]
    assert sorted({*drawing.CALLERS, *steps, *read, *drawing.SHARED}) == sorted(ROOMS)
    assert drawing.TORCH == TORCH_ROOMS
    (svg,) = drawing.pages().values()
    assert all(re.search(rf">(\d\. )?{room}</text>", svg) for room in ROOMS)


def test_the_path_of_an_export_names_code_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = generator("make_drawing", monkeypatch)
    page = (DOCS / "architecture.md").read_text()
    path = page.partition("## The path of one export")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d\. \w+) \| (.*?) \|", path, re.MULTILINE)
    expected = [f"{number}. {room}" for number, (room, _) in enumerate(drawing.WRITE, 1)]
    assert [step for step, _ in rows] == expected
    named = re.findall(r"`([\w/]+\.py)`: `(\w+)\(\)`", path)
    assert len(named) > len(rows)
    for file, function in named:
        assert f"\ndef {function}(" in (SOURCE / file).read_text(), (file, function)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.norm(x))


class Model(nn.Module):
    """A block that runs twice, and a dropout that leaves nothing behind."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.dropout = nn.Dropout()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.dropout(self.block(self.block(x))), 3


Documents = dict[str, list[Any]]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    """Real JSON of every kind, by the name of its schema."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "specs.json").write_text(
        '{"x": {"shape": [2, 4], "dtype": "float32", "range": [0, 1]}}'
    )
    (folder / "makes.py").write_text(
        "from test_reference import Model\n\n\ndef model():\n    return Model().eval()\n"
    )
    for name, strategy in (("a", "fx"), ("b", "htp"), ("c", "usage_based")):
        model = [str(folder / "makes.py:model"), str(folder / f"{name}.onnx")]
        _run("export", *model, "--strategy", strategy, "--input-specs", folder / "specs.json")
    modelexport.extract(folder / "a.onnx", "block", folder / "piece.onnx", call=1)
    damaged = onnx.load(folder / "b.onnx")
    damaged.graph.node[0].doc_string = damaged.graph.node[-1].doc_string = ""
    onnx.save(damaged, folder / "damaged.onnx")

    jobs = [
        {
            "model": f"{folder / 'makes.py'}:model",
            "output": "d.onnx",
            "strategy": "htp",
            "input_specs": "specs.json",
        },
        {"model": f"{folder / 'makes.py'}:absent", "name": "e", "timeout": 60, "memory": "4 GiB"},
    ]
    (folder / "jobs.json").write_text(json.dumps({"jobs": jobs}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        results = modelexport.export_batch(folder / "jobs.json", workers=2)
    assert [result.status for result in results] == ["done", "failed"]

    files = [folder / f"{name}.onnx" for name in ("a", "b", "c", "piece")]
    protos = [onnx.load(path) for path in files]
    outputs = ["--output-format", "json"]
    specs = ["--input-specs", folder / "specs.json"]
    return {
        "sidecar": [
            json.loads(path.with_name(f"{path.stem}_hierarchy.json").read_text()) for path in files
        ],
        "embedded": [
            json.loads(entry.value)
            for proto in protos
            for entry in proto.metadata_props
            if entry.key == METADATA_KEY
        ],
        "node-tag": [
            json.loads(node.doc_string)
            for proto in protos
            for node in proto.graph.node
            if node.doc_string
        ],
        "analysis": [
            _run("analyze", folder / "a.onnx", *outputs),
            _run("analyze", folder / "b.onnx", *outputs, "--filter-tag", "nothing"),
        ],
        "validation": [
            _run("validate", folder / "a.onnx", *outputs, "--check-consistency"),
            _run("validate", folder / "damaged.onnx", *outputs, "--check-consistency"),
            _run("validate", folder / "damaged.onnx", *outputs, "--repair"),
        ],
        "comparison": [
            _run("compare", folder / "a.onnx", folder / "b.onnx", *outputs),
            _run("compare", folder / "b.onnx", folder / "c.onnx", *outputs),
        ],
        "profile": [_run("profile", folder / "a.onnx", *outputs, "--runs", 2)],
        "sensitivity": [_run("quantize", folder / "a.onnx", "--sensitivity", *outputs)],
        "profile-comparison": [
            _run("profile", folder / "a.onnx", folder / "a.onnx", *outputs, "--runs", 2)
        ],
        "verification": [
            _run("verify", folder / "makes.py:model", folder / "a.onnx", *outputs, *specs),
            _run(
                "verify",
                folder / "makes.py:model",
                folder / "a.onnx",
                *outputs,
                *specs,
                "--atol",
                0,
                "--rtol",
                0,
            ),
        ],
        "batch-list": [{"jobs": jobs, "defaults": {"timeout": 60}}, tomllib.loads(demo.JOBS)],
        "job-result": [
            json.loads(line) for line in (folder / "jobs_results.jsonl").read_text().splitlines()
        ],
        "input-specs": [json.loads((folder / "specs.json").read_text())],
        "generation": [json.loads(exported(name).read_text()) for name in ("llama", "t5")],
    }


def _run(*arguments: object) -> Any:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout) if "json" in arguments else None


SCHEMAS = sorted(path.name.partition(".")[0] for path in (DOCS / "schemas").iterdir())


def schema(name: str) -> Any:
    return json.loads((DOCS / "schemas" / f"{name}.schema.json").read_text())


@pytest.mark.parametrize("name", SCHEMAS)
def test_real_documents_fit_their_schema(name: str, documents: Documents) -> None:
    validator = jsonschema.Draft202012Validator(schema(name))
    jsonschema.Draft202012Validator.check_schema(schema(name))
    assert documents[name]
    for document in documents[name]:
        validator.validate(document)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_written_is_in_the_schema(name: str, documents: Documents) -> None:
    """Schemas let fields pass that they do not know; so a field of ours has to be known."""
    for document in documents[name]:
        jsonschema.Draft202012Validator(_strict(schema(name))).validate(document)


def _strict(part: Any) -> Any:
    if isinstance(part, list):
        return [_strict(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {key: _strict(value) for key, value in part.items()}
    return (
        {**found, "additionalProperties": False}
        if "properties" in part and "title" in part
        else found
    )


Change = Callable[[dict[str, Any]], object]
WRONG: dict[str, list[Change]] = {
    "sidecar": [
        lambda d: d.pop("modules"),
        lambda d: d.update(format="modelexport-hierarchy/2"),
        lambda d: d["modules"]["block"].update(calls="two"),
        lambda d: d["modules"]["block"].pop("class"),
    ],
    "embedded": [lambda d: d.pop("format"), lambda d: d["export"].update(inputs="x")],
    "node-tag": [lambda d: d.update(hierarchy_tags="/Model"), lambda d: d.pop("hierarchy_path")],
    "analysis": [
        lambda d: d["totals"].update(nodes=1.5),
        lambda d: d.update(format="modelexport-analysis/9"),
    ],
    "validation": [
        lambda d: d.pop("valid"),
        lambda d: d.update(findings=[{"code": "doc-missing"}]),
    ],
    "comparison": [
        lambda d: d.update(verdict=None),
        lambda d: d["tags"].update(distribution={"/Model": [1]}),
    ],
    "profile": [lambda d: d.pop("kernel_ms"), lambda d: d["modules"][0].update(nodes="many")],
    "profile-comparison": [lambda d: d.pop("before")],
    "sensitivity": [lambda d: d.pop("whole"), lambda d: d["modules"][0].update(saved="much")],
    "verification": [
        lambda d: d["modules"][0].update(outcome="perhaps"),
        lambda d: d.update(agrees="yes"),
    ],
    "batch-list": [
        lambda d: d.pop("jobs"),
        lambda d: d.update(output="out"),
        lambda d: d["jobs"][0].update(strategies="fx"),
        lambda d: d["jobs"][0].update(timeout="long"),
        lambda d: d["defaults"].update(strategies="fx"),
        lambda d: d["defaults"].update(output="m.onnx"),
    ],
    "generation": [
        lambda d: d.pop("parts"),
        lambda d: d.update(format="modelexport-generation/2"),
        lambda d: d["parts"]["decode"]["inputs"]["input_ids"].update(role="weights"),
    ],
    "job-result": [lambda d: d.pop("status"), lambda d: d.update(files=["m.onnx"])],
    "input-specs": [
        lambda d: d["x"].pop("shape"),
        lambda d: d["x"].update(colour="red"),
        lambda d: d.update(x=[2, 4]),
    ],
}


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name in SCHEMAS for change in WRONG[name]]
)
def test_a_wrong_document_is_refused(name: str, change: Change, documents: Documents) -> None:
    wrong = copy.deepcopy(documents[name][0])
    change(wrong)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema(name))


def _texts(tree: ast.AST) -> Iterator[str]:
    """All texts in a file as patterns, in which what is filled in may be anything."""
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            fixed = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            fixed = [node.value]
        else:
            continue
        if sum(len(re.findall(r"[A-Za-z]", str(text))) for text in fixed if text) >= 5:
            yield "".join(".+?" if text is None else re.escape(str(text)) for text in fixed)


def unknown_messages(page: str, sources: list[str]) -> list[str]:
    """Messages that a page quotes, in the first column of its tables, and no source has."""
    patterns = [re.compile(pattern) for source in sources for pattern in _texts(ast.parse(source))]
    quoted = re.findall(r"^\| `([^`]+)` \|", prose(page), re.MULTILINE)
    assert quoted
    return [text for text in quoted if not any(pattern.fullmatch(text) for pattern in patterns)]


def test_quoted_messages_are_in_the_source() -> None:
    sources = [path.read_text() for path in SOURCE.rglob("*.py")]
    assert unknown_messages((DOCS / "troubleshooting.md").read_text(), sources) == []


def test_a_quoted_message_that_is_gone_is_found() -> None:
    page = (
        "| message | |\n|---|---|\n| `there is no file x.py` | |\n| `the file x.py is gone` | |\n"
    )
    source = 'raise SourceError(f"there is no file {path}")\nother = f"{place}: {why}"\n'
    assert unknown_messages(page, [source]) == ["the file x.py is gone"]
