"""What the summary of an export tells someone who sees it for the first time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import modelexport
from modelexport.cli.main import main
from modelexport.modules.tags import count_hidden_by_default

pytestmark = [pytest.mark.integration, pytest.mark.sanity]
ABSORBED = "    absorbed: no nodes of its own (folded, fused or identity)"
HIDDEN = "    hidden: {}; export with --torch-nn all to show them"
FIXED_AXES = "    shapes are fixed; --dynamic makes axes such as the batch symbolic"
FIXED_TEXT = "    shapes are fixed; --dynamic makes batch and sequence symbolic"
DEEP = """
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor

class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        for number in range(size):
            setattr(self, f"scale{number}", Scale(number + 2))

    def forward(self, x):
        for scale in self.children():
            x = scale(x)
        return x

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(2 + number % 7) for number in range(15))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def deep():
    return Deep().eval(), (torch.ones(2, 4),)
"""
MODELS = """
import torch
from torch import nn

class First(nn.Module):
    def __init__(self, *more):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), *more)

    def forward(self, image):
        return self.layers(image)

class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4)

    def forward(self, tokens):
        return self.words(tokens)

class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 4)

    def forward(self, image):
        return self.mix(self.norm(image))

class Scale(nn.Module):
    def forward(self, factor):
        return factor * 2

def image():
    return First(nn.Dropout()), (torch.rand(1, 4),)

def text():
    return Lookup(), (torch.zeros(1, 4, dtype=torch.int64),)

def half():
    return Half(), (torch.rand(1, 4),)

def scalar():
    return Scale(), (torch.tensor(1.0),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "first_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def export(factory: str, *options: str) -> list[str]:
    """Export a model with the command line, and return the lines of its summary."""
    return _run("export", factory, "m.onnx", "--strategy", "htp", *options)


def _run(*arguments: str) -> list[str]:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_a_first_model_of_torch_classes() -> None:
    """One line of a tree is explained, and the flag that the line names shows the rest."""
    for lines in (export("first_models.py:image"), _run("analyze", "m.onnx")):
        at = lines.index("  5 modules: 4 with nodes, 1 absorbed, 0 unused")
        assert lines[at + 1 : at + 3] == [ABSORBED, HIDDEN.format("4 torch.nn modules")]
    shown = export("first_models.py:image", "--torch-nn", "all")
    assert HIDDEN.format("4 torch.nn modules") not in shown
    assert [line.split()[-2:] for line in shown[-3:]] == [
        ["Linear.0", "1"],
        ["ReLU.1", "1"],
        ["0", "absorbed"],
    ]


def test_half_of_the_modules_below_the_root_are_not_most() -> None:
    lines = export("first_models.py:half")
    assert "  3 modules: 3 with nodes, 0 absorbed, 0 unused" in lines
    assert not any("hidden" in line for line in lines)


def test_a_tree_that_shows_most_modules_needs_no_explanation() -> None:
    lines = export("first_models.py:text")
    assert "  2 modules: 2 with nodes, 0 absorbed, 0 unused" in lines
    assert not any("absorbed:" in line or "hidden" in line for line in lines)


@pytest.mark.parametrize(
    ("modules", "hidden"),
    [
        ({"": ("torch.nn.Sequential", True), "0": ("torch.nn.Linear", False)}, 1),
        ({"": ("own.Net", True), "norm": ("torch.nn.LayerNorm", True)}, 0),
        # Each of these was chosen by an option, which `--torch-nn all` need not undo.
        ({"": ("own.Net", True), "a": ("own.Block", False), "b": ("torch.nn.ReLU", False)}, 0),
        ({"": ("own.Net", True), "a": ("torch.nn.ReLU", True), "b": ("torch.nn.GELU", False)}, 0),
        ({"": ("own.Net", True), "a": ("torch.nn.LayerNorm", False)}, 0),
    ],
)
def test_only_default_hiding_is_counted(
    modules: Mapping[str, tuple[str, bool]], hidden: int
) -> None:
    assert count_hidden_by_default(modules) == hidden


@pytest.mark.parametrize(
    ("factory", "options", "expected"),
    [
        ("image", [], FIXED_AXES),
        ("text", [], FIXED_TEXT),
        ("scalar", [], None),
        ("image", ["--dynamic"], None),
        ("image", ["--dynamic-axes", "image=0:batch"], None),
    ],
)
def test_fixed_shapes_and_how_to_change_them(
    factory: str, options: list[str], expected: str | None
) -> None:
    lines = export(f"first_models.py:{factory}", *options)
    assert [line for line in lines if "fixed" in line] == ([] if expected is None else [expected])


def test_what_the_line_on_shapes_says_is_true(folder: Path) -> None:
    export("first_models.py:image", "--dynamic")
    exported = modelexport.load(folder / "m.onnx")
    assert exported.sidecar is not None
    assert exported.sidecar.export.inputs[0].shape == ("batch", 4)


def test_a_program_has_its_shapes_in_it(folder: Path) -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.rand(2, 4),))
    torch.export.save(program, folder / "p.pt2")
    lines = _run("export", "p.pt2", "m.onnx")
    assert not any("--dynamic" in line for line in lines)


def test_a_tree_that_fills_more_than_a_screen_is_cut_and_says_where_the_rest_is(
    folder: Path,
) -> None:
    (folder / "deep.py").write_text(DEEP)
    command = "modelexport analyze m.onnx --output-format json"
    last = _run("export", "deep.py:deep", "m.onnx")[-1]
    assert last == f"… and 72 deeper lines; see `{command}`"
    assert len(last) <= 80
    lines = _run("analyze", "m.onnx")
    assert "… and 72 deeper lines; --output-format json has them all" in lines


def test_siblings_are_drawn_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from modelexport.cli.export import show_summary
    from zoo import Block

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    report = modelexport.export_model(Tower(), torch.ones(1, 8), tmp_path / "m.onnx", strategy="fx")
    show_summary(report)
    text = capsys.readouterr().out
    assert "Block.0 … Block.4  x5" in text
    assert text.count("Block.") == 2
