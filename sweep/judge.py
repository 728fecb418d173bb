"""Exports one small model with one strategy and judges what came out, the value test included."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import torch
from torch import nn

import modelexport
import proof
from modelexport.errors import first_line
from modelexport.source.guess import configurations
from scopes import differences, recorded_scopes
from zoo import distinct

EXPORTERS = {"fx": "dynamo", "htp": "torchscript"}


class Outcome(msgspec.Struct):
    """`status`: exported; torch-cannot (no export by plain torch either); torch-wrong (torch's own file
    is refused by ONNX Runtime or computes something else); we-fail; not-built."""

    model_type: str
    strategy: str
    status: str
    reason: str = ""
    nodes: int = 0
    covering: int = 0
    """Nodes that implement operations of several modules."""
    modules: int = 0
    values: int = 0
    seconds: float = 0.0


def judge(model_type: str, strategy: str, model: nn.Module, inputs: dict[str, Any]) -> Outcome:
    outcome = Outcome(model_type, strategy, "exported")
    distinct(model)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _judge(outcome, model, inputs, Path(folder))
    return outcome


def _judge(outcome: Outcome, model: nn.Module, inputs: dict[str, Any], folder: Path) -> None:
    target = folder / "model.onnx"
    try:
        with recorded_scopes(model) as recorded:
            report = modelexport.export_model(model, inputs, target, outcome.strategy)
    except modelexport.ModelExportError as error:
        able = _plain_can(model, inputs, folder, EXPORTERS[outcome.strategy])
        outcome.status, outcome.reason = ("we-fail" if able else "torch-cannot"), _cause(error)
        return
    outcome.nodes, outcome.modules = report.nodes, report.hierarchy.statistics.modules
    outcome.covering = sum(
        record.covers is not msgspec.UNSET for record in report.hierarchy.nodes.values()
    )
    exported = modelexport.load(target)
    try:
        returned = proof.pytorch_values(model, inputs)
        idle = {path for path in returned if exported.modules[path].status == "unused"}
        idle -= (
            _ran_while_exporting(model, inputs, folder, EXPORTERS[outcome.strategy])
            if idle
            else set()
        )
        returned = {path: calls for path, calls in returned.items() if path not in idle}
        proof.check_map(exported, returned)
        wrong = differences(exported, model, recorded)
        assert not wrong, (
            f"{len(wrong)} nodes are not in the module that torch recorded: {wrong[0]}"
        )
    except AssertionError as error:
        outcome.status, outcome.reason = "we-fail", str(error)
        return
    asked = [info.name for info in report.hierarchy.export.inputs if info.name not in inputs]
    if asked:
        outcome.status, outcome.reason = (
            "torch-wrong",
            f"the file asks for {', '.join(asked)}, which was not given",
        )
        return
    findings = modelexport.validate(target, check_consistency=True).findings
    ours = [found.message for found in findings if found.code != "onnx-invalid"]
    if findings:
        outcome.status, outcome.reason = (
            ("we-fail", ours[0]) if ours else ("torch-wrong", findings[0].message)
        )
        return
    try:
        proof.check_valid(target)
        values = proof.onnx_values(target, inputs)
    except Exception as error:  # the bytes are torch's: see the tests for that promise
        outcome.status, outcome.reason = "torch-wrong", _line(error)
        return
    verdict = proof.value_test(exported, returned, values, reshaped=True)
    outcome.values = verdict.checked
    if verdict.failures:
        wrong = _differs(target, inputs, returned[""][0].given)
        outcome.status = "torch-wrong" if wrong else "we-fail"
        outcome.reason = wrong or "; ".join(verdict.failures)


def _ran_while_exporting(
    model: nn.Module, inputs: dict[str, Any], folder: Path, exporter: str
) -> set[str]:
    """The modules that run in a plain export: some models take another way when they are traced."""
    ran: set[str] = set()
    hooks = [
        m.register_forward_pre_hook(lambda *_, path=path: ran.add(path))
        for path, m in model.named_modules()
    ]
    _plain_can(model, inputs, folder, exporter)
    for hook in hooks:
        hook.remove()
    return ran


def _plain_can(model: nn.Module, inputs: dict[str, Any], folder: Path, exporter: str) -> bool:
    """Whether torch alone can, given its best chance: without a cache in the outputs, and without gradients."""
    plain = folder / "plain"
    plain.mkdir()
    for part in configurations(getattr(model, "config", None)):
        part.use_cache = False
    try:
        proof.plain_export(model, inputs, plain / "model.onnx", exporter)
    except Exception:
        return False
    return True


def _differs(path: Path, inputs: dict[str, Any], given: list[np.ndarray]) -> str:
    """What tells the file's results from PyTorch's, if anything does: then the fault is not the map's."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {value.name: inputs[value.name].numpy() for value in session.get_inputs()}
    results = [value for value in session.run(None, feeds) if value.dtype.kind == "f"]
    if any(not np.isfinite(value).all() for value in given):
        return "PyTorch's own results are not finite"
    for wanted, got in zip(given, results, strict=False):
        if wanted.shape != got.shape:
            return f"the file's result has the shape {got.shape}, PyTorch's {wanted.shape}"
        if not proof.same(wanted, got):
            return f"the file's results differ from PyTorch's by {np.abs(wanted - got).max():.2g}"
    return ""


def _cause(error: modelexport.ModelExportError) -> str:
    """Why torch failed, in one line."""
    return " ".join(line.strip() for line in error.details) or error.message


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:300]


def warm_up() -> None:
    """Load what every export loads, before the processes are forked."""
    torch.set_num_threads(1)
    for strategy in EXPORTERS:
        judge(
            "warm-up",
            strategy,
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
            {"input": torch.ones(1, 4)},
        )
