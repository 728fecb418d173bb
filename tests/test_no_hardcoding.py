"""MUST-001 and MUST-003: the source names no operator, model or layer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
import transformers

import modelexport
from modelexport.modules.tags import DEFAULT_TORCH_NN

SOURCE = Path(modelexport.__file__).parent

OPERATORS = {schema.name for schema in onnx.defs.get_all_schemas()}
TORCH_CLASSES = {name for name, value in vars(torch.nn).items() if isinstance(value, type)}
MODEL_CLASSES = {
    name for name in dir(transformers) if re.search(r"(Model|Config|For[A-Z]\w+|Tokenizer)$", name)
}
MODEL_TYPES = set(transformers.CONFIG_MAPPING)
LAYER_WORDS = {
    "encoder",
    "decoder",
    "attention",
    "embeddings",
    "layernorm",
    "pooler",
    "lm_head",
    "mlp",
    "self_attn",
}
EVERYDAY = {
    "If", "Add", "Not", "Or", "And", "Where", "Max", "Min", "Mean", "Sum", "Split", "Shape", "Size",
    "Module", "Optional", "Scan", "Loop", "Identity", "Constant", "Range", "Unique", "Parameter",
    "Buffer", "Transformer", "auto", "AutoModel", "AutoConfig", "AutoTokenizer", "PreTrainedModel",
}  # fmt: skip
"""Words that are also English, or that name no architecture; only whole literals count."""

pytestmark = pytest.mark.must


def literals(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the string literals that code can act on; docstrings are for people."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node


def offences(source: str, allowed: frozenset[str] = frozenset()) -> list[str]:
    """Return the forbidden names in the literals of a file, as the whole text or a part of it."""
    names = []
    for node in literals(ast.parse(source)):
        text = node.value.strip()
        whole = {text} & (OPERATORS | TORCH_CLASSES | MODEL_CLASSES | MODEL_TYPES | LAYER_WORDS)
        parts = set(re.split(r"[^A-Za-z0-9_]+", text)) & (
            (OPERATORS | TORCH_CLASSES | MODEL_CLASSES | LAYER_WORDS) - EVERYDAY
        )
        names += [f"line {node.lineno}: {name}" for name in (whole | parts) - allowed - {"auto"}]
    return names


def test_no_name_steers_the_logic() -> None:
    allowed = {"tags.py": frozenset(DEFAULT_TORCH_NN)}
    steering = [
        f"{path.relative_to(SOURCE)}, {offence}"
        for path in sorted(SOURCE.rglob("*.py"))
        for offence in offences(path.read_text(), allowed.get(path.name, frozenset()))
    ]
    assert steering == []


def test_the_one_list_is_the_contract() -> None:
    assert set(DEFAULT_TORCH_NN) == {
        "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm", "GroupNorm",
        "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "Embedding",
    }  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        'if node.op_type == "MatMul": pass',
        'if node.op_type in ("Identity",): pass',
        'is_bert = config.model_type == "bert"',
        'name = "BertModel"',
        'if "layer.attention.query" in path: pass',
        'SHOWN = ["Linear"]',
    ],
)
def test_the_check_can_fail(source: str) -> None:
    assert offences(source)
