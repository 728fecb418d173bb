"""Example inputs: their origins, their shapes, and the errors when there are none."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from folders import KINDS, WORDS, save
from modelexport.errors import ModelRunError, SourceError
from modelexport.source.example_inputs import ExampleInputs, InputRequest, make_example_inputs
from modelexport.source.input_specs import InputSpec, read_specs
from modelexport.source.load import LoadedModel, load_source

pytestmark = pytest.mark.sanity
TEXT = "every node of this graph belongs to a module"
MAIN = {
    "text_encoder": ("input_ids", (1, 9)),
    "text_decoder": ("input_ids", (1, 9)),
    "encoder_decoder": ("input_ids", (1, 9)),
    "vision": ("pixel_values", (1, 3, 32, 32)),
    "audio": ("input_values", (1, 16000)),
    "speech": ("input_features", (1, 80, 100)),
    "text_and_image": ("pixel_values", (1, 3, 32, 32)),
}


def shapes(example: ExampleInputs) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in example.inputs.items()}


@pytest.fixture(scope="module", params=sorted(KINDS))
def source(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, LoadedModel]:
    folder = save(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, load_source(str(folder))


def test_each_kind_gets_inputs_from_its_own_processor(source: tuple[str, LoadedModel]) -> None:
    kind, loaded = source
    example = make_example_inputs(loaded, InputRequest(), seed=0)
    name, shape = MAIN[kind]
    assert shapes(example)[name] == shape
    assert example.origin.startswith("the model's ")
    assert "dummy" not in example.origin
    assert ("decoder_input_ids" in example.inputs) == (kind in ("encoder_decoder", "speech"))
    assert ("attention_mask" in example.inputs) == ("text" in kind or kind == "encoder_decoder")
    with torch.no_grad():
        loaded.model(**example.inputs)


def test_each_kind_gets_other_sizes_from_it_too(source: tuple[str, LoadedModel]) -> None:
    kind, loaded = source
    example = make_example_inputs(loaded, InputRequest(), seed=0)
    assert example.other_size is not None
    other = example.other_size()
    name, _ = MAIN[kind]
    assert set(other) == set(example.inputs)
    assert other[name].shape[0] == 2
    with torch.no_grad():
        loaded.model(**other)


@pytest.mark.parametrize(
    "kind", ["text_encoder", "text_decoder", "encoder_decoder", "vision", "audio"]
)
def test_without_a_processor_there_are_still_inputs(kind: str, tmp_path: Path) -> None:
    loaded = load_source(str(save(kind, tmp_path, with_processors=False)))
    example = make_example_inputs(loaded, InputRequest(), seed=0)
    assert MAIN[kind][0] in example.inputs
    assert "dummy_inputs" in example.origin or "guess" in example.origin
    with torch.no_grad():
        loaded.model(**example.inputs)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_source(str(save("text_encoder", tmp_path_factory.mktemp("encoder"))))


def test_a_text_of_ones_own(encoder: LoadedModel) -> None:
    example = make_example_inputs(encoder, InputRequest(text="node of graph"), seed=0)
    assert example.inputs["input_ids"].tolist() == [
        [WORDS.index(word) for word in ("node", "of", "graph")]
    ]


def test_a_shape_changes_what_goes_with_it(encoder: LoadedModel) -> None:
    example = make_example_inputs(encoder, InputRequest(shapes={"": (2, 20)}), seed=0)
    assert set(shapes(example).values()) == {(2, 20)}
    assert int(example.inputs["attention_mask"].min()) == 1
    assert int(example.inputs["input_ids"].max()) < len(WORDS)
    named = make_example_inputs(encoder, InputRequest(shapes={"input_ids": (1, 5)}), seed=0)
    assert set(shapes(named).values()) == {(1, 5)}


def test_a_new_batch_size_reaches_the_decoder(tmp_path: Path) -> None:
    loaded = load_source(str(save("encoder_decoder", tmp_path)))
    example = make_example_inputs(loaded, InputRequest(shapes={"": (3, 6)}), seed=0)
    assert shapes(example) == {
        "input_ids": (3, 6),
        "attention_mask": (3, 6),
        "decoder_input_ids": (3, 4),
    }


class Two(nn.Module):
    """Takes one input of tokens and one of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)

    def forward(self, tokens: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        scaled = self.words(tokens) * scale
        return scaled if bias is None else scaled + bias


class One(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_specs_say_everything(tmp_path: Path) -> None:
    text = (
        '{"tokens": {"shape": [2, 3], "dtype": "int64", "range": [5, 7]}, '
        '"scale": {"shape": [1], "range": [2, 3]}}'
    )
    specs = write(tmp_path / "specs.json", text)
    first, second = (
        make_example_inputs(LoadedModel(Two(), "two"), InputRequest(specs=specs), seed=1).inputs
        for _ in range(2)
    )
    assert first["tokens"].shape == (2, 3)
    assert set(first["tokens"].unique().tolist()) <= {5, 6}
    assert 2 <= float(first["scale"]) <= 3
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_arrays_are_used_as_they_are(tmp_path: Path) -> None:
    arrays = {"tokens": np.array([[1, 2]]), "scale": np.array([0.5], dtype=np.float32)}
    np.savez(tmp_path / "inputs.npz", **arrays)
    example = make_example_inputs(
        LoadedModel(Two(), "two"), InputRequest(specs=tmp_path / "inputs.npz"), seed=0
    )
    assert {name: value.tolist() for name, value in example.inputs.items()} == {
        "tokens": [[1, 2]],
        "scale": [0.5],
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            '{"tokens": {"shape": [1, 2]}, "scale": {"shape": [1]}, "size": {"shape": [1]}}',
            "describes 'size'",
        ),
        ('{"tokens": {"shape": [1, 2]}}', "lacks scale"),
        (
            '{"tokens": {"shape": [1, 2], "dtype": "int65"}, "scale": {"shape": [1]}}',
            "the unknown dtype 'int65'",
        ),
        ('{"tokens": {"shape": [1, -2]}, "scale": {"shape": [1]}}', "negative size"),
        ('{"tokens": {"shape": "1,2"}, "scale": {"shape": [1]}}', "does not describe inputs"),
        ('{"tokens": {"shape": [1], "rnage": [0, 1]}}', "does not describe inputs"),
        ('{"tokens": {"shape": [1], "range": [3, 1]}, "scale": {"shape": [1]}}', "the empty range"),
        (
            '{"tokens": {"shape": [1], "dtype": "int64", "range": [0, 0.5]}, '
            '"scale": {"shape": [1]}}',
            "has the range",
        ),
        (
            '{"tokens": {"shape": [1], "dtype": "int64", "range": [0, 1e30]}, '
            '"scale": {"shape": [1]}}',
            "has the range",
        ),
        (
            '{"tokens": {"shape": [1], "dtype": "quint8"}, "scale": {"shape": [1]}}',
            "the unknown dtype 'quint8'",
        ),
        (
            '{"tokens": {"shape": [100000, 100000, 1000]}, "scale": {"shape": [1]}}',
            "cannot make an input of shape",
        ),
        (
            '{"tokens": {"shape": [1' + "0" * 30 + ']}, "scale": {"shape": [1]}}',
            "cannot make an input of shape",
        ),
        (
            '{"tokens": {"shape": [1], "dtype": "int64", "range": [0, 9223372036854775808]}, '
            '"scale": {"shape": [1]}}',
            "cannot make an input of shape",
        ),
        ('["tokens"]', "does not describe inputs"),
        ("{", "is not JSON"),
    ],
)
def test_specs_that_do_not_fit(content: str, expected: str, tmp_path: Path) -> None:
    specs = write(tmp_path / "specs.json", content)
    with pytest.raises(SourceError) as caught:
        make_example_inputs(LoadedModel(Two(), "two"), InputRequest(specs=specs), seed=0)
    assert expected in str(caught.value)
    assert caught.value.hint


