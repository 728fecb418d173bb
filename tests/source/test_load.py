"""Sources: what can be loaded, what is refused and why."""

from __future__ import annotations

import io
import json
import logging
import pickle
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import modelexport
from folders import TEXT, save
from modelexport.errors import SourceError
from modelexport.source.load import load_source

pytestmark = pytest.mark.sanity


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("text_encoder", tmp_path_factory.mktemp("encoder"))


def test_the_class_is_the_one_that_the_configuration_names(encoder: Path) -> None:
    assert type(load_source(str(encoder)).model) is transformers.BertForMaskedLM


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"task": "text-classification"}, "BertForSequenceClassification"),
        ({"task": "sentiment-analysis"}, "BertForSequenceClassification"),
        ({"task": "feature-extraction"}, "BertModel"),
        ({"model_class": "BertModel"}, "BertModel"),
        ({"model_class": "AutoModelForTokenClassification"}, "BertForTokenClassification"),
    ],
)
def test_a_head_by_task_or_class(encoder: Path, options: dict[str, str], expected: str) -> None:
    assert type(load_source(str(encoder), **options).model).__name__ == expected


def test_without_architectures_it_is_the_bare_model(encoder: Path, tmp_path: Path) -> None:
    config = json.loads((encoder / "config.json").read_text())
    config.pop("architectures")
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_source(str(tmp_path), random_weights=True).model
    assert type(loaded) is transformers.BertModel


def test_random_weights_need_no_weights_and_are_the_same_each_time(tmp_path: Path) -> None:
    transformers.BertConfig(**TEXT, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    first, second = (
        load_source(str(tmp_path), random_weights=True, seed=3).model for _ in range(2)
    )
    assert isinstance(first, transformers.BertForMaskedLM)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    other = load_source(str(tmp_path), random_weights=True, seed=4).model
    assert not all(
        torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)
    )


def test_code_from_a_folder_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text(
        "from pathlib import Path\nimport torch\n"
        "from transformers import PreTrainedConfig, PreTrainedModel\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class OwnConfig(PreTrainedConfig):\n    model_type = 'own'\n"
        "class OwnModel(PreTrainedModel):\n    config_class = OwnConfig\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.fc = torch.nn.Linear(4, 4)\n"
        "        self.post_init()\n"
        "    def forward(self, x):\n        return self.fc(x)\n"
    )
    config = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="trust_remote_code"):
        load_source(str(tmp_path), random_weights=True)
    assert not (tmp_path / "ran").exists()
    loaded = load_source(str(tmp_path), random_weights=True, trust_remote_code=True).model
    assert type(loaded).__name__ == "OwnModel"


def test_a_head_without_weights_gives_a_note(encoder: Path) -> None:
    assert load_source(str(encoder)).notes == ()
    (note,) = load_source(str(encoder), task="text-classification").notes
    assert "classifier.weight" in note


def test_a_task_has_several_classes(tmp_path: Path) -> None:
    folder = save("speech", tmp_path)
    loaded = load_source(str(folder), task="automatic-speech-recognition").model
    assert type(loaded) is transformers.WhisperForConditionalGeneration


def test_a_factory_may_import_its_neighbours_when_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_lazy.py").write_text(
        "import torch\nmake = lambda: torch.nn.Linear(2, 2)\n"
    )
    (tmp_path / "inspect.py").write_text(
        "def make():\n    from neighbour_of_lazy import make\n    return make()\n"
    )
    source = load_source(f"{tmp_path}/inspect.py:make")
    assert isinstance(source.model, nn.Linear)
    assert source.name == "inspect.py:make"
    assert not sys.modules["inspect"].__file__.startswith(str(tmp_path))


def test_a_factory_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    (tmp_path / "make.py").write_text(
        "import torch\nfrom beside import WIDTH\n\nclass Own(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.fc = torch.nn.Linear(WIDTH, WIDTH)\n"
        "    def forward(self, x):\n        return self.fc(x)\n\n"
        "def factory():\n    return Own(), (torch.ones(1, WIDTH),)\n\nready = Own()\n"
    )
    source = load_source(f"{tmp_path}/make.py:factory")
    assert type(source.model).__qualname__ == "Own"
    assert source.inputs[0].shape == (1, 3)
    assert isinstance(load_source(f"{tmp_path}/make.py:Own").model, nn.Module)
    assert isinstance(load_source(f"{tmp_path}/make.py:ready").model, nn.Module)


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.mark,)


