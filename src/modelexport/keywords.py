"""Keyword types of the functions that export, written by docs/make_keywords.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from modelexport.options import SourceOptions, StrPath


class ModelKeywords(TypedDict, total=False):
    """Options of `export_model`."""

    exporter: str | None
    fallback: bool
    opset_version: int | None
    torch_nn_exceptions: str | Sequence[str] | None
    torch_nn: str | Sequence[str] | None
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    max_depth: int | None
    external_data: bool | None
    clean: bool
    scrub: bool | Literal["keep-namespace"]
    with_graphml: bool
    graphml_output: StrPath | None
    graphml_parameters: str
    with_view: bool
    with_report: bool
    flops: bool
    jit_graph: StrPath | None
    fx_graph: StrPath | None
    temp_dir: StrPath | None
    input_names: Sequence[str] | None
    output_names: Sequence[str] | None
    dynamic_shapes: Any
    on_step: Callable[[str], None] | None
    source: str | None
    inputs_from: str | None
    source_options: SourceOptions | None
    seed: int | None
    part: str | None


class ExporterKeywords(ModelKeywords, total=False):
    """Options of `HierarchyExporter.export`."""

    strategy: str
    optimize: bool
    verbose: bool


class SourceKeywords(TypedDict, total=False):
    """Options of `export_source`."""

    strategy: str
    exporter: str | None
    fallback: bool
    opset_version: int | None
    torch_nn_exceptions: str | Sequence[str] | None
    torch_nn: str | Sequence[str] | None
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    max_depth: int | None
    optimize: bool
    external_data: bool | None
    clean: bool
    scrub: bool | Literal["keep-namespace"]
    with_graphml: bool
    graphml_output: StrPath | None
    graphml_parameters: str
    with_view: bool
    with_report: bool
    flops: bool
    jit_graph: StrPath | None
    fx_graph: StrPath | None
    temp_dir: StrPath | None
    task: str | None
    model_class: str | None
    revision: str | None
    random_weights: bool
    input_text: str | None
    input_shapes: Mapping[str, Sequence[int]] | Sequence[int]
    input_shape: Mapping[str, Sequence[int]] | Sequence[int]
    input_specs: StrPath | None
    dynamic: bool
    dynamic_axes: Mapping[str, Mapping[int, str]]
    generation: bool
    max_cache_length: int | None
    trust_remote_code: bool
