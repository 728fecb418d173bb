"""The parts of the sweep: shrinking, limits, and a page with every failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import transformers
from sweep.examples import CannotBuildError, build, model_types
from sweep.isolated import LimitError, run_isolated
from sweep.judge import Outcome, judge
from sweep.page import write_page
from sweep.shrink import shrink_config
from sweep.torch_versions import add_result

pytestmark = pytest.mark.sanity


@pytest.mark.parametrize(
    "name", ["BertConfig", "LlamaConfig", "ViTConfig", "MixtralConfig", "WhisperConfig"]
)
def test_a_configuration_gets_small_and_stays_consistent(name: str) -> None:
    config = next(shrink_config(getattr(transformers, name)()))
    assert config.hidden_size <= 256
    assert config.num_hidden_layers <= 2
    assert config.hidden_size % config.num_attention_heads == 0
    assert getattr(config, "vocab_size", 0) <= 160


def test_lists_by_layer_are_cut_with_the_layers() -> None:
    config = transformers.Gemma3TextConfig()
    small = next(shrink_config(config))
    assert len(small.layer_types) == small.num_hidden_layers == 2
    assert set(small.layer_types) == set(config.layer_types)


def test_every_model_type_is_swept() -> None:
    assert len(model_types()) == len(set(model_types())) > 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["fx", "htp", "transformers"])
def test_one_architecture_from_its_name_to_the_verdict(strategy: str) -> None:
    model, inputs = build("distilbert")
    outcome = judge("distilbert", strategy, model, inputs)
    assert outcome.status == "exported"
    assert outcome.nodes > 30
    assert outcome.values > 20


def test_what_cannot_be_built_says_why() -> None:
    with pytest.raises(CannotBuildError, match="no default configuration"):
        build("no-such-type")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_of_its_own() -> None:
    assert run_isolated(lambda: [os.getpid()], 600) != [os.getpid()]
    with pytest.raises(LimitError, match="took more than"):
        run_isolated(signal.pause, 0.2)
    with pytest.raises(LimitError, match="ended with status"):
        run_isolated(lambda: os.kill(os.getpid(), signal.SIGKILL), 600)


def test_the_page_shows_failures_of_ours_first(tmp_path: Path) -> None:
    outcomes = [
        Outcome("alpha", "fx", "exported", nodes=12),
        Outcome("alpha", "htp", "we-fail", "a | b"),
        Outcome("alpha", "generates", "exported", nodes=30),
        Outcome("beta", "generates", "torch-wrong", "other tokens"),
        Outcome("beta", "fx", "torch-cannot", "no operator"),
        Outcome("beta", "transformers", "torch-wrong", "other inputs"),
        Outcome("beta", "htp", "exported", nodes=7),
        Outcome("gamma", "fx", "not-built", "no timm"),
        Outcome("gamma", "htp", "not-built", "no timm"),
    ]
    write_page(tmp_path / "page.md", outcomes)
    text = (tmp_path / "page.md").read_text()
    assert "| alpha | 12 | we-fail: a \\| b |  | yes |" in text
    assert "| beta | torch-cannot: no operator | 7 | torch-wrong: other inputs | torch-w" in text
    assert "| gamma | no timm |" in text
    totals = {
        line.split("|")[1].split("`")[1]: line.split("|")[2:6]
        for line in text.splitlines()
        if line.startswith("| `")
    }
    assert [cell.strip() for cell in totals["we-fail"]] == ["0", "1", "0", "1"]
    assert [cell.strip() for cell in totals["exported"]] == ["1", "1", "0", "1"]


@pytest.mark.regression
def test_the_page_states_the_range_of_torch(tmp_path: Path) -> None:
    """The page, its generator and pyproject.toml say the same."""
    write_page(tmp_path / "page.md", [])
    root = Path(__file__).parents[1]
    wanted = "torch 2.13 to 2.15"
    assert '"torch>=2.13,<2.16"' in (root / "pyproject.toml").read_text()
    for page in (
        tmp_path / "page.md",
        root / "docs" / "compatibility.md",
        root / "docs" / "limits.md",
    ):
        assert wanted in page.read_text()


def test_the_page_keeps_the_results_of_other_versions_of_torch(tmp_path: Path) -> None:
    page, result = tmp_path / "page.md", tmp_path / "result.xml"
    write_page(page, [])
    for version, failures in (("2.15.0", 3), ("2.9.1", 0), ("2.15.0", 1)):
        result.write_text(
            f'<testsuites><testsuite tests="9" failures="{failures}" errors="1" skipped="2"/>'
            "</testsuites>"
        )
        add_result(page, result, version)
    rows = ["| 2.9.1 | 6 | 1 | 2 |", "| 2.15.0 | 5 | 2 | 2 |"]
    assert [line for line in page.read_text().splitlines() if line.startswith("| 2.")] == rows
    before = page.read_text()
    write_page(page, [])
    assert page.read_text() == before
