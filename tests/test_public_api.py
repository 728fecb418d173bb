"""The public names are those of the contract, and each can be had."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from click.testing import CliRunner

import modelexport
from damage import everything
from modelexport import errors
from modelexport.cli.main import main
from modelexport.options import MODEL_KEYWORDS, SOURCE_KEYWORDS

pytestmark = pytest.mark.sanity

PUBLIC = {
    "AGREEMENT", "Analysis", "ArgumentError", "ArgumentTypeError", "Attribution", "BatchJob",
    "Blame", "Call", "CallLog", "CallOptions", "Comparison", "DATAFLOW", "DataFile", "EmbeddedMap",
    "Evidence", "ExampleInput", "ExportError", "ExportOptions", "ExportRecord", "ExportReport",
    "ExportStrategy", "ExporterKeywords", "ExtractableModule", "Extraction", "ExtractionRecord",
    "ExtractionWarning", "FULL_CHAIN", "Facts", "FallbackWarning", "FileError", "FileFacts",
    "FileSummary", "Finding", "FlatSubgraph", "FormatError", "FunctionsReport", "Generation",
    "GenerationFile", "GenerationInput", "GenerationPart", "Graph", "GraphmlFiles",
    "GraphmlWarning", "HierarchyExporter", "Imported", "InputRole", "JobResult", "KeptModule",
    "LayerAnnotations", "MapInEffect", "Method", "MissingPackageError", "ModelExportError",
    "ModelKeywords", "ModelRecord", "ModelRunError", "ModuleChange", "ModuleDifference",
    "ModuleFacts", "ModuleInfo", "ModuleParity", "ModuleRecord", "ModuleSensitivity",
    "ModuleSubgraph", "ModuleTime", "ModuleTree", "Node", "NodeChange", "NodeFacts", "NodeRecord",
    "NodeTag", "NotDescendedError", "Outcome", "OutputError", "PARAMETER", "PARAMETER_IN_USE",
    "Profile", "ProfileComparison", "QuantizeReport", "ROOT", "Repair", "RetagRecord",
    "RetagReport", "SCOPE", "Sensitivity", "Sidecar", "Site", "SourceError", "SourceKeywords",
    "SourceOptions", "Statistics", "Strategy", "TagChanges", "TaggedModel", "TensorInfo",
    "TensorParity", "TensorRecord", "TokenIds", "Totals", "Trace", "UnifiedExporter",
    "UnknownOptionError", "Validation", "Verification", "View", "ViewWarning", "WeightChanges",
    "analyze", "annotate_layers", "compare", "compare_profiles", "export_batch",
    "export_generation", "export_graphml", "export_model", "export_source", "extract",
    "extract_module_subgraph", "from_functions", "generate", "import_onnx", "list_modules", "load",
    "measure_sensitivity", "partition", "profile", "quantize", "recommend_strategy",
    "register_strategy", "retag", "select", "strip", "to_functions", "validate", "verify",
    "view",
}  # fmt: skip


def test_public_names() -> None:
    assert set(modelexport.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(modelexport, name) is not None
    assert modelexport.UnifiedExporter is modelexport.HierarchyExporter
    with pytest.raises(AttributeError, match="nothing_like_this"):
        modelexport.nothing_like_this  # noqa: B018


@pytest.mark.regression
def test_dir_lists_the_public_names() -> None:
    """In a new process, where nothing was used yet."""
    code = "import modelexport; print(*dir(modelexport))"
    listed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(listed) >= PUBLIC | {"__version__"}


def test_strategies_are_values_and_strings() -> None:
    assert [strategy.value for strategy in modelexport.ExportStrategy] == [
        "auto",
        "usage_based",
        "htp",
        "fx",
    ]
    assert modelexport.ExportStrategy.HTP == "htp"


def test_type_checkers_see_the_same_names() -> None:
    """The names imported for type checkers, those imported on first use, and `__all__` agree."""
    tree = ast.parse(Path(modelexport.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == modelexport._SOURCES
    errors = {name for name in PUBLIC if name.endswith(("Error", "Warning"))}
    assert set(imported) | errors == PUBLIC


def test_keyword_types_have_the_aliases() -> None:
    for keywords, known in (
        (modelexport.ExporterKeywords, MODEL_KEYWORDS),
        (modelexport.SourceKeywords, SOURCE_KEYWORDS),
    ):
        names = {name for one in known for name in (one.name, *one.spelling.aliases)}
        assert names <= set(get_type_hints(keywords))


def _mentioned(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for part in get_args(hint):
        yield from _mentioned(part)


def _received(thing: Any) -> Iterator[type]:
    """The classes of ours in what a function returns, or in the fields and methods of a class."""
    hints = list(get_type_hints(thing).values()) if isinstance(thing, type) else []
    hints += [get_type_hints(function).get("return") for function in _functions(thing)]
    for hint in hints:
        yield from (one for one in _mentioned(hint) if one.__module__.startswith("modelexport"))


def _functions(thing: Any) -> Iterator[Any]:
    """A function itself, or the public methods and properties of a class."""
    if not isinstance(thing, type):
        yield thing
        return
    for name, member in vars(thing).items():
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        if inspect.isfunction(function) and (name == "__getitem__" or not name.startswith("_")):
            yield function


def test_everything_a_caller_can_receive_is_public() -> None:
    things = [getattr(modelexport, name) for name in sorted(PUBLIC)]
    callers = [thing for thing in things if isinstance(thing, type) or callable(thing)]
    missing = {
        kind.__name__ for thing in callers for kind in _received(thing) if kind not in things
    }
    assert missing == set()


def test_every_error_and_warning_is_public() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined <= PUBLIC
    assert all(f"{name} " in (errors.__doc__ or "") for name in defined), "the tree is complete"


KEYWORDS = {
    "exporter",
    "fallback",
    "opset_version",
    "input_names",
    "output_names",
    "dynamic_shapes",
    "torch_nn_exceptions",
    "torch_nn",
    "include",
    "exclude",
    "max_depth",
    "clean",
    "scrub",
    "with_graphml",
    "graphml_output",
    "graphml_parameters",
    "with_report",
    "with_view",
    "flops",
    "temp_dir",
    "external_data",
    "jit_graph",
    "fx_graph",
    "source",
    "inputs_from",
    "source_options",
    "seed",
    "on_step",
    "part",
}


def test_signature_of_export_model() -> None:
    signature = inspect.signature(modelexport.export_model)
    first = ["model", "example_inputs", "output_path", "strategy", "optimize", "verbose"]
    assert list(signature.parameters) == [*first, "options"]
    assert set(get_type_hints(modelexport.ModelKeywords)) == KEYWORDS


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("torch_nn_exception", "did you mean torch_nn_exceptions?"),
        ("opset", "did you mean opset_version?"),
        ("task", "use export_source"),
        ("qqq", "known: clean, "),
    ],
)
def test_an_unknown_option_is_refused_with_a_suggestion(name: str, hint: str) -> None:
    options: Any = {name: None}
    calls: list[Callable[[], object]] = [
        lambda: modelexport.export_model(torch.nn.Linear(1, 1), torch.ones(1), "m.onnx", **options),
        lambda: modelexport.HierarchyExporter(**options),
    ]
    for call in calls:
        with pytest.raises(modelexport.UnknownOptionError, match=f"no option {name!r}") as caught:
            call()
        assert hint in str(caught.value)
        assert isinstance(caught.value, TypeError | modelexport.ArgumentError)


def test_export_source_refuses_values_of_the_wrong_type() -> None:
    options: Any = {"input_shapes": {"x": "1,128"}}
    with pytest.raises(modelexport.ArgumentTypeError, match="input_shapes"):
        modelexport.export_source("some/model", "m.onnx", **options)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"spec": 3}, "spec must be the name of a model, got an int .use export_model"),
        ({"output_path": 3}, "the output path is an int"),
        ({"clean": "no"}, "clean must be True or False, got 'no'"),
        ({"max_depth": "x"}, "max_depth must be a whole number, got 'x'"),
        ({"verbose": 3}, "verbose must be True or False, got 3"),
        ({"on_step": 3}, "on_step must be a function that takes a string, got 3"),
    ],
)
def test_export_source_names_the_argument_of_the_wrong_type(
    arguments: dict[str, Any], match: str
) -> None:
    given = {"spec": "some/model", "output_path": "m.onnx", **arguments}
    with pytest.raises(modelexport.ArgumentTypeError, match=match):
        modelexport.export_source(**given)


def test_export_source_checks_the_opset_before_it_loads_a_model() -> None:
    with pytest.raises(modelexport.ArgumentError, match="opset 3 is out of range"):
        modelexport.export_source("no/such-model", "m.onnx", opset_version=3)


@pytest.mark.regression
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "htp", "jit_graph": "nets.py"}, "the graph file nets.py would overwrite"),
        ({"strategy": "fx", "fx_graph": "./in.json", "input_specs": "in.json"}, "would overwrite"),
        ({"input_specs": "in\0.json"}, "no file can have the name"),
    ],
)
def test_no_graph_overwrites_what_an_export_reads(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("nets.py", "in.json"):
        Path(name).write_text("unchanged")
    with pytest.raises(modelexport.ArgumentError, match=message):
        modelexport.export_source("nets.py:make", "m.onnx", **options)
    assert everything(tmp_path) == {"nets.py": b"unchanged", "in.json": b"unchanged"}


def test_export_source_refuses_unknown_options() -> None:
    options: Any = {"input_tex": "hello"}
    with pytest.raises(modelexport.UnknownOptionError, match="did you mean input_text"):
        modelexport.export_source("some/model", "m.onnx", **options)


def test_an_option_has_one_value() -> None:
    options: Any = {"torch_nn": "all", "torch_nn_exceptions": "none"}
    with pytest.raises(modelexport.ArgumentError, match="torch_nn_exceptions is given twice"):
        modelexport.HierarchyExporter(**options)


def test_options_of_an_exporter_can_be_overridden_by_another_name(tmp_path: Path) -> None:
    exporter = modelexport.HierarchyExporter(strategy="htp", torch_nn_exceptions="none")
    options: Any = {"torch_nn": "all"}
    report = exporter.export(torch.nn.Linear(1, 1), torch.ones(1), tmp_path / "m.onnx", **options)
    assert report.strategy == "htp"


FACTORY = """
import torch

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(1, 4)
"""


def test_export_source_does_what_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    steps: list[str] = []
    report = modelexport.export_source(
        "made.py:make_model",
        tmp_path / "a.onnx",
        strategy="htp",
        torch_nn_exceptions=["Linear", "Conv9d"],
        input_shapes=(2, 4),
        on_step=steps.append,
    )
    command = ["export", "made.py:make_model", "b.onnx", "--strategy", "htp"]
    command += ["--torch-nn", "Linear,Conv9d", "--input-shape", "2,4"]
    assert CliRunner().invoke(main, command).exit_code == 0
    first, second = modelexport.load("a.onnx"), modelexport.load("b.onnx")
    assert first.tags == second.tags
    assert first.sidecar is not None
    assert second.sidecar is not None
    assert first.sidecar.export == second.sidecar.export
    recorded = first.sidecar.export.source_options
    assert recorded == modelexport.SourceOptions(input_shapes={"": (2, 4)})
    assert report.notes == ("torch_nn_exceptions names Conv9d, but no module matches it",)
    assert steps[0] == "load torch and the model"
    listed = modelexport.list_modules("a.onnx")
    assert [module.module for module in listed] == ["", "0", "1"]


READERS = (
    "load", "analyze", "validate", "strip", "extract", "partition", "list_modules", "select",
    "quantize", "measure_sensitivity", "to_functions", "from_functions",
)  # fmt: skip


def test_one_name_for_one_thing() -> None:
    for name in (*READERS, "extract_module_subgraph", "export_graphml", "import_onnx"):
        parameters = list(inspect.signature(getattr(modelexport, name)).parameters)
        assert parameters[0] == "path", name
        assert not {"output", "target", "out"} & set(parameters), name
    assert list(inspect.signature(modelexport.verify).parameters)[2] == "path"


def test_earlier_keywords_still_work(tmp_path: Path) -> None:
    model, inputs = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.ones(1, 4)
    path = tmp_path / "m.onnx"
    modelexport.export_model(model, inputs, path, strategy="htp")
    m: Any = modelexport
    assert m.analyze(onnx=path).totals.nodes == m.analyze(path).totals.nodes
    assert m.validate(onnx=path).valid
    assert m.strip(source=path, target=tmp_path / "base.onnx") == tmp_path / "base.onnx"
    assert m.extract(onnx_model=path, module="0", output=tmp_path / "0.onnx").record.module == "0"
    assert list(m.partition(onnx_model=path))
    part = m.extract_module_subgraph(onnx_model=path, hierarchy_metadata=None, target_module="0")
    assert part == m.extract_module_subgraph(path, None, module="0")
    files = m.export_graphml(onnx=path)
    m.import_onnx(graphml=files.graphml, output_path=tmp_path / "again.onnx")
    assert m.verify(model, inputs, onnx_path=path).agrees
    with pytest.raises(TypeError, match="multiple values"):
        m.analyze(path, onnx=path)
