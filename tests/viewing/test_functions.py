"""to_functions() and from_functions(): the same model, by module, and the same bytes again."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from benchmarks.generated import write_graph
from onnx import TensorProto, helper

import modelexport
from damage import net
from exports import CASES, export
from modelexport.errors import FileError
from modelexport.tagged.model import TaggedModel
from modelexport.tagged.records import decode_tag
from modelexport.verification.feeds import make_feeds
from retag.tools import apply
from viewing.handmade import OPSET, node, write
from zoo import distinct


def check(path: Path, full: bool = True) -> str | None:
    try:
        onnx.checker.check_model(str(path), full_check=full)
    except Exception as error:
        return str(error)
    return None


def outputs_of(path: Path, feeds: dict[str, np.ndarray], optimize: bool = True) -> list[bytes]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    results = session.run(None, {name: feeds[name] for name in feeds if name in names})
    return [np.asarray(value).tobytes() for value in results]


def convert(
    path: Path, folder: Path, optimize: bool = True, **options: object
) -> modelexport.FunctionsReport:
    """Convert a file, and check that the result is valid, equal in value, and can be undone."""
    out, back = folder / "functions.onnx", folder / "back.onnx"
    report = modelexport.to_functions(path, out, **options)  # type: ignore[arg-type]
    modelexport.from_functions(out, back)
    assert back.read_bytes() == path.read_bytes()
    domains = {one.domain for one in onnx.load(path, load_external_data=False).opset_import}
    # The full check infers types through functions, which it can only with operators of ONNX.
    full = all("microsoft" not in domain for domain in domains)
    if check(path, full) is None:
        assert check(out, full) is None
    feeds = {"x": np.array([0.5, -2.0], np.float32)}
    if modelexport.load(path).records is not None:
        feeds = dict(make_feeds(modelexport.load(path), None).values)
    assert outputs_of(path, feeds, optimize) == outputs_of(out, feeds, optimize)
    return report


def bodies(path: Path) -> dict[str, onnx.FunctionProto]:
    return {function.name: function for function in onnx.load(path).functions}


def main_modules(model: TaggedModel) -> list[str]:
    """Return the module of each node of the main graph that has one."""
    return [
        tag.hierarchy_module
        for item, tag in zip(model.graph.nodes, model.effective_tags, strict=True)
        if tag is not None and item.enclosing < 0 and not item.function
    ]


def is_below(path: str, ancestor: str) -> bool:
    return path.startswith(f"{ancestor}.") if ancestor else bool(path)


def check_nesting(source: Path, report: modelexport.FunctionsReport) -> None:
    """Functions are nested as modules are, and no module that should have one is without."""
    model, module_of = modelexport.load(source), report.functions
    for function in onnx.load(report.onnx_path).functions:
        outer = module_of.get(function.name)
        if outer is None:
            continue
        for inner in function.node:
            tag = decode_tag(inner.doc_string)
            assert tag is not None
            assert is_below(tag.hierarchy_module, outer) or tag.hierarchy_module == outer
            if inner.op_type in module_of:
                assert is_below(module_of[inner.op_type], outer)
    owners = main_modules(model)
    expected = {
        path
        for path, record in model.modules.items()
        if path and record.shown and record.calls == 1
        if sum(owner == path or is_below(owner, path) for owner in owners) > 1
    }
    assert expected <= set(module_of.values())
    assert all(model.modules[path].shown for path in module_of.values())


@pytest.mark.must
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_round_trip(name: str, strategy: str, tmp_path: Path) -> None:
    path, _, _ = export(name, strategy, tmp_path)
    report = convert(path, tmp_path)
    check_nesting(path, report)
    assert all(re.fullmatch(r"[A-Za-z_]\w*", each, re.ASCII) for each in report.functions)
    model = modelexport.load(report.onnx_path)
    assert model.coverage == modelexport.load(path).coverage == 1
    assert modelexport.validate(report.onnx_path).checks["tags"] == "passed"
    assert modelexport.analyze(report.onnx_path).totals.nodes == len(model.tags)


@pytest.mark.parametrize("options", [{"all_modules": True}, {"depth": 1}, {"depth": 2}])
@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_depth_and_hidden_modules(options: dict[str, int], strategy: str, tmp_path: Path) -> None:
    path, _, _ = export("bert", strategy, tmp_path)
    report = convert(path, tmp_path, **options)
    modules = set(report.functions.values())
    assert ("encoder.layer.0.attention.self.query" in modules) == ("all_modules" in options)
    assert ("encoder.layer.0.attention" in modules) == ("all_modules" in options)
    assert ("encoder.layer.0" in modules) == (options != {"depth": 1})
    assert report.levels == options.get("depth", 5)


def test_names_are_short_and_unique(tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    report = convert(path, tmp_path)
    assert report.functions["BertSelfAttention_1"] == "encoder.layer.1.attention.self"
    calls = {call.op_type: call for call in onnx.load(report.onnx_path).graph.node}
    assert calls["BertEncoder"].name == "encoder"
    function = bodies(report.onnx_path)["BertLayer_0"]
    assert "module encoder.layer.0\ntag /BertModel/BertEncoder/BertLayer.0" in function.doc_string
    known = {value.name for value in function.value_info}
    assert {*function.input, *function.output} <= known


def test_each_call_is_a_function(tmp_path: Path) -> None:
    path, _, _ = export("block_three_times", "htp", tmp_path)
    report = convert(path, tmp_path)
    assert list(report.functions) == ["Block_call0", "Block_call1", "Block_call2"]
    tags = [tag for item, tag in modelexport.load(report.onnx_path).items() if item.calls_function]
    assert [tag and tag.hierarchy_call for tag in tags] == [0, 1, 2]


def test_a_module_that_others_interrupt_is_split(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.onnx",
        [
            node("a", "Relu", ["x"], ["a1"]),
            node("a", "Neg", ["a1"], ["a2"]),
            node("b", "Abs", ["a2"], ["b1"]),
            node("b", "Neg", ["b1"], ["b2"]),
            node("a", "Exp", ["b2"], ["a3"]),
            node("a.c", "Mul", ["a3", "a1"], ["a4"]),
            node("a.c", "Mul", ["a4", "w"], ["y"]),
        ],
    )
    report = convert(path, tmp_path)
    assert report.split == ("a",)
    functions = bodies(report.onnx_path)
    assert list(functions) == ["a_part0", "b", "a_part1", "c"]
    assert list(functions["a_part0"].output) == ["a1", "a2"]
    assert list(functions["c"].input) == ["a3", "a1", "w"]


def test_deep_nesting_ends_where_the_checker_ends(tmp_path: Path) -> None:
    nodes, last, module = [], "x", ""
    for level in range(300):
        module = f"{module}.m{level}".removeprefix(".")
        for op_type in ("Neg", "Abs"):
            nodes.append(node(module, op_type, [last], [f"{op_type}{level}"]))
            last = f"{op_type}{level}"
    path = write(tmp_path / "m.onnx", [*nodes, node("", "Neg", [last], ["y"])])
    assert convert(path, tmp_path).levels == 100


def test_nodes_in_any_order(tmp_path: Path) -> None:
    """Constants far from their module are moved, and put back; unsorted files are sorted."""
    chain = [
        node("a", "Mul", ["x", "w"], ["a1"]),
        node("b", "Neg", ["a1"], ["b1"]),
        node("b", "Mul", ["b1", "b1"], ["b2"]),
        node("a", "Neg", ["x"], ["a2"]),
        node("c", "Add", ["b2", "a2"], ["c1"]),
        node("c", "Clip", ["c1", "", "a3"], ["y"]),
        node("a", "ReduceMax", ["w"], ["a3"], keepdims=0),
    ]
    path = write(tmp_path / "m.onnx", chain)
    report = convert(path, tmp_path)
    assert sorted(report.functions) == ["a", "b", "c"]
    assert list(bodies(report.onnx_path)["c"].input) == ["b2", "a2", "a3"]


def test_values_at_the_border(tmp_path: Path) -> None:
    """Graph outputs from inside, values used within and outside, and results nobody uses."""
    path = write(
        tmp_path / "m.onnx",
        [
            node("a", "Mul", ["x", "x"], ["y"]),
            node("a", "Neg", ["y"], ["a2"]),
            node("dead", "Exp", ["a2"], ["d1"]),
            node("dead", "Neg", ["d1"], ["d2"]),
            node("last", "Dropout", ["a2", "", ""], ["s1", ""]),
            node("last", "Add", ["s1", "s1"], ["z"]),
        ],
        outputs=("y", "z"),
    )
    report = convert(path, tmp_path)
    functions = bodies(report.onnx_path)
    assert list(functions["a"].input) == ["x"]
    assert list(functions["a"].output) == ["y", "a2"]
    assert list(functions["dead"].output) == ["d2"]
    assert list(functions["last"].output) == ["z"]


def test_subgraphs_stay_in_their_node(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("r", TensorProto.FLOAT, [2])
    inner = [node("a.c", "Mul", ["outer", "w"], ["t"]), node("a.c", "Neg", ["t"], ["r"])]
    then = helper.make_graph(inner, "then", [], [value])
    other = helper.make_graph([node("a.d", "Add", ["outer", "x"], ["r"])], "else", [], [value])
    path = write(
        tmp_path / "m.onnx",
        [
            node("b", "Neg", ["x"], ["outer"]),
            node("b", "ReduceMax", ["x"], ["most"], keepdims=0),
            node("a", "Cast", ["most"], ["flag"], to=TensorProto.BOOL),
            node("a", "If", ["flag"], ["y"], then_branch=then, else_branch=other),
        ],
    )
    report = convert(path, tmp_path)
    assert set(report.functions) == {"a", "b"}
    assert sorted(bodies(report.onnx_path)["a"].input) == ["most", "outer", "w", "x"]


@pytest.mark.parametrize("domain", ["own", "modelexport"])
def test_functions_that_the_file_has(domain: str, tmp_path: Path) -> None:
    """They stay as they are, also where they have our names."""
    twice = helper.make_function(
        domain, "a", ["v"], ["r"], [helper.make_node("Add", ["v", "v"], ["r"])], [OPSET]
    )
    path = write(
        tmp_path / "m.onnx",
        [
            node("a", "a", ["x"], ["a1"], domain=domain),
            node("a", "Neg", ["a1"], ["a2"]),
            node("b", "a", ["a2"], ["y"], domain=domain),
        ],
        functions=[twice],
        ir_version=10,
    )
    report = convert(path, tmp_path)
    assert report.functions == {"a": "a"}
    model = onnx.load(report.onnx_path)
    assert [function.name for function in model.functions] == ["a", "a"]
    assert model.functions[0] == twice
    assert len({function.domain for function in model.functions}) == 2


def test_hostile_names(tmp_path: Path) -> None:
    modules = ["a-b", "a_b", "a b", "1", "é.x", "\u202e", "n" * 500, "%2F"]
    last, nodes = "x", []
    for number, module in enumerate(modules):
        for op_type in ("Neg", "Abs"):
            value = f"v{number}/{op_type} \u202e"
            nodes.append(node(module, op_type, [last], [value]))
            last = value
    nodes.append(node("", "Neg", [last], ["y"]))
    path = write(tmp_path / "m.onnx", nodes)
    report = convert(path, tmp_path)
    assert len(report.functions) == len(modules)
    assert all(re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) for name in report.functions)
    assert max(map(len, report.functions)) < 200


def test_a_clean_file_is_converted_by_its_sidecar(tmp_path: Path) -> None:
    model, inputs = net()
    path = tmp_path / "m.onnx"
    modelexport.export_model(distinct(model), inputs, path, strategy="htp", clean=True)
    report = convert(path, tmp_path)
    assert report.functions
    assert not modelexport.load(report.onnx_path).is_tagged


@pytest.mark.parametrize("tool", ["ort-extended", "transformers-1", "int8-dynamic", "float16"])
def test_a_retagged_file(tool: str, tmp_path: Path) -> None:
    path, _, _ = export("bert", "htp", tmp_path)
    changed, tagged = tmp_path / "changed.onnx", tmp_path / "tagged.onnx"
    assert apply(tool, path, changed, {})
    modelexport.retag(path, changed, tagged)
    # ONNX Runtime would give a new initializer a name that it has given before, in this very file.
    report = convert(tagged, tmp_path, optimize=tool != "transformers-1")
    assert "encoder.layer.1" in report.functions.values()


def test_data_files_come_along(tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path / "source")
    assert (path.parent / "model.onnx.data").exists()
    for folder in ("there", "back"):
        (tmp_path / folder).mkdir()
    out = tmp_path / "there" / "f.onnx"
    report = modelexport.to_functions(path, out)
    assert report.data_files == ("model.onnx.data",)
    assert check(out) is None
    back = modelexport.from_functions(out, tmp_path / "back" / "model.onnx")
    assert back.read_bytes() == path.read_bytes()
    assert (tmp_path / "back" / "model.onnx.data").exists()
    (out.parent / "model.onnx.data").unlink()
    with pytest.raises(FileError, match=r"model\.onnx\.data is missing"):
        modelexport.from_functions(out, tmp_path / "new.onnx")


def count_calls(path: Path, out: Path) -> int:
    """Count the function calls of a conversion and back, which do not depend on the machine."""
    counts: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: counts.update((event,)))
    try:
        modelexport.to_functions(path, out)
        modelexport.from_functions(out, path.with_name("back.onnx"))
    finally:
        sys.setprofile(None)
    return counts.total()


@pytest.mark.performance
def test_work_is_linear_in_the_nodes(tmp_path: Path) -> None:
    counts = []
    for nodes in (500, 5_000):
        write_graph(tmp_path / "m.onnx", nodes)
        counts.append(count_calls(tmp_path / "m.onnx", tmp_path / "f.onnx"))
    assert counts[1] < 11 * counts[0]
