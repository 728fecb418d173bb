"""Objects that hold tensors, such as caches, as inputs and outputs of an export."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree

import modelexport
from caches import KEYS, decode_step
from modelexport.capture.hooks import OutputFilter, Trees
from modelexport.capture.pytrees import flatten_tree, named_leaves
from modelexport.errors import ArgumentTypeError
from modelexport.verification.feeds import make_feeds
from proof import prove, strip_bytes
from values import open_session

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
STRATEGIES = ["fx", "htp"]


def names(values: Any) -> list[str]:
    return [value.name for value in values]


@pytest.mark.must
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "whisper"])
def test_a_decoder_with_a_cache(name: str, strategy: str, tmp_path: Path) -> None:
    """Every promise of the map holds, and every module agrees by value."""
    model, inputs = decode_step(name)
    cache = copy.deepcopy(inputs["past_key_values"])
    assert prove(model, inputs, tmp_path, strategy).checked > 10
    path = tmp_path / "model.onnx"
    report = modelexport.verify(model, inputs, path, random_inputs=1)
    assert report.agrees
    root = next(module for module in report.modules if not module.module)
    before, after = map(_pytree.tree_leaves, (cache, inputs["past_key_values"]))
    assert len(root.tensors) == len(onnx.load(path).graph.output) > len(before) > 0
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_names_of_caches(strategy: str, tmp_path: Path) -> None:
    model, inputs = decode_step("llama")
    first = {"input_ids": torch.ones(1, 3, dtype=torch.long)}
    report = modelexport.export_model(model, first, tmp_path / "p.onnx", strategy=strategy)
    assert names(report.hierarchy.export.outputs) == ["last_hidden_state", *KEYS]
    assert report.dropped_outputs == ()
    report = modelexport.export_model(model, inputs, tmp_path / "d.onnx", strategy=strategy)
    repeated = [f"output.{name}" for name in KEYS]
    assert names(report.hierarchy.export.inputs) == ["input_ids", *KEYS]
    assert names(report.hierarchy.export.outputs) == ["last_hidden_state", *repeated]
    assert report.dropped_outputs == ()
    positional = (inputs["input_ids"], None, None, inputs["past_key_values"])
    report = modelexport.export_model(model, positional, tmp_path / "a.onnx", strategy=strategy)
    assert names(report.hierarchy.export.inputs) == ["input_ids", *KEYS]
    assert modelexport.verify(model, positional, report.onnx_path).agrees


@pytest.mark.must
@pytest.mark.parametrize("name", ["llama", "t5", "mamba"])
def test_stripped_bytes_with_a_cache_are_the_baseline(name: str, tmp_path: Path) -> None:
    model, inputs = decode_step(name)
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="fx")
    plain = tmp_path / "plain" / "m.onnx"
    plain.parent.mkdir()
    torch.onnx.export(
        model,
        (),
        str(plain),
        kwargs=inputs,
        dynamo=True,
        verbose=False,
        input_names=names(report.hierarchy.export.inputs),
        output_names=names(report.hierarchy.export.outputs),
    )
    assert strip_bytes(report.onnx_path) == plain.read_bytes()


def test_generation_with_the_exported_files(tmp_path: Path) -> None:
    """The outputs of one step are the inputs of the next, by name."""
    model, step = decode_step("llama")
    tokens = torch.arange(5)[None]
    shapes = {"input_ids": None, **{name: {2: "past"} for name in KEYS}}
    prefill = modelexport.export_model(
        model, {"input_ids": tokens[:, :2]}, tmp_path / "p.onnx", strategy="fx"
    )
    decode = modelexport.export_model(
        model, step, tmp_path / "d.onnx", strategy="fx", dynamic_shapes=shapes
    )
    outputs = run(prefill.onnx_path, {"input_ids": tokens[:, :2].numpy()})
    for position in range(2, 5):
        cache = {name.removeprefix("output."): value for name, value in outputs.items()}
        cache.pop("last_hidden_state")
        token = tokens[:, position : position + 1].numpy()
        outputs = run(decode.onnx_path, {"input_ids": token, **cache})
    with torch.no_grad():
        expected = model(tokens).last_hidden_state[:, -1:]
    np.testing.assert_allclose(outputs["last_hidden_state"], expected, rtol=1e-3, atol=1e-4)


def run(path: Path, feeds: dict[str, Any]) -> dict[str, Any]:
    session = open_session(str(path))
    outputs = names(session.get_outputs())
    return dict(zip(outputs, session.run(outputs, feeds), strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dynamic_shapes_of_a_cache(strategy: str, tmp_path: Path) -> None:
    """They may be nested as torch.export nests them, or by the names of the tensors."""
    model, inputs = decode_step("llama", mask=True)
    plain = {"attention_mask": {1: "total"}}
    files = []
    for number, shapes in enumerate(
        ({"past_key_values": [{2: "past"}] * 4}, {name: {2: "past"} for name in KEYS})
    ):
        report = modelexport.export_model(
            model,
            inputs,
            tmp_path / f"{number}.onnx",
            strategy=strategy,
            dynamic_shapes={**plain, **shapes},
            external_data=False,
            scrub=True,  # torch numbers the code that it generates
        )
        files.append(strip_bytes(report.onnx_path))
        by_name = {value.name: value.shape for value in report.hierarchy.export.inputs}
        assert by_name[KEYS[3]] == (1, 1, "past", 8)
        assert by_name["attention_mask"] == (1, "total")
        longer = {
            **inputs,
            "attention_mask": torch.ones(1, 11, dtype=torch.long),
            "past_key_values": _pytree.tree_map(
                lambda tensor: torch.cat([tensor, tensor[:, :, :3]], 2), inputs["past_key_values"]
            ),
        }
        assert modelexport.verify(model, longer, report.onnx_path).agrees
    assert files[0] == files[1]


def test_recorded_inputs_feed_a_cache(tmp_path: Path) -> None:
    model, inputs = decode_step("llama")
    path = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="fx").onnx_path
    feeds = make_feeds(modelexport.load(path))
    assert feeds.source == "the recorded inputs"
    assert {name: value.shape for name, value in feeds.values.items()} == {
        "input_ids": (1, 1),
        **dict.fromkeys(KEYS, (1, 1, 7, 8)),
    }
    assert modelexport.profile(path, runs=1).modules
    changed = tmp_path / "changed.onnx"
    changed.write_bytes(strip_bytes(path))
    report = modelexport.retag(path, changed, tmp_path / "retagged.onnx")
    assert report.compared == "the recorded inputs"


def test_what_an_exporter_cannot_write_is_dropped_and_named(tmp_path: Path) -> None:
    """torchscript lacks an operator that updates this cache."""
    model, inputs = decode_step("mamba")
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="htp")
    assert report.dropped_outputs == ("cache_params: DynamicCache",)
    assert names(report.hierarchy.export.outputs) == ["last_hidden_state"]
    assert modelexport.verify(model, inputs, report.onnx_path).agrees


@dataclasses.dataclass
class State:
    total: Tensor
    parts: list[Tensor]


class Ring:
    """A class that is no dataclass, and whose registration has no names."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.links = {"left": left, "right": right}


