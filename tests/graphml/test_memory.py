"""GraphML is written and read without initializers in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from graphml.building import model, value
from modelexport.options import PARAMETER_MODES

pytestmark = [pytest.mark.sanity]


_PEAK = """
import sys, modelexport
from pathlib import Path
source, graphml, mode, work = sys.argv[1:]
modelexport.export_graphml, modelexport.import_onnx
def peak():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
Path("/proc/self/clear_refs").write_text("5")
before = peak()
if work == "write":
    modelexport.export_graphml(source, graphml, parameters=mode)
else:
    modelexport.import_onnx(graphml, Path(graphml).with_name("back.onnx"))
print(peak() - before)
"""


@pytest.mark.performance
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak is read as Linux has it"
)
@pytest.mark.parametrize("mode", PARAMETER_MODES)
@pytest.mark.parametrize("external", [False, True])
def test_memory_does_not_grow_with_the_weights(external: bool, mode: str, tmp_path: Path) -> None:
    """Sixty megabytes in one tensor take no more than a few, written and read."""
    path = tmp_path / "model.onnx"
    weight = numpy_helper.from_array(np.zeros((5000, 3000), np.float32), "w")
    made = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [value("x", shape=[2, 5000])],
        [value("y")],
        [weight],
    )
    if external:
        onnx.save_model(made, path, save_as_external_data=True, location="w.bin")
    else:
        path.write_bytes(made.SerializeToString())
    for work in ("write", "read"):
        command = [sys.executable, "-c", _PEAK, str(path), str(tmp_path / "g.graphml"), mode, work]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert peak < 24_000, f"{work}: {peak} KiB"
