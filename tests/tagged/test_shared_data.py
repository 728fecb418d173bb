"""One data file for several models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from modelexport.onnx_file.shared_data import SharedData


def model(folder: Path, name: str, **arrays: np.ndarray) -> tuple[bytes, dict[str, Path]]:
    """Write a model with its initializers in a data file; return its bytes and the file."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [next(iter(arrays))], ["y"])],
        "g",
        [],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, key) for key, array in arrays.items()],
    )
    path = folder / f"{name}.onnx"
    onnx.save(
        onnx.helper.make_model(graph),
        path,
        save_as_external_data=True,
        location=f"{name}.data",
        size_threshold=1024,
    )
    return path.read_bytes(), {f"{name}.data": folder / f"{name}.data"}


def load(folder: Path, name: str, data: bytes) -> dict[str, np.ndarray]:
    (folder / name).write_bytes(data)
    loaded = onnx.load(folder / name)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in loaded.graph.initializer}


@pytest.mark.sanity
def test_equal_tensors_are_stored_once(tmp_path: Path) -> None:
    a, b, c = (np.random.default_rng(seed).random(1000, np.float32) for seed in range(3))
    small = np.arange(3, dtype=np.float32)
    out = tmp_path / "out"
    out.mkdir()
    shared = SharedData(out / "all.data", "all.data")
    first = shared.adopt(*model(tmp_path, "first", a=a, b=b, small=small))
    second = shared.adopt(*model(tmp_path, "second", x=b, y=c, z=a, small=small))
    assert not (tmp_path / "second.data").exists()
    loaded = load(out, "first.onnx", first)
    assert [np.array_equal(loaded[k], v) for k, v in (("a", a), ("b", b), ("small", small))] == [
        True
    ] * 3
    loaded = load(out, "second.onnx", second)
    assert [np.array_equal(loaded[k], v) for k, v in (("x", b), ("y", c), ("z", a))] == [True] * 3
    size = (out / "all.data").stat().st_size
    assert 3 * a.nbytes <= size <= 3 * a.nbytes + 2 * 4096


@pytest.mark.sanity
def test_a_model_without_external_data_stays_as_it_is(tmp_path: Path) -> None:
    data, _ = model(tmp_path, "small", a=np.zeros(3, np.float32))
    shared = SharedData(tmp_path / "all.data", "all.data")
    assert shared.adopt(data, {}) == data
    assert (tmp_path / "all.data").stat().st_size == 0
