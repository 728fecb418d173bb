"""The commands that read: their output word for word, their exit codes, and what they import.

UPDATE_GOLDEN=1 regenerates the golden files; review the difference before you commit it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

import modelexport
from damage import copied, edit, net
from modelexport.cli.export import show_summary
from modelexport.cli.main import COMMANDS, main
from zoo import distinct

pytestmark = pytest.mark.integration
GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, inputs = net()
    path = tmp_path_factory.mktemp("original") / "m.onnx"
    modelexport.export_model(distinct(model), inputs, path, strategy="htp", with_report=True)
    modelexport.strip(path, path.with_name("base.onnx"))
    return path


@pytest.fixture
def onnx_file(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = copied(original, tmp_path / "copy")
    monkeypatch.chdir(path.parent)
    return Path(path.name)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def check_golden(text: str, name: str) -> None:
    golden = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def damage(model) -> None:  # type: ignore[no-untyped-def]
    """Remove a tag and change an attribute."""
    model.graph.node[1].ClearField("doc_string")
    next(a for node in model.graph.node for a in node.attribute if a.name == "epsilon").f = 0.5


@pytest.mark.regression
@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("analyze_summary.txt", ["analyze", "m.onnx"], 0),
        ("analyze_detailed.txt", ["analyze", "m.onnx", "--output-format", "detailed"], 0),
        ("analyze.json", ["analyze", "m.onnx", "--output-format", "json"], 0),
        ("analyze.csv", ["analyze", "m.onnx", "--output-format", "csv"], 0),
        ("analyze_filtered.txt", ["analyze", "m.onnx", "--filter-tag", "encoder.blocks.0"], 0),
        ("analyze_no_match.txt", ["analyze", "m.onnx", "--filter-tag", "/Net/Decoder"], 0),
        ("analyze_untagged.txt", ["analyze", "base.onnx"], 0),
        ("validate.txt", ["validate", "m.onnx", "--check-consistency"], 0),
        (
            "validate.json",
            ["validate", "m.onnx", "--check-consistency", "--output-format", "json"],
            0,
        ),
        ("compare_with_baseline.txt", ["compare", "base.onnx", "m.onnx"], 0),
        (
            "compare_with_baseline.json",
            ["compare", "base.onnx", "m.onnx", "--output-format", "json"],
            0,
        ),
    ],
)
def test_output(onnx_file: Path, name: str, arguments: list[str], code: int) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert result.stderr == ""
    check_golden(result.stdout, name)
    if name.endswith(".txt"):
        lines = result.stdout.splitlines()
        assert max(map(len, lines)) <= 80
        assert all(line == line.rstrip() for line in lines)
    written = run(*arguments, "--output-file", "out") if arguments[0] != "validate" else None
    if written is not None:
        assert written.stdout == ""
        assert written.exit_code == code
        assert Path("out").read_text() == result.stdout


@pytest.mark.regression
def test_output_for_damage(onnx_file: Path) -> None:
    edit(onnx_file, damage)
    for name, arguments in (
        ("validate_damage.txt", ["validate", "m.onnx", "--check-consistency"]),
        (
            "validate_damage.json",
            ["validate", "m.onnx", "--check-consistency", "--output-format", "json"],
        ),
        ("compare_different.txt", ["compare", "base.onnx", "m.onnx"]),
        ("compare_different.json", ["compare", "base.onnx", "m.onnx", "--output-format", "json"]),
        ("validate_repair.txt", ["validate", "m.onnx", "--repair"]),
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        check_golden(result.stdout, name)
    assert Path("m.onnx.bak").exists()


@pytest.mark.regression
def test_report(original: Path) -> None:
    """Times and versions differ from run to run; all else is the same."""
    text = original.with_name("m_report.md").read_text()
    steps = re.search(r"## Steps\n\n(.*?)\n\n", text, re.DOTALL)
    assert steps is not None
    assert "export with torch (torchscript)" in steps[1]
    text = re.sub(r"\| (\*\*)?\d+\.\d{3}(\*\*)? \|", "| … |", text)
    text = re.sub(r"(\| (?:modelexport|torch|onnx|onnxscript) \|) .* \|", r"\1 … |", text)
    check_golden(text, "report.md")


def test_report_is_only_written_when_asked_for(tmp_path: Path) -> None:
    model, inputs = net()
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="htp")
    assert report.report_path is None
    assert not (tmp_path / "m_report.md").exists()
    again = modelexport.export_model(
        model, inputs, tmp_path / "m.onnx", strategy="htp", with_report=True
    )
    assert again.report_path == tmp_path / "m_report.md"
    assert again["files"]["report"] == str(again.report_path)
    assert (tmp_path / "m_report.md").read_text().startswith("# m.onnx\n")


BAD = {
    "cut.onnx": lambda whole: whole[: len(whole) // 2],
    "text.onnx": lambda whole: b"This is not a model.\n",
    "empty.onnx": lambda whole: b"",
}


@pytest.mark.parametrize(
    "command",
    ["analyze", "validate", "validate --check-consistency", "validate --repair", "compare"],
)
@pytest.mark.parametrize("bad", [*BAD, "folder", "missing.onnx"])
def test_bad_files_give_one_line(onnx_file: Path, command: str, bad: str) -> None:
    if bad == "folder":
        Path(bad).mkdir()
    elif bad in BAD:
        Path(bad).write_bytes(BAD[bad](onnx_file.read_bytes()))
    before = sorted(Path().iterdir())
    for files in [[bad, "m.onnx"], ["m.onnx", bad]] if command == "compare" else [[bad]]:
        result = run(*command.split(), *files)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert re.fullmatch(r"Error: [^\n]*\n", result.stderr)
        assert bad in result.stderr
    assert sorted(Path().iterdir()) == before


def test_json_for_no_match(onnx_file: Path) -> None:
    result = run("analyze", "m.onnx", "--filter-tag", "nothing", "--output-format", "json")
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    assert content["nodes"] == []
    assert content["suggestions"]


def test_names_cannot_steer_a_terminal(onnx_file: Path) -> None:
    def rename(model) -> None:  # type: ignore[no-untyped-def]
        evil = "\x1b[2J\x07evil\u202e"
        model.graph.node[0].op_type = evil
        model.graph.input[0].name = evil

    edit(onnx_file, rename)
    for arguments in (
        ["analyze"],
        ["analyze", "--output-format", "detailed"],
        ["validate", "--check-consistency"],
    ):
        result = run(arguments[0], "m.onnx", *arguments[1:])
        assert "evil" in result.stdout
        assert not set("\x1b\x07\u202e") & set(result.stdout)
    assert not set("\x1b\x07\u202e") & set(run("compare", "base.onnx", "m.onnx").stdout)


@pytest.mark.parametrize(
    "target", ["m.onnx", "./m.onnx", "m_hierarchy.json", "base.onnx", "other.onnx"]
)
def test_no_output_overwrites_an_input(onnx_file: Path, target: str) -> None:
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    for arguments in (["analyze", "m.onnx"], ["compare", "base.onnx", "m.onnx"]):
        result = run(*arguments, "--output-file", target)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_pipes_and_links_stay_what_they_are(onnx_file: Path) -> None:
    Path("real.txt").write_text("old")
    Path("link.txt").symlink_to("real.txt")
    run("analyze", "m.onnx", "--output-file", "link.txt")
    assert Path("link.txt").is_symlink()
    assert Path("real.txt").read_text().startswith("m.onnx:")
    assert run("analyze", "m.onnx", "--output-file", "/dev/null").exit_code == 0
    assert not Path("/dev/null").is_file()


def test_unwritable_output_files(onnx_file: Path) -> None:
    for target in ("no/such/folder/out.json", ".", "x" * 5000):
        result = run("analyze", "m.onnx", "--output-format", "json", "--output-file", target)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1


@pytest.mark.must
@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze", "m.onnx"],
        ["validate", "m.onnx", "--repair"],
        ["compare", "base.onnx", "m.onnx"],
        ["strip", "m.onnx", "s.onnx"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_reading_needs_neither_torch_nor_a_runtime(onnx_file: Path, arguments: list[str]) -> None:
    code = (
        "import sys\nfrom modelexport.cli.main import main\n"
        f"main({arguments!r}, standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'onnxruntime'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_closed_pipe_is_no_error(onnx_file: Path) -> None:
    script = "from modelexport.cli.main import main; main()"
    command = f"{sys.executable} -c '{script}' analyze m.onnx --output-format json | head -c 10"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.stdout.startswith("{")
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    "arguments", [["analyze"], ["analyze", "--output-format", "json"], ["validate"], ["--help"]]
)
def test_a_failed_write_to_stdout_is_one_line(arguments: list[str], original: Path) -> None:
    """A full disk is one line; a closed stdout is no error at all."""
    command, *options = arguments
    names = [] if command == "--help" else [str(original)]
    code = "from modelexport.cli.main import main; main()"
    whole = [sys.executable, "-c", code, command, *names, *options]
    with open("/dev/full", "w") as full:
        result = subprocess.run(whole, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert result.stderr == "Error: cannot write the output: No space left on device\n"
    closed = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" >&-', *whole], stderr=subprocess.PIPE, text=True
    )
    assert closed.returncode == 0
    assert closed.stderr == ""


@pytest.mark.must
def test_help_imports_no_command() -> None:
    """Start-up is fast: click and the package itself are all that the help of the group needs."""
    code = (
        "import sys\nfrom modelexport.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print([name for name in sys.modules if name.startswith('modelexport')], file=sys.stderr)\n"
        "assert not {'rich', 'msgspec', 'numpy', 'onnx', 'importlib.metadata'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip() == str(
        ["modelexport.errors", "modelexport", "modelexport.cli", "modelexport.cli.main"]
    )


@pytest.mark.parametrize("arguments", [["analyze"], ["extract", "--list"], ["strip", "s.onnx"]])
def test_reading_imports_little(onnx_file: Path, arguments: list[str]) -> None:
    command = [arguments[0], "m.onnx", *arguments[1:]]
    code = (
        "import sys\nfrom modelexport.cli.main import main\n"
        f"main({command!r}, standalone_mode=False)\n"
        "slow = {'onnx.reference', 'lxml', 'ray', 'rich.live', 'asyncio'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_table_of_commands_is_true() -> None:
    """A command's line in the help is in the table alone; the commands have no other."""
    shown = run("--help").stdout
    context = click.Context(main)
    for name, (_, text) in COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.short_help is None
        assert command.help
        assert re.search(rf"^  {name} +{re.escape(text)}$", shown, re.MULTILINE)


