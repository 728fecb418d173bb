"""Export one small model with one strategy, and judge the result, also by value."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnxruntime
import torch
from torch import nn
from transformers.exporters import OnnxConfig, OnnxExporter

import modelexport
import proof
from modelexport.errors import first_line
from modelexport.source.input_specs import configurations
from scopes import differences, recorded_scopes
from zoo import distinct

EXPORTERS = {"fx": "dynamo", "htp": "torchscript"}
TRANSFORMERS = "transformers"
"""The exporter that `auto` tries next where dynamo cannot export the model."""


class Outcome(msgspec.Struct, frozen=True):
    """What an export came to.

    `status` is exported; torch-cannot (plain torch cannot export it either); torch-wrong (ONNX
    Runtime rejects torch's own file, or it computes something else); we-fail; refused (a language
    model that cannot be exported in parts); no-answer; not-built.
    """

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


class _Case(NamedTuple):
    """A model to export, and the folder to export it to."""

    strategy: str
    model: nn.Module
    inputs: dict[str, Any]
    folder: Path

    @property
    def exporter(self) -> str:
        """The exporter that goes with the strategy."""
        return EXPORTERS.get(self.strategy, self.strategy)

    @property
    def target(self) -> Path:
        """The exported file."""
        return self.folder / "model.onnx"


class _FailureError(Exception):
    """The export is not right."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def judge(model_type: str, strategy: str, model: nn.Module, inputs: dict[str, Any]) -> Outcome:
    """Export a model in a temporary folder and judge the result."""
    outcome = Outcome(model_type, strategy, "exported")
    distinct(model)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judge(outcome, _Case(strategy, model, inputs, Path(folder)))


def _judge(outcome: Outcome, case: _Case) -> Outcome:
    """Check the map, then the file, then the values."""
    try:
        report, recorded = _export(case)
        outcome = msgspec.structs.replace(
            outcome,
            nodes=report.nodes,
            modules=report.hierarchy.statistics.modules,
            covering=sum(
                record.covers is not msgspec.UNSET for record in report.hierarchy.nodes.values()
            ),
        )
        exported = modelexport.load(case.target)
        returned = _check_map(case, exported, recorded)
        _check_file(case, report)
        verdict = _check_values(case, exported, returned)
    except _FailureError as failure:
        return msgspec.structs.replace(outcome, status=failure.status, reason=failure.reason)
    outcome = msgspec.structs.replace(outcome, values=verdict.checked)
    if not verdict.failures:
        return outcome
    wrong = _difference(case, returned[""][0].given)
    return msgspec.structs.replace(
        outcome,
        status="torch-wrong" if wrong else "we-fail",
        reason=wrong or "; ".join(verdict.failures),
    )


def _export(case: _Case) -> tuple[modelexport.ExportReport, Any]:
    """Export the model, and record the scopes that torch itself records meanwhile."""
    try:
        with recorded_scopes(case.model) as recorded:
            report = modelexport.export_model(
                case.model, case.inputs, case.target, exporter=case.exporter, fallback=False
            )
    except modelexport.ModelExportError as error:
        cause = " ".join(line.strip() for line in error.details) or error.message
        status = "we-fail" if _plain_export_works(case) else "torch-cannot"
        raise _FailureError(status, cause) from error
    return report, recorded


def _check_map(case: _Case, exported: Any, recorded: Any) -> dict[str, Any]:
    """Check the modules and tags; return what each module returned in PyTorch."""
    try:
        returned = proof.pytorch_values(case.model, case.inputs)
        unused = {path for path in returned if exported.modules[path].status == "unused"}
        if unused:  # some models take another path when they are traced
            unused -= _modules_run_by_plain_export(case)
        returned = {path: calls for path, calls in returned.items() if path not in unused}
        proof.check_map(exported, returned)
        wrong = differences(exported, case.model, recorded)
        assert not wrong, (
            f"{len(wrong)} nodes are not in the module that torch recorded: {wrong[0]}"
        )
    except AssertionError as error:
        raise _FailureError("we-fail", str(error)) from error
    return returned


def _check_file(case: _Case, report: modelexport.ExportReport) -> None:
    """Check the inputs of the file and validate it."""
    infos = report.hierarchy.export.inputs
    unknown = [info.name for info in infos if info.name not in case.inputs]
    if unknown:
        reason = f"the file asks for {', '.join(unknown)}, which was not given"
        raise _FailureError("torch-wrong", reason)
    findings = modelexport.validate(case.target, check_consistency=True).findings
    ours = [finding.message for finding in findings if finding.code != "onnx-invalid"]
    if ours:
        raise _FailureError("we-fail", ours[0])
    if findings:
        raise _FailureError("torch-wrong", findings[0].message)


def _check_values(case: _Case, exported: Any, returned: dict[str, Any]) -> Any:
    """Run the file, and look for every tensor that every module returned."""
    try:
        proof.check_valid(case.target)
        values = proof.onnx_values(case.target, case.inputs)
    except Exception as error:  # the bytes are torch's: other tests check that
        reason = f"{type(error).__name__}: {first_line(error)}"[:300]
        raise _FailureError("torch-wrong", reason) from error
    return proof.value_test(exported, returned, values, reshaped=True)


def _modules_run_by_plain_export(case: _Case) -> set[str]:
    """Find the modules that run in a plain export."""
    ran: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, path=path: ran.add(path))
        for path, module in case.model.named_modules()
    ]
    _plain_export_works(case)
    for hook in hooks:
        hook.remove()
    return ran


def _plain_export_works(case: _Case) -> bool:
    """Return whether torch alone can export the model, given its best chance: without a cache."""
    plain = case.folder / "plain"
    plain.mkdir()
    for part in configurations(getattr(case.model, "config", None)):
        part.use_cache = False
    try:
        if case.exporter == TRANSFORMERS:
            config = OnnxConfig(output_path=str(plain / "model.onnx"))
            OnnxExporter().export(case.model, copy.deepcopy(case.inputs), config)
        else:
            proof.plain_export(case.model, case.inputs, plain / "model.onnx", case.exporter)
    except Exception:
        return False
    return True


def _difference(case: _Case, given: list[np.ndarray]) -> str:
    """Describe how the file differs from PyTorch; if it does, the map is not at fault."""
    session = onnxruntime.InferenceSession(str(case.target), providers=["CPUExecutionProvider"])
    feeds = {value.name: case.inputs[value.name].numpy() for value in session.get_inputs()}
    results = [value for value in session.run(None, feeds) if value.dtype.kind == "f"]
    if any(not np.isfinite(value).all() for value in given):
        return "PyTorch's own results are not finite"
    for wanted, got in zip(given, results, strict=False):
        if wanted.shape != got.shape:
            return f"the file's result has the shape {got.shape}, PyTorch's {wanted.shape}"
        if not proof.same(wanted, got):
            return f"the file's results differ from PyTorch's by {np.abs(wanted - got).max():.2g}"
    return ""


def warm_up() -> None:
    """Load what every export loads, before processes are forked."""
    torch.set_num_threads(1)
    for strategy in EXPORTERS:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        judge("warm-up", strategy, model, {"input": torch.ones(1, 4)})
