"""The commands extract and verify."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import modelexport
from folders import text_encoder
from modelexport.cli.console import cut_in_the_middle, plain_table
from modelexport.cli.main import main

pytestmark = [pytest.mark.integration, pytest.mark.sanity]

FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        return torch.relu(self.fc(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def forward(self, x):
        return self.blocks(x)

def make():
    return Net(), (torch.randn(2, 6),)

def bare():
    return Net()

def large():
    return nn.Linear(64, 64), (torch.randn(2, 64),)

def broken():
    model = Net()
    with torch.no_grad():
        model.blocks[1].fc.weight += 1
    return model, (torch.randn(2, 6),)
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the model once for all tests."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("nets.py").write_text(FACTORY)
        assert run("export", "nets.py:make", "net.onnx").exit_code == 0
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a copy of the exported files."""
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_extract_describes_the_extracted_model(folder: Path) -> None:
    result = run("extract", "net.onnx", "blocks.1", "block.onnx")
    refused = run("verify", "nets.py:make", "block.onnx")
    assert refused.exit_code == 2
    assert "block.onnx is only blocks.1 of net.onnx (verify that file)" in refused.stderr
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == "block.onnx: blocks.1, 2 nodes"
    assert "float[2,6]" in result.stdout
    onnx.checker.check_model("block.onnx", full_check=True)
    assert run("analyze", "block.onnx").exit_code == 0
    assert run("validate", "block.onnx", "--check-consistency").exit_code == 0


def test_the_list(folder: Path) -> None:
    result = run("extract", "net.onnx", "--list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "net.onnx: 8 modules can be extracted"
    assert "blocks.1  Block, 2 nodes" in lines
    assert max(map(len, lines)) <= 80
    assert run("extract", "net.onnx", "blocks.1", "--list").stdout.startswith(
        "net.onnx: 1 module can"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("net.onnx", "blocks.7", "p.onnx"), "near it: blocks."),
        (("net.onnx", "blocks.*", "p.onnx"), "matches 6 modules"),
        (("net.onnx", "blocks.1", "p.onnx", "--call", "1"), "ran once"),
        (("net.onnx", "blocks.1"), "name a MODULE and the file OUT"),
        (("net.onnx", "blocks.1", "p.onnx", "--list"), "leave OUT and --call out"),
        (("net.onnx", "blocks.1", "net.onnx"), "output net.onnx would overwrite the input"),
        (("net.onnx", "blocks.1", "no/p.onnx"), "the folder no does not exist"),
        (("nets.py", "blocks.1", "p.onnx"), "nets.py is not an ONNX model"),
        (("none.onnx", "blocks.1", "p.onnx"), "cannot read none.onnx"),
    ],
)
def test_extract_reports_bad_input_in_one_line(
    folder: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = run("extract", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert not Path("p.onnx").exists()


def test_verify_confirms_a_correct_file(folder: Path) -> None:
    result = run("verify", "nets.py:make", "net.onnx")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "net.onnx against nets.py:make: agrees within atol 0.0001, rtol 0.001\n"
    )
    assert result.stdout.splitlines()[1] == "  8 of 8 modules compared"
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.regression
def test_verify_lists_modules_that_are_not_compared(folder: Path) -> None:
    Path("idle.py").write_text(
        "from torch import nn, ones\n\ndef make():\n"
        "    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU()).eval(), (ones(2, 4),)\n"
    )
    assert run("export", "idle.py:make", "idle.onnx").exit_code == 0
    result = run("verify", "idle.py:make", "idle.onnx")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1] == "  3 of 4 modules compared"
    assert (
        "not compared: 1 module\n  the exporter folded its operations or left them out: 1\n"
        in result.stdout
    )
    nothing = run("verify", "idle.py:make", "idle.onnx", "--module", "1")
    assert nothing.exit_code == 1
    assert nothing.stdout.startswith("idle.onnx against idle.py:make: nothing could be compared\n")
    answer = json.loads(
        run("verify", "idle.py:make", "idle.onnx", "--output-format", "json").stdout
    )
    assert (answer["modules_compared"], answer["modules_total"]) == (3, 4)
    assert answer["not_compared"] == {"1": "the exporter folded its operations or left them out"}


def test_verify_lists_the_most_frequent_reasons_first_and_at_most_eight(folder: Path) -> None:
    Path("norms.py").write_text(
        "from torch import nn, ones\n\ndef make():\n"
        "    pairs = [nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)) for _ in range(10)]\n"
        "    return nn.Sequential(*pairs, nn.Dropout(), nn.Dropout()).eval(), (ones(1, 2, 4),)\n"
    )
    assert run("export", "norms.py:make", "norms.onnx").exit_code == 0
    result = run("verify", "norms.py:make", "norms.onnx")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    listed = lines[lines.index("not compared: 12 modules") + 1 :]
    assert len(listed) == 9
    assert listed[0] == "  the exporter folded its operations or left them out: 10, 11"
    assert listed[1] == "  its operations are merged into a node of 0.1: 0.0"
    assert listed[8] == "  … and 3 modules more, each with its reason in --output-format json"


