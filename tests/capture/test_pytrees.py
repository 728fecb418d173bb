"""Objects of the caller's classes that hold tensors, as inputs and outputs of an export."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import modelexport
from caches import KEYS
from exports import EXPORTER
from modelexport.capture.hooks import OutputFilter, Trees
from modelexport.capture.pytrees import flatten_tree, named_leaves
from modelexport.errors import ArgumentTypeError
from proof import prove
from values import names

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


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
@pytest.mark.parametrize("strategy", EXPORTER)
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