class Counted:
    """A class whose registration has a number among its leaves."""

    def __init__(self, value: Tensor, count: int) -> None:
        self.value = value
        self.count = count


class Unregistered:
    pass


torch.export.register_dataclass(State, serialized_type_name="test_pytrees.State")
_pytree.register_pytree_node(
    Ring,
    lambda ring: (list(ring.links.values()), None),
    lambda leaves, _: Ring(*leaves),
    flatten_with_keys_fn=lambda ring: (
        [(_pytree.SequenceKey(n), link) for n, link in enumerate(ring.links.values())],
        None,
    ),
)
_pytree.register_pytree_node(
    Counted, lambda own: ([own.value, own.count], None), lambda leaves, _: Counted(*leaves)
)


class TakesObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, state: State, rings: list[Ring]) -> dict[str, Any]:
        y = self.fc(x) + state.total
        parts = [part * 2 for part in state.parts]
        first, second = (ring.links for ring in rings)
        ring = Ring(first["left"] * first["right"] + y, second["left"] * second["right"] - y)
        return {
            "y": y,
            "state": State(state.total + y, parts),
            "nested": {"ring": ring, "pair": (y + 1, y + 2)},
            "counted": Counted(y * 3, 7),
            "other": Unregistered(),
        }


def make_objects() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    a, b, c, d, e, f, g, h = torch.randn(8, 2, 4, generator=generator)
    return {"x": a, "state": State(b, [c, d]), "rings": [Ring(e, f), Ring(g, h)]}


@pytest.mark.must
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_registered_classes_of_the_caller(strategy: str, tmp_path: Path) -> None:
    model, inputs = TakesObjects(), make_objects()
    assert prove(model, inputs, tmp_path, strategy).checked > 3
    exported = modelexport.load(tmp_path / "model.onnx").sidecar
    assert exported is not None
    rings = [f"rings_{number}.links.{side}" for number in (0, 1) for side in ("left", "right")]
    expected = ["x", "state.total", "state.parts.0", "state.parts.1", *rings]
    assert names(exported.export.inputs) == expected
    assert names(exported.export.outputs) == [
        "y",
        "output.state.total",
        "output.state.parts.0",
        "output.state.parts.1",
        "nested_ring.links.left",
        "nested_ring.links.right",
        "nested_pair_0",
        "nested_pair_1",
        "counted.value",
    ]
    assert exported.export.dropped_outputs == ("counted.count: int", "other: Unregistered")
    assert modelexport.verify(model, inputs, tmp_path / "model.onnx", random_inputs=2).agrees


