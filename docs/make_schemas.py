"""Write docs/schemas/, a JSON Schema for each kind of JSON, and the tables of formats.md.

python docs/make_schemas.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from generated import DOCS, attribute_docs, between_marks, table_row, write
from modelexport.analysis.analyze import ANALYSIS_FORMAT, Analysis
from modelexport.analysis.compare import Comparison
from modelexport.analysis.validate import Validation
from modelexport.batch.jobs import BatchJob, JobsFile
from modelexport.batch.results import JobResult
from modelexport.generation.records import FORMAT as GENERATION_FORMAT
from modelexport.generation.records import (
    GenerationFile,
    GenerationInput,
    GenerationPart,
    TokenIds,
)
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.options import SourceOptions, options_of
from modelexport.profiling.profile import Profile, ProfileComparison
from modelexport.quantization.results import Sensitivity
from modelexport.source.input_specs import InputSpec
from modelexport.tagged.records import (
    FORMAT,
    EmbeddedMap,
    ExampleInput,
    ExportRecord,
    ExtractionRecord,
    ModelRecord,
    NodeRecord,
    RetagRecord,
    Sidecar,
    Statistics,
    TensorInfo,
    TensorRecord,
)
from modelexport.verification.records import Verification
from modelexport.viewing.function_bytes import FunctionsRecord

SCHEMAS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "node-tag": (NodeTag, "The doc_string of a tagged node", {}),
    "embedded": (
        EmbeddedMap,
        "The model's metadata entry modelexport.hierarchy",
        {"format": {"const": FORMAT}},
    ),
    "sidecar": (Sidecar, "The sidecar, <stem>_hierarchy.json", {"format": {"const": FORMAT}}),
    "generation": (
        GenerationFile,
        "The generation file, <stem>_generation.json",
        {"format": {"const": GENERATION_FORMAT}},
    ),
    "analysis": (
        Analysis,
        "modelexport analyze --output-format json",
        {"format": {"const": ANALYSIS_FORMAT}},
    ),
    "validation": (
        Validation,
        "modelexport validate --output-format json",
        {"valid": {"type": "boolean"}},
    ),
    "comparison": (
        Comparison,
        "modelexport compare --output-format json",
        {"verdict": {"type": "string"}},
    ),
    "profile": (Profile, "modelexport profile --output-format json", {}),
    "profile-comparison": (
        ProfileComparison,
        "modelexport profile A B --output-format json",
        {},
    ),
    "sensitivity": (
        Sensitivity,
        "modelexport quantize --sensitivity --output-format json",
        {},
    ),
    "verification": (Verification, "modelexport verify --output-format json", {}),
    "batch-list": (JobsFile, "The list that modelexport batch reads, as TOML or JSON", {}),
    "job-result": (JobResult, "A line that modelexport batch writes for each job", {}),
    "input-specs": (dict[str, InputSpec], "The file of --input-specs", {}),
}
"""By name: the record, a title, and properties that the record does not define."""

TABLES = (
    *(NodeTag, EmbeddedMap, Sidecar, ModelRecord, ExportRecord, SourceOptions, ExampleInput),
    *(RetagRecord, ExtractionRecord, ModuleRecord, NodeRecord, TensorRecord, TensorInfo),
    *(Statistics, InputSpec, FunctionsRecord),
    *(GenerationFile, GenerationPart, GenerationInput, TokenIds),
)
"""The records whose fields formats.md lists."""


def pages() -> dict[Path, str]:
    """Return the schemas and formats.md by path."""
    schemas = {
        DOCS / "schemas" / f"{name}.schema.json": _schema(*entry) for name, entry in SCHEMAS.items()
    }
    page = DOCS / "formats.md"
    text = page.read_text()
    for record in TABLES:
        text = between_marks(text, record.__name__, _table(record))
    return {**schemas, page: text}


def _table(record: type) -> str:
    described = msgspec.json.schema(record)["$defs"][record.__name__]["properties"]
    docs = {option.name: option.description for option in options_of(record)}
    docs |= attribute_docs(record)
    fields = [(one.encode_name, docs.get(one.name, "")) for one in msgspec.structs.fields(record)]
    rows = [table_row(f"`{name}`", _type(described[name]), meaning) for name, meaning in fields]
    about = " ".join((record.__doc__ or "").split())
    return "\n".join([about, "", "| field | type | |", "|---|---|---|", *rows])


def _type(schema: dict[str, Any]) -> str:
    """Name the type of a value in words."""
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if schema["type"] == "array":
        return f"list of {_type(schema.get('items') or schema['prefixItems'][0])}"
    if schema["type"] == "object":
        return f"object of {_type(schema['additionalProperties'])}"
    return str(schema["type"])


def _schema(record: Any, title: str, properties: dict[str, Any]) -> str:
    schema = msgspec.json.schema(record)
    if record is JobsFile:
        schema["$defs"] |= _jobs(schema["$defs"]["JobsFile"]["properties"])
    if properties:
        described = schema["$defs"][record.__name__]
        for name, facts in properties.items():
            described["properties"][name] = {**described["properties"].get(name, {}), **facts}
        described["required"] = list(dict.fromkeys([*properties, *described["required"]]))
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _jobs(properties: dict[str, Any]) -> dict[str, Any]:
    """Describe the jobs of a list and its defaults, which may name the model for all jobs."""
    job = msgspec.json.schema(BatchJob)["$defs"]["BatchJob"]
    del job["required"]
    for name, meaning in attribute_docs(BatchJob).items():
        job["properties"][name]["description"] = meaning
    for option in options_of(BatchJob):
        described = job["properties"][option.name]
        if option.spelling.single is not None:  # a value of the mapping may stand for the mapping
            value = described.pop("additionalProperties")
            kinds = [{"type": described.pop("type"), "additionalProperties": value}, value]
            described["anyOf"] = kinds
        for alias in option.spelling.aliases:
            meaning = f"Another name of {option.name}. {option.description}"
            job["properties"][alias] = {**described, "description": meaning}
    shared = {
        name: facts for name, facts in job["properties"].items() if name not in ("name", "output")
    }
    properties["jobs"] |= {"items": {"$ref": "#/$defs/BatchJob"}, "minItems": 1}
    properties["defaults"] = {"$ref": "#/$defs/Defaults"}
    meaning = "Options that the jobs share; a job's own option overrides them."
    return {
        "BatchJob": job,
        "Defaults": {**job, "title": "Defaults", "description": meaning, "properties": shared},
    }


if __name__ == "__main__":
    write(pages())
