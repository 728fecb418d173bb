"""export_model(): from a live model to a tagged file and its sidecar, step by step."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.export import ExportedProgram

from modelexport.attribution.evidence import Facts
from modelexport.attribution.module_records import HierarchyMap, build_map, tagged_chunks
from modelexport.attribution.strategies import (
    FX,
    HTP,
    ExportStrategy,
    Strategy,
    attribute,
    check_exporter,
    find_strategy,
)
from modelexport.capture import dynamo, torchscript
from modelexport.capture.failure import explain_failure
from modelexport.capture.inputs import ModelInputs, bind_inputs, check_model_runs, parse_inputs
from modelexport.capture.model_state import (
    EXPORT_LOCK,
    check_has_weights,
    exceeds_one_file,
    unwrap_model,
)
from modelexport.capture.module_tree import read_module_tree, read_program_tree
from modelexport.capture.torchscript import note_lines
from modelexport.capture.trace import Baseline, TorchOptions
from modelexport.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExportError,
    FallbackWarning,
    GraphmlWarning,
    ModelExportError,
    describe_type,
    first_line,
)
from modelexport.garbage import pause_collector
from modelexport.graph.flat import flatten
from modelexport.graphml.format import MODES
from modelexport.graphml.write import export_graphml
from modelexport.modules.tags import assign_tags, make_policy
from modelexport.modules.tree import ModuleTree
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import Transaction, transaction, write_file
from modelexport.onnx_file.model_file import StrPath, parse_model
from modelexport.outputs import check_outputs
from modelexport.report import ExportReport, Steps, markdown_page, report_path
from modelexport.tagged.records import (
    ExportRecord,
    ModelRecord,
    SourceOptions,
    encode_sidecar,
    sidecar_path,
)
from modelexport.tagged.strip import check_no_graph_text, scrub_bytes
from modelexport.tagged.tables import tensor_infos

_EXPORTERS: dict[str, Callable[..., Baseline]] = {
    "dynamo": dynamo.export,
    "torchscript": torchscript.export,
}
_OPSETS = {"dynamo": (7, 25), "torchscript": (7, 20)}


def export_model(
    model: nn.Module | ExportedProgram,
    example_inputs: Any,
    output_path: StrPath,
    strategy: str = ExportStrategy.AUTO,
    optimize: bool = True,
    verbose: bool = False,
    *,
    exporter: str | None = None,
    fallback: bool = True,
    opset_version: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_shapes: Any = None,
    torch_nn_exceptions: Sequence[str] | str | None = None,
    include: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str | None = None,
    max_depth: int | None = None,
    clean: bool = False,
    scrub: bool = False,
    with_graphml: bool = False,
    graphml_output: StrPath | None = None,
    graphml_parameters: str = MODES[0],
    with_report: bool = False,
    temp_dir: StrPath | None = None,
    external_data: bool | None = None,
    jit_graph: StrPath | None = None,
    fx_graph: StrPath | None = None,
    source: str | None = None,
    inputs_from: str | None = None,
    source_options: SourceOptions | None = None,
    seed: int | None = None,
    on_step: Callable[[str], None] | None = None,
) -> ExportReport:
    """Export a model with torch's own exporter and map every node to the module that made it.

    The graph is the one that `torch.onnx.export` writes. All files are complete or not there, and the model leaves as
    it came. Raises a ModelExportError with a hint when it cannot.

    - `model`: a module, or a program of `torch.export`, which has its inputs in it: pass None for them.
    - `example_inputs`: a tensor, a tuple of positional inputs or a dict of keyword inputs; or both kinds, as
      `(a, {"b": b})` or `((a,), {"b": b})`.
    - `output_path`: a name that ends in `.onnx`; the sidecar and a data file get names after it.
    - `strategy`: `auto`, `fx`, `htp`, `usage_based` or a registered one; `exporter` overrides its exporter.
    - `fallback`: let `auto` go on with torchscript where dynamo fails, which a FallbackWarning says.
    - `optimize`, `opset_version`, `dynamic_shapes`, `input_names`, `output_names`: as torch's exporter takes them.
      Without names, inputs given by keyword and outputs of a mapping are called by their keys.
    - `external_data`: weights beside the file or inside it; None leaves it to the exporter and the size.
    - `torch_nn_exceptions`, `include`, `exclude`, `max_depth`: which modules have a tag of their own (tags.md).
    - `clean`: leave the map out of the file; only the sidecar has it.
    - `scrub`: take torch's own metadata out, which tells paths and source lines of the machine that exports.
    - `with_report`: also a page for people. `with_graphml`, or a `graphml_output`: also a GraphML, with its weights
      as `graphml_parameters` says; if that fails there is a GraphmlWarning, and the export stands.
    - `jit_graph`, `fx_graph`: also write the exporter's own graph to this file, if it has such a one.
    - `verbose`: let torch print. `on_step` is told the name of each step when it begins. `temp_dir` is for the files
      before they are complete; without it that is the output's folder.
    - `source`, `inputs_from`, `source_options`, `seed`: are recorded as they are, for `verify`.
    """
    target, graphml = check_outputs(
        output_path,
        with_graphml=with_graphml,
        graphml_output=graphml_output,
        graphml_parameters=graphml_parameters,
        with_report=with_report,
        graph_files=(jit_graph, fx_graph),
    )
    check_no_graph_text(scrub, jit_graph, fx_graph)
    module = _check_model(model)
    inputs = _check_inputs(module, example_inputs)
    policy = make_policy(torch_nn_exceptions, include, exclude, max_depth)
    options = TorchOptions(
        optimize=optimize,
        opset_version=opset_version,
        input_names=_check_names(input_names, "input_names"),
        output_names=_check_names(output_names, "output_names"),
        dynamic_shapes=dynamic_shapes,
        external_data=external_data,
        verbose=verbose,
        with_graph_text=jit_graph is not None or fx_graph is not None,
    )
    attempts = _attempts(strategy, exporter, fallback)
    if external_data is False and isinstance(module, nn.Module) and exceeds_one_file(module):
        raise ArgumentError(
            "the weights do not fit into one file: the limit is 2 GiB",
            hint="leave external_data out",
        )
    if isinstance(module, ExportedProgram):
        attempts = _for_programs(attempts, dynamic_shapes)
    _check_opset(opset_version, attempts[0][1])
    steps = Steps(on_step)
    with (
        EXPORT_LOCK,
        transaction(target.parent, None if temp_dir is None else Path(temp_dir)) as stage,
    ):
        with steps.step("read the module tree"):
            tree = (
                read_program_tree(module)
                if isinstance(module, ExportedProgram)
                else read_module_tree(module)
            )
            tags = assign_tags(tree, policy)
        chosen, used, reason, baseline = _export_baseline(
            module, tree, inputs, stage, target, options, attempts, steps
        )
        data = scrub_bytes(baseline.data) if scrub else baseline.data
        if scrub and reason is not None:
            reason = reason.partition(":")[
                0
            ]  # what torch says after the kind of its error may quote the model's code
        with steps.step("attribute nodes to modules"), pause_collector():
            proto = parse_model(data, target)
            facts = Facts(flatten(proto), tree, baseline.trace)
            attributions = attribute(chosen, facts)
        with steps.step("build the map"), pause_collector():
            model_record = ModelRecord(
                tree[""].qualified_class,
                source or tree[""].qualified_class,
                target.name,
                _opset(proto),
                proto.ir_version,
            )
            export_record = ExportRecord(
                strategy=chosen.name,
                exporter=used,
                requested=str(strategy),
                fallback_reason=reason,
                seed=seed,
                inputs_from=inputs_from,
                source_options=source_options,
                inputs=tensor_infos(proto.graph.input),
                outputs=tensor_infos(proto.graph.output),
                dropped_outputs=baseline.dropped_outputs,
                versions=_versions(),
                scrubbed=scrub or msgspec.UNSET,
            )
            hierarchy = build_map(facts, tags, attributions, model_record, export_record)
        with steps.step("write the files"), pause_collector():
            model_file = _write(stage, target, data, baseline, hierarchy, clean)
        report = ExportReport(
            requested=str(strategy),
            strategy=chosen.name,
            exporter=used,
            fallback_reason=reason,
            onnx_path=target,
            sidecar_path=sidecar_path(target),
            data_paths=tuple(target.parent / name for name in sorted(baseline.files)),
            hierarchy=hierarchy.sidecar,
            timings=steps.timings,
            notes=note_lines(baseline.tracer_notes, with_locations=not scrub),
            report_path=report_path(target) if with_report else None,
        )
        if report.report_path is not None:
            stage.place(
                stage.write("report", [markdown_page(report).encode()]), report.report_path.name
            )
        stage.place(model_file, target.name)
        stage.commit()
    graph_file = {"torchscript": jit_graph, "dynamo": fx_graph}[used]
    if graph_file is not None and baseline.graph_text is not None:
        write_file(Path(graph_file), baseline.graph_text.encode())
    if graphml is not None:
        with steps.step("write the GraphML"):
            report = _add_graphml(report, graphml, graphml_parameters)
    if report.fallback_message is not None:
        warnings.warn(report.fallback_message, FallbackWarning, stacklevel=2)
    return report


def _add_graphml(report: ExportReport, graphml: Path, parameters: str) -> ExportReport:
    try:
        files = export_graphml(report.onnx_path, graphml, parameters=parameters)
    except Exception as error:  # whatever it is, the model is exported
        told = (
            error.headline
            if isinstance(error, ModelExportError)
            else f"{type(error).__name__}: {first_line(error)}"
        )
        warnings.warn(f"the GraphML could not be written: {told}", GraphmlWarning, stacklevel=3)
        return msgspec.structs.replace(report, graphml_error=told)
    return msgspec.structs.replace(report, graphml_path=files.graphml, graphml_data_path=files.data)


def recommend_strategy(model: nn.Module | ExportedProgram) -> tuple[str, str]:
    """The strategy to use for a model, and the reason."""
    model = _check_model(model)
    if isinstance(model, torch.jit.ScriptModule):
        return HTP.name, "it is compiled by torch.jit, which only the torchscript exporter takes"
    if isinstance(model, ExportedProgram):
        return FX.name, "it is a program of torch.export, which only the dynamo exporter takes"
    return (
        FX.name,
        "the dynamo exporter records every node's module itself; auto falls back to htp where it fails",
    )


def _check_inputs(model: nn.Module | ExportedProgram, example_inputs: Any) -> ModelInputs:
    if not isinstance(model, ExportedProgram):
        return bind_inputs(model, parse_inputs(example_inputs))
    if example_inputs is not None:
        raise ArgumentError("a program has its own inputs", hint="pass None as example_inputs")
    return ModelInputs((), {})


def _for_programs(
    attempts: list[tuple[Strategy, str]], dynamic_shapes: Any
) -> list[tuple[Strategy, str]]:
    """Of the attempts those that take a program of torch.export."""
    if dynamic_shapes is not None:
        raise ArgumentError(
            "a program's shapes are fixed", hint="choose the dynamic ones in torch.export.export"
        )
    able = [attempt for attempt in attempts if attempt[1] == "dynamo"]
    if not able:
        raise ArgumentError(
            "only the dynamo exporter takes a program", hint="use strategy fx or auto"
        )
    return able


def _check_model(model: object) -> nn.Module | ExportedProgram:
    if not isinstance(model, nn.Module | ExportedProgram):
        raise ArgumentTypeError(
            f"the model is {describe_type(model)}, not a torch.nn.Module",
            hint="pass the model object itself; a class needs to be called, a path needs to be loaded first",
        )
    check_has_weights(model)
    return unwrap_model(model) if isinstance(model, nn.Module) else model


def _check_names(names: Sequence[str] | None, argument: str) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"{argument} must be a list of names", hint='for example ["input_ids"]'
        )
    return list(names)


def _check_opset(opset_version: object, exporter: str) -> None:
    if opset_version is None:
        return
    if isinstance(opset_version, bool) or not isinstance(opset_version, int):
        raise ArgumentTypeError(
            f"opset_version is {describe_type(opset_version)}", hint="pass a whole number"
        )
    low, high = _OPSETS[exporter]
    if not low <= opset_version <= high:
        raise ArgumentError(
            f"opset {opset_version} is out of range for the {exporter} exporter",
            hint=f"it writes opset {low} to {high}",
        )


def _attempts(
    strategy: str, exporter: str | None, fallback: bool = True
) -> list[tuple[Strategy, str]]:
    """The strategies to try in order, each with its exporter."""
    check_exporter(exporter)
    if strategy != ExportStrategy.AUTO:
        chosen = find_strategy(strategy)
        return [(chosen, exporter or chosen.exporter)]
    both = [(candidate, candidate.exporter) for candidate in (FX, HTP)]
    able = both if exporter is None else [attempt for attempt in both if attempt[1] == exporter]
    return able if fallback else able[:1]


def _export_baseline(
    model: nn.Module | ExportedProgram,
    tree: ModuleTree,
    inputs: ModelInputs,
    stage: Transaction,
    target: Path,
    options: TorchOptions,
    attempts: list[tuple[Strategy, str]],
    steps: Steps,
) -> tuple[Strategy, str, str | None, Baseline]:
    """Let torch write the baseline, with the next strategy where the first one's exporter fails."""
    failures: list[tuple[str, Exception]] = []
    for strategy, exporter in attempts:
        folder = stage.subfolder(exporter)
        try:
            with steps.step(f"export with torch ({exporter})"):
                baseline = _EXPORTERS[exporter](model, tree, inputs, folder / target.name, options)
        except (ModelExportError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            if not failures and isinstance(model, nn.Module):
                check_model_runs(
                    model, inputs
                )  # or is it the model itself that does not take these inputs?
            failures.append((exporter, error))
        else:
            reason = None if not failures else explain_failure(failures[0][1]).line
            return strategy, exporter, reason, baseline
    raise ExportError(
        "torch cannot export this model" + (" with either exporter" if len(failures) > 1 else ""),
        hint="verbose=True or -v shows what torch printed",
        details=[
            line for exporter, error in failures for line in explain_failure(error).lines(exporter)
        ],
    ) from failures[0][1]


def _write(
    stage: Transaction,
    target: Path,
    data: wire.Buffer,
    baseline: Baseline,
    hierarchy: HierarchyMap,
    clean: bool,
) -> Path:
    """Write everything; the model is put into position last, so that a reader never sees it without its parts."""
    for name, path in sorted(baseline.files.items()):
        stage.place(path, name)
    stage.place(
        stage.write("sidecar", [encode_sidecar(hierarchy.sidecar)]), sidecar_path(target).name
    )
    return stage.write("model", [data] if clean else tagged_chunks(data, hierarchy))


def _opset(proto: Any) -> int:
    return next(
        (entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0
    )


@functools.cache
def _versions() -> dict[str, str]:
    names = ("modelexport", "torch", "onnx", "onnxscript")
    return {name: importlib.metadata.version(name) for name in names}


class HierarchyExporter:
    """`export_model` with its options given once; strategies and tags that cannot work are refused here."""

    def __init__(self, strategy: str = ExportStrategy.AUTO, **options: Any) -> None:
        self.strategy = strategy
        self.options = options
        make_policy(
            *(
                options.get(name)
                for name in ("torch_nn_exceptions", "include", "exclude", "max_depth")
            )
        )
        _attempts(strategy, options.get("exporter"))

    def export(
        self,
        model: nn.Module | ExportedProgram,
        example_inputs: Any,
        output_path: StrPath,
        **options: Any,
    ) -> ExportReport:
        """Export one model; options given here win over those of the exporter."""
        return export_model(
            model,
            example_inputs,
            output_path,
            **{"strategy": self.strategy, **self.options, **options},
        )