def on_a_terminal(*arguments: str) -> str:
    """Return what a command prints to a terminal, on stdout and stderr."""
    command = shlex.join([sys.executable, "-m", "modelexport", *arguments])
    shown = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert shown.returncode == 0, shown.stdout
    return shown.stdout


def test_progress_on_a_terminal_shows_names_as_they_are(onnx_file: Path) -> None:
    """A name that looks like markup of rich is no markup; the spinner is removed at the end."""
    name = "[red]v\x1b[31m.onnx"
    onnx_file.rename(name)
    shown = on_a_terminal("analyze", name)
    assert "read [red]v\\x1b[31m.onnx ..." in shown
    assert shown.index("...") < shown.index("\x1b[2K") < shown.index("Net")


def test_the_package_runs_as_a_module() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "modelexport", "--version"], capture_output=True, text=True
    )
    assert shown.stdout.startswith("modelexport, version "), shown.stderr


@pytest.mark.regression
def test_a_count_of_one_is_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = modelexport.export_model(
        torch.nn.ReLU(), torch.ones(1), tmp_path / "m.onnx", strategy="htp"
    )
    show_summary(report)
    shown = capsys.readouterr().out + run("analyze", str(report.onnx_path)).output
    drawn = run("export-graphml", str(report.onnx_path)).output
    assert "1 of 1 node tagged (1 by scope), 1 tag" in shown
    assert "1 module:" in shown
    assert "1 node in 1 module" in drawn
    assert not re.search(r"\b1 (tags|nodes|modules|edges|parameters)\b", shown + drawn)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("exprot", "did you mean export?"), ("qqqq", "modelexport --help lists them")],
)
def test_an_unknown_command_gets_a_suggestion(name: str, hint: str) -> None:
    result = run(name)
    assert result.exit_code == 2
    assert f"there is no command {name!r} ({hint})" in result.stderr


def test_messages_name_options_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("export", "some/model", "m.onnx", "--dynamic", "--dynamic-axes", "x=0:batch")
    assert "--dynamic chooses the axes that --dynamic-axes sets" in result.stderr
    with pytest.raises(modelexport.ArgumentError, match=r"^dynamic chooses .* dynamic_axes sets"):
        modelexport.export_source(
            "some/model", "m.onnx", dynamic=True, dynamic_axes={"x": {0: "batch"}}
        )
    (tmp_path / "jobs.json").write_text(
        '{"jobs": [{"model": "a", "output": "a.onnx", "max_depth": 0}]}'
    )
    assert "job 1: max_depth must be 1 or more, got 0" in run("batch", "jobs.json").stderr
    result = run("export", "some/model", "m.onnx", "--max-depth", "0")
    assert "--max-depth must be 1 or more, got 0" in result.stderr


def test_a_hint_follows_parentheses_after_a_semicolon() -> None:
    plain = modelexport.ArgumentError("no such thing", hint="choose another")
    assert plain.headline == "no such thing (choose another)"
    ends = modelexport.ArgumentError("no such thing (root)", hint="choose another")
    assert ends.headline == "no such thing (root); choose another"