def test_objects_in_a_tuple_are_named_by_position() -> None:
    filtered = OutputFilter()
    filtered(nn.Identity(), (), (torch.ones(1), Ring(torch.ones(1), torch.ones(2))))
    assert filtered.names == ["output_0", "output_1.links.left", "output_1.links.right"]
    filtered(nn.Identity(), (), Ring(torch.ones(1), torch.ones(2)))
    assert filtered.names == ["output.links.left", "output.links.right"]
    filtered(nn.Identity(), (), (torch.ones(1), Counted(torch.ones(1), 3)))
    assert filtered.names == ["output_0", "output_1.value"]
    assert filtered.dropped == ["1.count: int"]
    dropped = OutputFilter(trees=Trees.DROP)
    kept = dropped(nn.Identity(), (), (torch.ones(1), Ring(torch.ones(1), torch.ones(2))))
    assert (len(kept), dropped.dropped, dropped.names) == (1, ["1: Ring"], [])


@pytest.mark.parametrize("value", [Unregistered(), [Unregistered()], Ring(Unregistered(), None)])  # type: ignore[arg-type]
def test_objects_that_cannot_be_flattened_are_rejected(value: object, tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="example input 'state' is a "):
        modelexport.export_model(
            TakesObjects(), {"x": torch.ones(1), "state": value}, tmp_path / "m.onnx"
        )


class Odd:
    """A class whose attributes do not hold its leaves."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Broken(Odd):
    pass


def _fail(_: Broken) -> Any:
    raise RuntimeError("not now")


_pytree.register_pytree_node(
    Odd,
    lambda odd: ([odd.value + 1, odd.value + 2], None),
    lambda leaves, _: Odd(leaves[0]),
    flatten_with_keys_fn=lambda odd: (
        [(_pytree.MappingKey(key), odd.value) for key in ("one", "two")],
        None,
    ),
)
_pytree.register_pytree_node(Broken, _fail, lambda leaves, _: Broken(*leaves))


def test_names_of_leaves() -> None:
    one = torch.ones(1)
    assert list(flatten_tree(Ring(one, one)) or ()) == ["links.left", "links.right"]
    assert list(flatten_tree(Odd(one)) or ()) == ["one", "two"]
    assert flatten_tree(Broken(one)) is None
    nested = {"a": (one, Ring(one, one)), "b": None}
    assert [name for name, _ in named_leaves("x", nested)] == [
        "x_a_0",
        "x_a_1.links.left",
        "x_a_1.links.right",
        "x_b",
    ]


def test_names_do_not_depend_on_the_registration(tmp_path: Path) -> None:
    """transformers has two ways to register its caches; a process has one of them.

    dynamo cannot export a model that takes a cache registered in the older way.
    """
    script = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from transformers.integrations.executorch import register_dynamic_cache_export_support
        register_dynamic_cache_export_support()
        from caches import decode_step
        import modelexport
        model, inputs = decode_step("llama")
        report = modelexport.export_model(model, inputs, sys.argv[2], strategy="htp")
        assert modelexport.verify(model, inputs, report.onnx_path).agrees
        print(*sorted(value.name for value in report.hierarchy.export.inputs))
    """
    lines = "\n".join(line.strip() for line in script.splitlines())
    folder = str(Path(__file__).parents[1])
    command = [sys.executable, "-W", "ignore", "-c", lines, folder, str(tmp_path / "m.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["input_ids", *KEYS], done.stderr


def test_a_live_program_with_a_cache(tmp_path: Path) -> None:
    model, inputs = decode_step("t5")
    expected = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="fx")
    program = torch.export.export(model, (), kwargs=inputs)
    report = modelexport.export_model(program, None, tmp_path / "p.onnx")
    for ours, theirs in (
        (report.hierarchy.export.inputs, expected.hierarchy.export.inputs),
        (report.hierarchy.export.outputs, expected.hierarchy.export.outputs),
    ):
        assert names(ours) == names(theirs)
    assert modelexport.verify(program, None, report.onnx_path).agrees


class Strict:
    """A class that takes no other tensors than those of the model."""

    def __init__(self, value: Tensor) -> None:
        assert value.dim() == 2
        self.value = value


_pytree.register_pytree_node(
    Strict,
    lambda own: ([own.value], None),
    lambda leaves, _: Strict(*leaves),
    flatten_with_keys_fn=lambda own: ([(_pytree.GetAttrKey("value"), own.value)], None),
)


class ReturnsStrict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Strict:
        return Strict(self.fc(x))


def test_torch_names_what_cannot_be_rebuilt(tmp_path: Path) -> None:
    program = torch.export.export(ReturnsStrict(), (torch.ones(2, 4),))
    report = modelexport.export_model(program, None, tmp_path / "p.onnx")
    assert names(report.hierarchy.export.outputs) == ["linear"]
    assert modelexport.verify(program, None, report.onnx_path).agrees


def test_transformers_still_has_what_is_called() -> None:
    """If it moves, caches are dropped without an error."""
    from transformers.exporters import exporter_dynamo

    assert exporter_dynamo.Cache is transformers.Cache
    assert exporter_dynamo.PreTrainedModel is transformers.PreTrainedModel
