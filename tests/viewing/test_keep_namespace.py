"""`--scrub=keep-namespace`: scrubbed nodes have a namespace, and `strip` removes it exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import modelexport
from exports import build, cases
from modelexport.cli.main import main
from modelexport.tagged.strip import scrub_bytes

pytestmark = pytest.mark.must


def node_protos(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Iterate over nodes in the order of `TaggedModel`."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from node_protos(attribute.g)


def metadata(path: Path) -> list[dict[str, str]]:
    """Return the metadata of every node."""
    nodes = node_protos(onnx.load(str(path), load_external_data=False).graph)
    return [{entry.key: entry.value for entry in node.metadata_props} for node in nodes]


@pytest.mark.parametrize(("name", "strategy"), cases("conditional_bodies", "block_three_times"))
def test_nodes_have_their_tags_as_namespaces(name: str, strategy: str, tmp_path: Path) -> None:
    model, inputs = build(name, strategy)
    files = {}
    for scrub in (False, True, "keep-namespace"):
        path = files[scrub] = tmp_path / str(scrub) / "m.onnx"
        path.parent.mkdir()
        modelexport.export_model(model, inputs, path, strategy=strategy, scrub=scrub)
    kept = files["keep-namespace"]
    tags = [tag.hierarchy_path for tag in modelexport.load(kept).tags if tag is not None]
    assert metadata(kept) == [{"namespace": tag[1:]} for tag in tags]
    assert modelexport.validate(kept, check_consistency=True).valid
    onnx.checker.check_model(str(kept), full_check=True)
    record = json.loads((kept.parent / "m_hierarchy.json").read_text())["export"]
    assert (record["scrubbed"], record["namespaces"]) == (True, True)

    # Without the map, all that is left is the scrubbed baseline.
    bare = {
        scrub: modelexport.strip(path, path.with_name("bare.onnx")) for scrub, path in files.items()
    }
    expected = scrub_bytes(bare[False].read_bytes())
    assert bare["keep-namespace"].read_bytes() == bare[True].read_bytes() == expected
    assert not any(metadata(bare["keep-namespace"]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).relu()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    modelexport.export_model(Net(), torch.ones(2, 4), path, strategy="fx", scrub="keep-namespace")
    return path


def test_a_retagged_file_keeps_the_namespaces_of_the_changed_one(
    kept: Path, tmp_path: Path
) -> None:
    proto = onnx.load(str(kept))
    for number, node in enumerate(proto.graph.node):
        node.name = f"renamed {number}"
    changed, retagged = tmp_path / "changed.onnx", tmp_path / "retagged.onnx"
    onnx.save(proto, str(changed))
    modelexport.retag(kept, changed, retagged)
    assert metadata(retagged) == metadata(kept)
    bare = modelexport.strip(retagged, tmp_path / "bare.onnx")
    assert bare.read_bytes() == changed.read_bytes()


def test_namespaces_of_others_stay(kept: Path, tmp_path: Path) -> None:
    """What the map does not have is not the map's to remove."""
    plain = tmp_path / "plain.onnx"
    modelexport.export_model(Net(), torch.ones(2, 4), plain, strategy="fx")
    before = [entries["namespace"] for entries in metadata(plain)]
    bare = modelexport.strip(plain, tmp_path / "bare.onnx")
    assert [entries["namespace"] for entries in metadata(bare)] == before

    proto = onnx.load(str(kept))
    proto.graph.node[0].metadata_props.add(key="other", value="1")
    onnx.save(proto, str(kept))
    bare = modelexport.strip(kept, tmp_path / "other.onnx")
    assert metadata(bare) == [{"other": "1"}, *([{}] * (len(proto.graph.node) - 1))]


def test_nothing_of_the_map_in_a_clean_file(tmp_path: Path) -> None:
    with pytest.raises(modelexport.ArgumentError, match="no namespace to keep"):
        modelexport.export_model(
            Net(), torch.ones(2, 4), tmp_path / "m.onnx", scrub="keep-namespace", clean=True
        )
    with pytest.raises(modelexport.ArgumentTypeError, match='"keep-namespace", got'):
        modelexport.export_model(
            Net(),
            torch.ones(2, 4),
            tmp_path / "m.onnx",
            scrub="namespace",  # type: ignore[arg-type]
        )


def test_the_flag_takes_a_value_only_behind_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    return nn.Linear(4, 4), (torch.ones(1, 4),)\n"
    )
    source, output = f"{tmp_path / 'model.py'}:make", str(tmp_path / "m.onnx")

    def run(*flags: str) -> Result:
        return CliRunner().invoke(main, ["export", *flags, source, output])

    for flags, expected in (
        (("--scrub=keep-namespace",), [{"namespace": "Linear"}]),
        (("--scrub",), [{}]),
    ):
        result = run(*flags)
        assert result.exit_code == 0, result.output
        assert metadata(Path(output)) == expected
    result = run("--scrub=namespace")
    assert result.exit_code == 2
    assert "'namespace' is not keep-namespace" in result.output