@pytest.mark.must
@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.bin", "model.pkl", "model"])
@pytest.mark.parametrize("torch_format", [True, False], ids=["torch.save", "pickle"])
def test_pickles_are_refused_unopened(name: str, torch_format: bool, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = tmp_path / name
    if torch_format:
        torch.save(Evil(mark), path)
    else:
        path.write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(
        SourceError, match="is a pickle, and opening one runs whatever code"
    ) as caught:
        load_source(str(path))
    assert "file.py:function" in str(caught.value)
    assert not mark.exists()


@pytest.mark.must
def test_pickled_weights_in_a_folder_do_not_run(encoder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "config.json").write_text((encoder / "config.json").read_text())
    torch.save({"weight": Evil(mark)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SourceError, match="cannot load"):
        load_source(str(tmp_path))
    assert not mark.exists()


def program(tmp_path: Path) -> Path:
    path = tmp_path / "net.pt2"
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    torch.export.save(torch.export.export(net, (torch.ones(2, 4),)), path)
    return path


@pytest.mark.filterwarnings("ignore")
def test_a_program_is_exported_as_torch_exports_it(tmp_path: Path) -> None:
    path = program(tmp_path)
    source = load_source(str(path))
    report = modelexport.export_model(
        source.model, None, tmp_path / "net.onnx", torch_nn_exceptions="all"
    )
    (tmp_path / "plain").mkdir()
    torch.onnx.export(
        torch.export.load(path),
        (),
        str(tmp_path / "plain" / "net.onnx"),
        dynamo=True,
        verbose=False,
    )
    modelexport.strip(tmp_path / "net.onnx", tmp_path / "stripped.onnx")
    assert (tmp_path / "stripped.onnx").read_bytes() == (
        tmp_path / "plain" / "net.onnx"
    ).read_bytes()
    exported = modelexport.load(report.onnx_path)
    assert report.coverage == 1.0
    assert {tag.hierarchy_module for _, tag in exported.items() if tag} == {"0", "1.0", "1.1"}
    assert exported.modules["1.1"].tag == "/Sequential/Sequential.1/LayerNorm.1"
    with pytest.raises(
        modelexport.ModelExportError, match="only the dynamo exporter takes a program"
    ):
        modelexport.export_model(source.model, None, tmp_path / "net.onnx", strategy="htp")


@pytest.mark.must
@pytest.mark.parametrize("part", ["weights", "constants", "sample_inputs"])
@pytest.mark.filterwarnings("ignore")
def test_nothing_in_a_program_is_unpickled(part: str, tmp_path: Path) -> None:
    path, mark = program(tmp_path), tmp_path / "ran"
    evil = io.BytesIO()
    torch.save({"weight": Evil(mark)}, evil)
    poisoned = tmp_path / "poisoned.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(poisoned, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if part == "sample_inputs" and "sample_inputs" in name:
                content = evil.getvalue()
            if part != "sample_inputs" and name.endswith(f"{part}_config.json"):
                config = json.loads(content)
                kind = "weight_0" if part == "weights" else "tensor_0"
                config["config"]["0.weight"] = {
                    "path_name": kind,
                    "is_param": True,
                    "use_pickle": True,
                    "tensor_meta": None,
                }
                content = json.dumps(config).encode()
            if part == "weights" and name.endswith("weight_0"):
                content = evil.getvalue()
            new.writestr(name, content)
        if part == "constants":
            new.writestr("net/data/constants/tensor_0", evil.getvalue())
    with pytest.raises(SourceError):
        load_source(str(poisoned))
    assert not mark.exists()


def test_a_program_of_another_version(tmp_path: Path) -> None:
    path = program(tmp_path)
    other = tmp_path / "other.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"99" if name.endswith("archive_version") else old.read(name))
    with pytest.raises(SourceError, match="another version of torch"):
        load_source(str(other))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("no-such/model", "check the network, or name a local folder"),
        ("empty", "has no config.json"),
        ("missing.pt2", "there is no file"),
        ("text.pt2", "is not a .pt2 archive"),
        ("missing.py:make", "there is no file missing.py"),
        ("broken.py:make", "importing broken.py failed: ZeroDivisionError"),
        ("good.py:absent", "has no 'absent'"),
        ("good.py:number", "is an int, not a callable"),
        ("good.py:text", "returned a str"),
        ("good.py:fails", "raised RuntimeError: out of luck"),
        ("good.py:leaves", "raised SystemExit: 0"),
        ("leaves.py:make", "importing leaves.py failed: SystemExit"),
        ("x" * 300, "cannot load"),
        ("model.onnx", "is an ONNX file already"),
        ("model.safetensors", "holds weights and no model"),
        ("notes.txt", "is a file"),
        ("damaged", "cannot load 'damaged'"),
        ("unknown", "cannot load 'unknown'"),
    ],
)
def test_what_is_wrong_in_one_line(
    spec: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "damaged", "unknown"):
        (tmp_path / folder).mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "martian"}')
    for name in ("text.pt2", "model.onnx", "model.safetensors", "notes.txt"):
        (tmp_path / name).write_text("not this")
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "good.py").write_text(
        "number = 3\ndef text():\n    return 'model'\n"
        "def fails():\n    raise RuntimeError('out of luck')\n"
        "def leaves():\n    raise SystemExit(0)\n"
    )
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(SourceError) as caught:
        load_source(spec)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_that_only_hugging_face_models_have(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="task is for Hugging Face models"):
        load_source("json:loads", task="fill-mask")


def test_a_misspelt_folder_is_looked_up_on_the_hub_and_the_near_one_is_named(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(encoder.parent)
    steps = list[str]()
    misspelt = encoder.name[:-1]

    def unreachable(*args: object, **options: object) -> None:
        raise ConnectionError("there is no network")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(SourceError, match="there is no network") as failure:
        load_source(misspelt, on_step=steps.append)
    assert steps == [f"load {misspelt} from the Hugging Face hub: there is no such folder"]
    assert failure.value.hint is not None
    assert failure.value.hint.startswith(f"did you mean the folder {encoder.name}? check the netw")
    with pytest.raises(SourceError) as failure:
        load_source("another/name")
    assert failure.value.hint is not None
    assert failure.value.hint.startswith("check the network")
    assert logging.getLogger("huggingface_hub").level == logging.ERROR