def zipped(header: bytes, packed: bytes = b"") -> bytes:
    """An .npz of one array with a header that numpy would not write."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            "x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + packed
        )
    return file.getvalue()


HUGE = zipped(b"{'descr': '<f4', 'fortran_order': False, 'shape': (4000000, 4000000)}")
"""More than there is memory for."""


@pytest.mark.parametrize(
    "content", [b"not a zip", b"", zipped(b"{'descr': \0"), zipped(b"["), zipped(b"[" * 3000), HUGE]
)
def test_an_npz_that_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "inputs.npz").write_bytes(content)
    with pytest.raises(SourceError, match=r"is not an \.npz file of numbers"):
        make_example_inputs(
            LoadedModel(Two(), "two"), InputRequest(specs=tmp_path / "inputs.npz"), seed=0
        )


@pytest.mark.regression
def test_specs_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "specs.json").write_bytes(b'{"tok\xffens": {"shape": [1]}}')
    with pytest.raises(SourceError, match="is not JSON"):
        read_specs(tmp_path / "specs.json")


@pytest.mark.must
@pytest.mark.parametrize(
    "array", [np.array([print], dtype=object), np.zeros(2, ">f4"), np.array(["text"])]
)
def test_what_is_no_tensor_in_an_npz_is_not_read(
    array: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    """Above all, objects are not unpickled."""
    np.savez(tmp_path / "inputs.npz", tokens=array)
    with pytest.raises(SourceError, match=r"is not an \.npz file of numbers"):
        make_example_inputs(
            LoadedModel(Two(), "two"), InputRequest(specs=tmp_path / "inputs.npz"), seed=0
        )


@pytest.mark.parametrize("inputs", [(torch.ones(1, 4),), {"x": torch.ones(1, 4)}, torch.ones(1, 4)])
def test_what_the_factory_returned_at_another_shape(inputs: Any) -> None:
    source = LoadedModel(One(), "one", inputs)
    assert make_example_inputs(source, InputRequest(), seed=0).origin == "the factory's own"
    changed = make_example_inputs(source, InputRequest(shapes={"": (3, 5)}), seed=0).inputs
    tensor = changed["x"] if isinstance(changed, dict) else changed[0]
    assert tensor.shape == (3, 5)


def test_noise_at_a_shape_for_a_bare_factory() -> None:
    assert make_example_inputs(
        LoadedModel(One(), "one"), InputRequest(shapes={"": (3, 5)}), seed=0
    ).inputs["x"].shape == (3, 5)
    wanted = InputRequest(shapes={"tokens": (2, 3), "scale": (1,)})
    assert (
        make_example_inputs(LoadedModel(Two(), "two"), wanted, seed=0).inputs["tokens"].dtype
        == torch.int64
    )


def test_inputs_that_the_model_does_not_run_on_are_found_before_the_export(tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", x=np.zeros((1, 4)))
    with pytest.raises(ModelRunError, match="must have the same dtype"):
        make_example_inputs(
            LoadedModel(nn_linear(), "linear"), InputRequest(specs=tmp_path / "inputs.npz"), seed=0
        )


def nn_linear() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    return Net()


def test_made_inputs_have_the_precision_of_the_model() -> None:
    model = nn_linear().to(torch.bfloat16)
    example = make_example_inputs(
        LoadedModel(model, "linear"), InputRequest(shapes={"x": (2, 4)}), seed=0
    )
    assert example.inputs["x"].dtype == torch.bfloat16


@pytest.mark.regression
def test_trying_a_model_leaves_it_as_it_was() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x + self.count

    model = Counts().train()
    make_example_inputs(
        LoadedModel(model, "counts", (torch.ones(1, 4),)), InputRequest(shapes={"": (2, 4)}), seed=0
    )
    assert float(model.count) == 0.0
    assert model.training


def test_no_inputs_at_all_prints_a_file_to_start_from(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no example inputs for Two") as caught:
        make_example_inputs(LoadedModel(Two(), "two"), InputRequest(), seed=0)
    assert caught.value.details[0] == "forward(tokens, scale, bias=None)"
    start = caught.value.details.index("{")
    specs = write(tmp_path / "specs.json", "\n".join(caught.value.details[start:]))
    assert read_specs(specs) == {"tokens": InputSpec((1, 8)), "scale": InputSpec((1, 8))}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (InputRequest(text="hello"), "no tokenizer"),
        (InputRequest(shapes={"y": (1, 2)}), "no input 'y'"),
        (InputRequest(specs=Path("absent.json")), "cannot read absent.json"),
        (InputRequest(specs=Path("x.json"), text="hello"), "both say what the inputs are"),
    ],
)
def test_wishes_that_cannot_be_met(wanted: InputRequest, expected: str) -> None:
    with pytest.raises(SourceError) as caught:
        make_example_inputs(LoadedModel(One(), "one", (torch.ones(1, 4),)), wanted, seed=0)
    assert expected in str(caught.value)
