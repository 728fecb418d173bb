"""One export as a record: which model, where to, and every option; and doing it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from modelexport.attribution.strategies import ExportStrategy, check_exporter, find_strategy
from modelexport.errors import ArgumentError, FallbackWarning, GraphmlWarning
from modelexport.graphml.format import MODES, check_mode
from modelexport.modules.tags import make_policy, unmatched_names
from modelexport.outputs import check_outputs
from modelexport.tagged.records import SourceOptions
from modelexport.tagged.strip import check_no_graph_text

if TYPE_CHECKING:
    from modelexport.report import ExportReport

_SEED = 0


class Job(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What `modelexport export` can be told; a field is called as its option is.

    `input_shape` is the shape of the main input, or shapes by name; lists of names may be a comma list.
    """

    model: str
    output: str
    strategy: str = "auto"
    exporter: str | None = None
    fallback: bool = True
    input_text: str | None = None
    input_shape: tuple[int, ...] | dict[str, tuple[int, ...]] = {}
    input_specs: str | None = None
    dynamic: bool = False
    dynamic_axes: dict[str, dict[int, str]] = {}
    opset_version: int | None = None
    task: str | None = None
    model_class: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    random_weights: bool = False
    torch_nn: str | tuple[str, ...] | None = None
    include: str | tuple[str, ...] | None = None
    exclude: str | tuple[str, ...] | None = None
    max_depth: int | None = None
    optimize: bool = True
    external_data: bool | None = None
    clean: bool = False
    scrub: bool = False
    with_graphml: bool = False
    graphml_output: str | None = None
    graphml_parameters: str = MODES[0]
    with_report: bool = False
    jit_graph: str | None = None
    fx_graph: str | None = None
    temp_dir: str | None = None

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name; the main input's is under no name."""
        return self.input_shape if isinstance(self.input_shape, dict) else {"": self.input_shape}


class Done(NamedTuple):
    """What came of an export, and what its user should know beside it."""

    report: ExportReport
    notes: tuple[str, ...]


def check_options(job: Job) -> None:
    """Raise for options that cannot work, wherever the files are."""
    if job.strategy != ExportStrategy.AUTO:
        find_strategy(job.strategy)
    check_exporter(job.exporter)
    if job.dynamic and job.dynamic_axes:
        raise ArgumentError(
            "--dynamic chooses the axes that --dynamic-axes sets", hint="give one of them"
        )
    if any(size < 1 for shape in job.input_shapes.values() for size in shape):
        raise ArgumentError(
            "a shape has a size below 1", hint="write it as 1,128 or input_ids=1,128"
        )
    check_mode(job.graphml_parameters)
    check_no_graph_text(job.scrub, job.jit_graph, job.fx_graph)


def check(job: Job) -> None:
    """Raise for what can be seen to be wrong before torch is loaded."""
    check_options(job)
    check_outputs(
        job.output,
        with_graphml=job.with_graphml,
        graphml_output=job.graphml_output,
        graphml_parameters=job.graphml_parameters,
        with_report=job.with_report,
        graph_files=(job.jit_graph, job.fx_graph),
    )


def source_files(model: str) -> list[Path]:
    """The files that a MODEL names: those of a folder, a file, or the one that has a factory."""
    path = Path(model)
    if ".py:" in model and not path.exists():
        path = Path(model.rpartition(":")[0])
    try:
        return list(path.iterdir()) if path.is_dir() else [path]
    except OSError:
        return []


def perform(job: Job, on_step: Callable[[str], None], verbose: bool = False) -> Done:
    """Load the model, make its inputs, export it. Loads torch, and whatever the model needs."""
    check(job)
    with warnings.catch_warnings():
        for category in (FallbackWarning, GraphmlWarning):  # the report says it
            warnings.simplefilter("ignore", category)
        on_step("load torch and the model")
        from modelexport.pipeline import export_model
        from modelexport.source.dynamic_axes import (
            as_input_error,
            export_dynamic,
            open_source,
            prepare_inputs,
        )
        from modelexport.source.example_inputs import InputRequest

        specs = None if job.input_specs is None else Path(job.input_specs)
        chosen = specs is not None or job.input_text is not None or bool(job.input_shapes)
        options = SourceOptions(
            job.task,
            job.model_class,
            job.revision,
            job.random_weights,
            job.input_text,
            job.input_shapes,
            None if specs is None else specs.name,
        )
        source = open_source(job.model, options, job.trust_remote_code, _SEED)
        with as_input_error(chosen or source.inputs is not None):
            on_step("make example inputs")
            wanted = InputRequest(specs, job.input_text, job.input_shapes)
            prepared = prepare_inputs(source, wanted, job.dynamic, job.dynamic_axes, _SEED)
            export = partial(
                export_model,
                source.model,
                prepared.inputs,
                job.output,
                job.strategy,
                job.optimize,
                verbose,
                exporter=job.exporter,
                fallback=job.fallback,
                opset_version=job.opset_version,
                torch_nn_exceptions=job.torch_nn,
                include=job.include,
                exclude=job.exclude,
                max_depth=job.max_depth,
                clean=job.clean,
                scrub=job.scrub,
                with_graphml=job.with_graphml,
                graphml_output=job.graphml_output,
                graphml_parameters=job.graphml_parameters,
                with_report=job.with_report,
                temp_dir=job.temp_dir,
                external_data=job.external_data,
                jit_graph=job.jit_graph,
                fx_graph=job.fx_graph,
                source=source.name,
                inputs_from=prepared.origin,
                source_options=options,
                seed=_SEED,
                on_step=on_step,
            )
            lost: list[str] = []
            if prepared.axes is None:
                report = export()
            else:
                report, lost = export_dynamic(
                    export, source.model, prepared, may_drop=job.dynamic, on_step=on_step
                )
    return Done(report, (*source.notes, *lost, *_unmet(job, report)))


def _unmet(job: Job, report: ExportReport) -> list[str]:
    """What was asked for and is not there."""
    told = []
    if job.opset_version not in (None, report.hierarchy.model.opset):
        told.append(f"torch could not convert this model to opset {job.opset_version}")
    for asked, needed in ((job.jit_graph, "torchscript"), (job.fx_graph, "dynamo")):
        if asked is not None and report.exporter != needed:
            told.append(f"{asked} was not written: only the {needed} exporter has such a graph")
    classes = {path: module.class_ for path, module in report.hierarchy.modules.items()}
    idle = unmatched_names(make_policy(job.torch_nn, job.include, job.exclude), classes)
    told += [
        f"{option} names {name}, but no module is called so"
        for option, names in idle.items()
        for name in names
    ]
    return told
