"""A program that uses every public name, for type checkers: tests/test_typing.py checks it.

It is never run. Each `assert_type` fails where a checker sees another type, or `Any`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import assert_type

import onnx
import torch

import modelexport as m

MODEL = torch.nn.Linear(4, 4)
INPUTS = torch.ones(1, 4)


def export() -> m.ExportReport:
    options: m.ModelKeywords = {"opset_version": 20, "torch_nn_exceptions": ["Linear"]}
    report = m.export_model(MODEL, INPUTS, "m.onnx", m.ExportStrategy.FX, **options)
    assert_type(report.onnx_path, Path)
    assert_type(report.strategy, str)
    assert_type(report.nodes, int)
    assert_type(report.coverage, float)
    assert_type(report.timings, dict[str, float])
    assert_type(report.data_paths, tuple[Path, ...])
    assert_type(report.dropped_outputs, tuple[str, ...])
    assert_type(report.hierarchy, m.Sidecar)
    again: m.ExporterKeywords = {"strategy": "htp", "clean": True}
    exporter = m.HierarchyExporter(strategy="fx", flops=True)
    assert_type(exporter.export(MODEL, (INPUTS,), Path("m.onnx"), **again), m.ExportReport)
    assert_type(m.UnifiedExporter(), m.HierarchyExporter)
    assert_type(m.recommend_strategy(MODEL), tuple[str, str])
    source: m.SourceKeywords = {"task": "fill-mask", "dynamic": True}
    assert_type(m.export_source("./bert", "m.onnx", on_step=print, **source), m.ExportReport)
    return report


def generate() -> m.Generation:
    report = m.export_generation(MODEL, {"input_ids": INPUTS}, "llama", tokenizer="./llama")
    assert_type(report.parts, Mapping[str, m.ExportReport])
    assert_type(report.generation_path, Path | None)
    result = m.generate("llama_generation.json", "Once", max_new_tokens=8, on_text=print)
    assert_type(result.tokens, tuple[int, ...])
    assert_type(result.text, str | None)
    return result


def show_parts(record: m.GenerationFile) -> m.InputRole:
    assert_type(record.tokens, m.TokenIds)
    part: m.GenerationPart = record.parts["decode"]
    first: m.GenerationInput = part.inputs["input_ids"]
    assert_type(first.empty, tuple[int, ...])
    return first.role


def batch(job: m.BatchJob) -> None:
    more = {"model": "./bert", "output": "m.onnx"}
    results = m.export_batch([job, more], workers=2, resume=True, on_result=show_result)
    assert_type(results, list[m.JobResult])


def show_result(result: m.JobResult) -> None:
    assert_type(result.succeeded, bool)
    assert_type(result.files, dict[str, str])
    assert_type(result.coverage, float | None)


def read() -> m.TaggedModel:
    tagged = m.load("m.onnx")
    assert_type(tagged.proto, onnx.ModelProto)
    assert_type(tagged.graph, m.Graph)
    assert_type(tagged.modules, dict[str, m.ModuleRecord])
    assert_type(tagged.embedded, m.EmbeddedMap | None)
    assert_type(tagged.sidecar, m.Sidecar | None)
    assert_type(tagged.in_effect, m.MapInEffect)
    assert_type(tagged.coverage, float)
    for node, tag in tagged.items():
        assert_type(node, m.Node)
        if tag is not None:
            assert_type(tag, m.NodeTag)
            assert_type(tag.hierarchy_tags, tuple[str, ...])
    return tagged


def read_sidecar(sidecar: m.Sidecar) -> None:
    model: m.ModelRecord = sidecar.model
    made: m.ExportRecord = sidecar.export
    statistics: m.Statistics = sidecar.statistics
    nodes: dict[str, m.NodeRecord] = sidecar.nodes
    tensors: dict[str, m.TensorRecord] = sidecar.tensors
    inputs: tuple[m.TensorInfo, ...] = made.inputs
    examples: dict[str, m.ExampleInput] = made.example_inputs
    options: m.SourceOptions | None = made.source_options
    piece: m.ExtractionRecord | None = made.piece
    assert_type(model.opset, int)
    assert_type(statistics.methods, dict[str, int])
    assert_type(nodes["x"].tags, tuple[str, ...])
    assert_type(tensors["x"].producer, str | None)
    assert_type(inputs[0].shape, tuple[int | str | None, ...])
    assert_type(examples["x"].low, float)
    if options is not None and piece is not None:
        assert_type(options.input_shapes, dict[str, tuple[int, ...]])
        assert_type(piece.pulled_in, tuple[str, ...])
    if isinstance(made.retag, m.RetagRecord):
        assert_type(made.retag.original, str)


def inspect() -> None:
    analysis: m.Analysis = m.analyze("m.onnx", filter_tag="encoder")
    file: m.FileFacts = analysis.file
    totals: m.Totals = analysis.totals
    modules: tuple[m.ModuleFacts, ...] = analysis.modules
    nodes: tuple[m.NodeFacts, ...] = analysis.nodes
    data: tuple[m.DataFile, ...] = file.data_files
    assert_type(totals.coverage, float)
    assert_type(modules[0].operators, dict[str, int])
    assert_type(nodes[0].covers, tuple[str, ...])
    assert_type(data[0].present, bool)
    validation: m.Validation = m.validate("m.onnx", check_consistency=True, repair=True)
    findings: tuple[m.Finding, ...] = validation.findings
    repaired: m.Repair | None = validation.repair
    assert_type(validation.valid, bool)
    assert_type(findings[0].code, str)
    assert_type(repaired, m.Repair | None)
    comparison: m.Comparison = m.compare("a.onnx", "b.onnx")
    first: m.FileSummary = comparison.a
    changes: tuple[m.ModuleChange, ...] = comparison.modules
    changed: tuple[m.NodeChange, ...] = changes[0].changed
    tags: m.TagChanges = comparison.tags
    weights: m.WeightChanges = comparison.weights
    assert_type(comparison.verdict, str)
    assert_type(first.opset, dict[str, int])
    assert_type(changed[0].what, tuple[str, ...])
    assert_type(tags.distribution, dict[str, tuple[int, int]])
    assert_type(weights.renamed, tuple[tuple[str, str], ...])
    assert_type(m.select("m.onnx", ["encoder.*"], what="values"), list[str])


def cut() -> None:
    extraction: m.Extraction = m.extract("m.onnx", "encoder", "e.onnx")
    assert_type(extraction.model, onnx.ModelProto)
    assert_type(extraction.record, m.ExtractionRecord)
    assert_type(m.partition("m.onnx"), Iterator[m.Extraction])
    listed: list[m.ExtractableModule] = m.list_modules("m.onnx")
    assert_type(listed[0].inputs, tuple[m.TensorInfo, ...])
    part: m.ModuleSubgraph = m.extract_module_subgraph("m.onnx", None, "encoder")
    assert_type(part.operations, tuple[str, ...])
    assert_type(m.strip("m.onnx", "bare.onnx"), Path)
    drawn: m.GraphmlFiles = m.export_graphml("m.onnx")
    imported: m.Imported = m.import_onnx(drawn.graphml, "again.onnx")
    assert_type(imported.data, tuple[Path, ...])
    functions: m.FunctionsReport = m.to_functions("m.onnx", "f.onnx", depth=2)
    assert_type(functions.functions, dict[str, str])
    assert_type(m.from_functions("f.onnx", "m.onnx"), Path)
    page: m.View = m.view("m.onnx", overlays=["profile.json"])
    assert_type(page.path, Path)


def run() -> None:
    verification: m.Verification = m.verify(MODEL, INPUTS, "m.onnx")
    modules: tuple[m.ModuleParity, ...] = verification.modules
    tensors: tuple[m.TensorParity, ...] = modules[0].tensors
    assert_type(verification.agrees, bool)
    assert_type(modules[0].outcome, m.Outcome)
    assert_type(modules[0].blame, m.Blame | None)
    assert_type(tensors[0].max_abs, float | None)
    retagged: m.RetagReport = m.retag("m.onnx", "o.onnx", "r.onnx")
    assert_type(retagged.methods, dict[str, int])
    profile: m.Profile = m.profile("m.onnx", runs=5)
    times: tuple[m.ModuleTime, ...] = profile.modules
    assert_type(times[0].inclusive_ms, float)
    difference: m.ProfileComparison = m.compare_profiles(profile, profile)
    slower: tuple[m.ModuleDifference, ...] = difference.modules
    assert_type(slower[0].ratio, float | None)
    quantized: m.QuantizeReport = m.quantize("m.onnx", "q.onnx", keep="head", max_error=0.01)
    kept: tuple[m.KeptModule, ...] = quantized.kept
    error: m.OutputError = quantized.error
    assert_type(kept[0].title, str)
    assert_type(error.sqnr_db, float | None)
    measured: m.Sensitivity = m.measure_sensitivity("m.onnx", depth=1)
    worst: m.ModuleSensitivity = measured.whole
    assert_type(worst.has_effect, bool)
    layers: m.LayerAnnotations = m.annotate_layers("m.onnx", "l.onnx", "encoder")
    assert_type(layers.layers, dict[str, int])


def find(facts: m.Facts, settled: Mapping[int, m.Site]) -> Mapping[int, m.Site]:
    tree: m.ModuleTree = facts.tree
    module: m.ModuleInfo = tree["encoder"]
    trace: m.Trace = facts.trace
    log: m.CallLog = trace.log
    calls: tuple[m.Call, ...] = log.calls
    sites: Mapping[str, m.Site] = trace.scopes
    subgraphs: dict[int, list[m.FlatSubgraph]] = facts.graph.subgraphs
    assert_type(tree.common_ancestor("a", "b"), str)
    assert_type(module.direct_parameters, tuple[str, ...])
    assert_type(calls[0].returned, tuple[str, ...])
    assert_type(sites["x"].path, str)
    assert_type(subgraphs[0][0].label, str)
    return {**settled}


def plug_in() -> None:
    evidence = m.Evidence(m.Method.SCOPE, find)
    chain: tuple[m.Evidence, ...] = (*m.FULL_CHAIN, evidence)
    chain += (m.SCOPE, m.PARAMETER, m.PARAMETER_IN_USE, m.AGREEMENT, m.DATAFLOW, m.ROOT)
    m.register_strategy(m.Strategy("mine", "dynamo", chain, "An example."))


def records() -> tuple[m.ExportOptions, m.CallOptions, m.Attribution]:
    return m.ExportOptions(clean=True), m.CallOptions(seed=0), m.Attribution("a", None, "scope")


def catch() -> str:
    try:
        export()
    except (m.UnknownOptionError, m.ArgumentError, m.ArgumentTypeError, m.FileError) as error:
        return error.headline
    except (m.MissingPackageError, m.SourceError, m.NotDescendedError, m.FormatError) as error:
        assert_type(error.details, tuple[str, ...])
        return error.hint or ""
    except (m.ModelRunError, m.ExportError, m.ModelExportError) as error:
        assert_type(error.exit_code, int)
        return error.message
    kinds = (m.FallbackWarning, m.GraphmlWarning, m.ViewWarning, m.ExtractionWarning)
    return kinds[0].__name__
