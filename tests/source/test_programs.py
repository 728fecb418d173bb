"""Programs that take and return caches, loaded from `.pt2` files."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelexport
from caches import KEYS, decode_step
from exports import shared_folder
from modelexport.capture.pytrees import register_caches
from modelexport.errors import SourceError
from modelexport.source.load import load_source

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def program() -> Path:
    """A saved program that takes and returns a cache; it must not be changed."""

    def fill(folder: Path) -> None:
        model, inputs = decode_step("llama")
        register_caches(model)
        torch.export.save(torch.export.export(model, (), kwargs=inputs), folder / "p.pt2")

    return shared_folder("program-with-a-cache", fill) / "p.pt2"


def rewrite(
    old: Path, new: Path, change: Callable[[Any], None], sample_inputs: bytes | None = None
) -> Path:
    """Copy a program with another description of its root signature, and other inputs if given."""
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(new, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("models/model.json"):
                document = json.loads(content)
                signature = document["graph_module"]["module_call_graph"][0]["signature"]
                spec = json.loads(signature["in_spec"])
                change(spec[1]["children_spec"][1]["children_spec"][1])
                signature["in_spec"] = json.dumps(spec)
                content = json.dumps(document).encode()
            if "sample_inputs" in name and sample_inputs is not None:
                content = sample_inputs
            target.writestr(name, content)
    return new


def test_a_saved_program(program: Path, tmp_path: Path) -> None:
    source = load_source(str(program))
    report = modelexport.export_model(source.model, None, tmp_path / "p.onnx")
    repeated = [f"output.{name}" for name in KEYS]
    assert [v.name for v in report.hierarchy.export.inputs] == ["input_ids", *KEYS]
    assert [v.name for v in report.hierarchy.export.outputs] == ["last_hidden_state", *repeated]
    verified = modelexport.verify(source.model, None, report.onnx_path)  # type: ignore[arg-type]
    assert verified.agrees
    assert len(verified.modules[0].tensors) == 5
    model, inputs = decode_step("llama")
    assert modelexport.verify(model, inputs, report.onnx_path).agrees


@pytest.mark.must
def test_a_saved_program_in_a_new_process(program: Path, tmp_path: Path) -> None:
    """A process in which nothing is registered, and transformers is not imported."""
    path = str(tmp_path / "p.onnx")
    for arguments in (["export", str(program), path], ["verify", str(program), path]):
        command = [sys.executable, "-W", "ignore", "-m", "modelexport", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert modelexport.load(path).graph.inputs == ["input_ids", *KEYS]


@pytest.mark.parametrize("kind", ["map", "seq", "obj", "type"])
@pytest.mark.must
def test_a_description_runs_no_code(kind: str, program: Path, tmp_path: Path) -> None:
    """transformers would import the class that a description names, and call it."""
    mark = tmp_path / "ran"
    evil = {"_t": kind, "p": "os:system", "v": [f"touch {mark}"], "s": {}}

    def change(description: Any) -> None:
        context = json.loads(description["context"])
        context["s"]["layer_class_to_replicate"] = evil
        description["context"] = json.dumps(context)

    poisoned = rewrite(program, tmp_path / "poisoned.pt2", change)
    with pytest.raises(SourceError, match="would run other code"):
        load_source(str(poisoned))
    assert not mark.exists()


@pytest.mark.parametrize("path", ["transformers.cache_utils:torch", "transformers.pipelines:pipe"])
def test_a_description_names_only_parts_of_caches(path: str, program: Path, tmp_path: Path) -> None:
    def change(description: Any) -> None:
        description["context"] = json.dumps({"_t": "obj", "p": path, "s": {}})

    with pytest.raises(SourceError, match="would run other code"):
        load_source(str(rewrite(program, tmp_path / "poisoned.pt2", change)))


@pytest.mark.parametrize("name", ["antigravity.Thing", "transformers.no_such_module:Thing", "x"])
def test_an_unknown_class_is_named_and_not_imported(
    name: str, program: Path, tmp_path: Path
) -> None:
    def change(description: Any) -> None:
        description["type"] = name

    with pytest.raises(SourceError, match=f"a {name}, which is not registered") as caught:
        load_source(str(rewrite(program, tmp_path / "other.pt2", change)))
    assert "export_model" in (caught.value.hint or "")
    assert "antigravity" not in sys.modules


def test_example_inputs_that_do_not_fit_are_left_out(program: Path, tmp_path: Path) -> None:
    _, inputs = decode_step("llama")
    inputs["past_key_values"].layers.pop()
    torch.save(((), inputs), tmp_path / "inputs.pt")
    other = rewrite(
        program, tmp_path / "o.pt2", lambda _: None, (tmp_path / "inputs.pt").read_bytes()
    )
    source = load_source(str(other))
    assert not isinstance(source.model, nn.Module)
    assert source.model.example_inputs is None