@pytest.mark.regression
def test_verify_on_random_inputs(folder: Path) -> None:
    result = run("verify", "nets.py:make", "net.onnx", "--random-inputs", "2", "--seed", "3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1] == "  8 of 8 modules compared, the worst of 3 runs"
    assert lines[3] == "  inputs from the factory's own, and 2 random sets with seed 3"
    assert run("verify", "nets.py:make", "net.onnx", "--random-inputs", "-1").exit_code == 2
    answer = json.loads(
        run(
            "verify", "nets.py:make", "net.onnx", "--random-inputs", "2", "--output-format", "json"
        ).stdout
    )
    assert answer["runs"] == 3


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore")
def test_verify_on_several_texts(folder: Path) -> None:
    model, processors = text_encoder()
    for part in (model, *processors):
        part.save_pretrained("bert")
    assert run("export", "bert", "bert.onnx", "--input-text", "every node of").exit_code == 0
    result = run(
        "verify",
        "bert",
        "bert.onnx",
        "--input-text",
        "this graph is",
        "--input-text",
        "that module ran",
    )
    assert result.exit_code == 0, result.output
    assert "the worst of 2 runs" in result.stdout.splitlines()[1]
    refused = run(
        "verify", "bert", "bert.onnx", "--input-text", "this graph is", "--input-text", "graph"
    )
    assert refused.exit_code == 2
    assert "run 2 of 2: the file's input 'input_ids': expected [1,3], got [1,1]" in refused.stderr
    assert "Traceback" not in refused.output


def test_verify_names_the_module_that_causes_a_difference(folder: Path) -> None:
    result = run("verify", "nets.py:broken", "net.onnx")
    assert result.exit_code == 1
    assert "first to differ: blocks.1.fc (Linear)" in result.stdout
    assert "caused by 1 module, the worst first:\n    blocks.1.fc (Linear)" in result.stdout
    answer = json.loads(
        run("verify", "nets.py:broken", "net.onnx", "--output-format", "json").stdout
    )
    assert answer["first"] == "blocks.1.fc"
    assert answer["agrees"] is False
    rows = list(
        csv.DictReader(
            io.StringIO(
                run("verify", "nets.py:broken", "net.onnx", "--output-format", "csv").stdout
            )
        )
    )
    blames = {row["module"]: row["blame"] for row in rows}
    assert blames["blocks.0"] == ""
    assert blames["blocks.1.fc"] == "caused here"
    assert blames["blocks.1"] == "caused inside"
    assert blames["blocks.2"] == "inherited"
    narrowed = run("verify", "nets.py:broken", "net.onnx", "--module", "blocks.0")
    assert narrowed.exit_code == 0, narrowed.output


def test_a_narrow_table_truncates_names_only() -> None:
    text = io.StringIO()
    table = plain_table(
        {"module": False, "number": True, "outcome": False}, [("x" * 90, "1e-04", "caused inside")]
    )
    Console(file=text, width=40).print(table)
    (row,) = text.getvalue().splitlines()[1:]
    assert row == "xxxxx…xxxxxxxxxxx   1e-04  caused inside"
    assert cut_in_the_middle("│   ├── EncoderBlock.1  x2", 20) == "│   ├── Enc…ck.1  x2"


def test_verify_makes_the_inputs_of_the_export(folder: Path) -> None:
    """The file records how they were made; of a specs file it records the name."""
    assert run("export", "nets.py:bare", "shaped.onnx", "--input-shape", "3,6").exit_code == 0
    assert modelexport.load("shaped.onnx").records is not None
    result = run("verify", "nets.py:bare", "shaped.onnx")
    assert result.exit_code == 0, result.output
    Path("in.json").write_text('{"x": {"shape": [5, 6]}}')
    assert run("export", "nets.py:bare", "specs.onnx", "--input-specs", "in.json").exit_code == 0
    refused = run("verify", "nets.py:bare", "specs.onnx")
    assert refused.exit_code == 2
    assert "pass --input-specs in.json" in refused.stderr
    assert run("verify", "nets.py:bare", "specs.onnx", "--input-specs", "in.json").exit_code == 0
    assert run("verify", "nets.py:bare", "specs.onnx", "--input-shape", "4,6").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("nets.py:make", "net.onnx", "--atol", "-1"),
            "--atol must be a finite number, 0 or more, got -1.0",
        ),
        (("nets.py:make", "net.onnx", "--module", "blocks.9"), "near it: blocks."),
        (("nets.py:none", "net.onnx"), "none"),
        (("net.onnx", "nets.py:make"), "the PyTorch model comes first"),
        (("nets.py:make", "none.onnx"), "cannot read none.onnx"),
        (("nets.py:make", "net.onnx", "--output-file", "nets.py"), "would overwrite a file"),
        (("nets.py:make", "net.onnx", "--output-file", "x.onnx"), "has the name of a model"),
        (
            ("nets.py:make", "net.onnx", "--input-specs", "in.json", "--output-file", "in.json"),
            "would overwrite a file",
        ),
    ],
)
def test_verify_reports_bad_input_in_one_line(
    folder: Path, arguments: tuple[str, ...], said: str
) -> None:
    before = Path("nets.py").read_bytes()
    result = run("verify", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert Path("nets.py").read_bytes() == before


def test_no_output_overwrites_a_data_file(folder: Path) -> None:
    assert (
        run(
            "export", "nets.py:large", "apart.onnx", "--strategy", "htp", "--external-data"
        ).exit_code
        == 0
    )
    before = Path("apart.onnx.data").read_bytes()
    for command in (("analyze", "apart.onnx"), ("verify", "nets.py:large", "apart.onnx")):
        assert run(*command, "--output-file", "apart.onnx.data").exit_code == 2
    assert Path("apart.onnx.data").read_bytes() == before
