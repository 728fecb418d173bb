"""The jobs of a batch: read from a file or given as records, and checked as a whole."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from modelexport.errors import (
    ArgumentError,
    ArgumentTypeError,
    FileError,
    FormatError,
    describe_type,
)
from modelexport.generation.records import DECODE, ENCODE, PREFILL, part_path
from modelexport.onnx_file.model_file import StrPath, as_path, check_regular_file, is_file
from modelexport.option_values import convert_options, name_options
from modelexport.options import SOURCE_KEYWORDS, ExportOptions, resolve_names
from modelexport.request import check_options, graph_files

_WRITE = (
    'write [[jobs]] with model = "..." and output = "m.onnx", and what they share under [defaults]'
)
_MEMORY = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_TIMEOUT = 1800.0
_LARGEST_FILE = 64 << 20
_LONGEST_TIMEOUT, _MOST_MEMORY = 1e9, 1 << 62


class BatchJob(
    ExportOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A job of a batch: an export, with a name and limits."""

    model: str
    """What names the model, as for `modelexport export`."""
    output: str = ""
    """The file to write; `<name>.onnx` if it is left out."""
    name: str = ""
    """The name in the results; the output without its suffix if it is left out."""
    timeout: float = _TIMEOUT
    """Seconds until the job is ended."""
    memory: int | str | None = None
    """The memory limit in bytes, or as "4 GiB"."""

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit in bytes; None for the share of the machine."""
        return None if self.memory is None else as_bytes(self.memory)


class JobsFile(msgspec.Struct, forbid_unknown_fields=True):
    """The list of jobs, their shared options, and the folder that relative outputs go to."""

    jobs: list[dict[str, Any]]
    defaults: dict[str, Any] = {}
    output_dir: str = "."


class Batch(msgspec.Struct, frozen=True):
    """The jobs of one batch, with its name and folders."""

    jobs: tuple[BatchJob, ...]
    name: str
    """The stem of the file with the jobs."""
    folder: Path
    """The folder that relative paths of models and inputs start from."""
    output_dir: Path
    """The folder that relative outputs go to."""

    @property
    def results(self) -> Path:
        """The file that gets a line for each job."""
        return self.output_dir / f"{self.name}_results.jsonl"


def read_jobs(
    path: StrPath, output_dir: StrPath | None = None, defaults: Mapping[str, Any] | None = None
) -> Batch:
    """Read the jobs of a TOML or JSON file; relative paths in it start from its folder.

    Args:
        path: The file.
        output_dir: Where outputs go, instead of where the file says.
        defaults: Options for all jobs, which override the defaults of the file.

    Returns:
        The batch.

    Raises:
        ArgumentError: The file is neither TOML nor JSON by its name.
        FileError: The file cannot be read.
        FormatError: It is not a list of jobs, or a job cannot work.
    """
    path = as_path(path)
    content = _read_content(path)
    try:
        is_toml = path.suffix == ".toml"
        parsed = tomllib.loads(content.decode()) if is_toml else msgspec.json.decode(content)
        file = msgspec.convert(parsed, JobsFile)
    except msgspec.ValidationError as error:
        raise FormatError(f"{path} is not a list of jobs: {error}", hint=_WRITE) from error
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        # tomllib also raises plain ValueErrors, for numbers that are too long for example.
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise FormatError(f"{path} is not {kind}: {error}", hint=_WRITE) from error
    _check_defaults(f"{path}, defaults", file.defaults)
    _check_defaults("the defaults", defaults or {})
    folder = path.parent.absolute()
    outputs = folder / file.output_dir if output_dir is None else Path(output_dir).absolute()
    shared = {**file.defaults, **(defaults or {})}
    jobs = _make_jobs(str(path), file.jobs, shared, folder, outputs)
    return Batch(jobs, path.stem, folder, outputs)


def given_jobs(
    jobs: Sequence[Mapping[str, Any] | BatchJob],
    output_dir: StrPath | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Batch:
    """Make a batch of records or dicts; relative paths start from the current folder."""
    folder = Path.cwd()
    given = []
    for number, job in enumerate(jobs, 1):
        if not isinstance(job, Mapping | BatchJob):
            raise ArgumentTypeError(
                f"job {number} is {describe_type(job)}",
                hint='pass dicts such as {"model": "...", "output": "m.onnx"}',
            )
        given.append(msgspec.to_builtins(job) if isinstance(job, BatchJob) else dict(job))
    outputs = folder if output_dir is None else Path(output_dir).absolute()
    shared = dict(defaults or {})
    _check_defaults("the defaults", shared)
    checked = _make_jobs("the list of jobs", given, shared, folder, outputs)
    return Batch(checked, "jobs", folder, outputs)


def _read_content(path: Path) -> bytes:
    if path.suffix not in (".toml", ".json"):
        raise ArgumentError(
            f"{path} is neither .toml nor .json", hint="a list of jobs is one of these"
        )
    try:
        check_regular_file(path)
        if path.stat().st_size > _LARGEST_FILE:
            raise FormatError(f"{path} is too large for a list of jobs", hint=_WRITE)
        return path.read_bytes()
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}", hint="check the path") from error
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"cannot read {path}: {error.strerror or error}", hint=_WRITE) from error


def _make_jobs(
    where: str, given: list[dict[str, Any]], defaults: dict[str, Any], folder: Path, outputs: Path
) -> tuple[BatchJob, ...]:
    """Merge each job with the defaults, and check the jobs one by one and against each other."""
    if not given:
        raise FormatError(f"{where} has no jobs", hint=_WRITE)
    for field in ("name", "output"):
        if field in defaults:
            raise FormatError(f"{where}: {field} is for one job, not for all", hint=_WRITE)
    converted, jobs = [], []
    for number, fields in enumerate(given, 1):
        one = f"{where}, job {number}"
        # Names are resolved before merging: a job and the defaults may use different aliases.
        merged = {**_resolve(one, defaults), **_resolve(one, fields)}
        converted.append(_convert(one, merged))
        jobs.append(_complete_job(one, converted[-1], folder, outputs))
    # A name may be derived from the output, and the output from the name: first what is written.
    _check_distinct(where, "name", (job.name for job in converted if job.name))
    _check_distinct(where, "output", (output for job in jobs for output in _outputs(job)))
    _check_distinct(where, "name", (job.name for job in jobs))
    return tuple(jobs)


def _outputs(job: BatchJob) -> list[str]:
    """Return the output of a job, and the files of its parts if it exports a model in parts."""
    stem = Path(job.output.removesuffix(".onnx"))
    parts = (ENCODE, PREFILL, DECODE) if job.generation else ()
    return [job.output, *(str(part_path(stem, part)) for part in parts)]


def _check_distinct(where: str, field: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise FormatError(
                f"{where}: two jobs have the {field} {value}", hint=f"give each its own {field}"
            )
        seen.add(value)


def _check_defaults(where: str, defaults: Mapping[str, Any]) -> None:
    """Check the defaults by themselves, so that a message does not blame a job for them."""
    job = _convert(where, {"model": "", **_resolve(where, defaults)})
    with _locate_errors(where):
        check_limits(job.timeout, job.memory)


@contextmanager
def _locate_errors(where: str) -> Iterator[None]:
    """Say in the message of an error where the job is."""
    try:
        with name_options(as_flags=False):
            yield
    except (ArgumentError, ArgumentTypeError, FormatError) as error:
        raise FormatError(f"{where}: {error.message}", hint=error.hint or _WRITE) from error


def _resolve(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    own = set(BatchJob.__struct_fields__) - set(ExportOptions.__struct_fields__)
    with _locate_errors(where):
        return resolve_names(fields, SOURCE_KEYWORDS, also=sorted(own))


def _convert(where: str, fields: Mapping[str, Any]) -> BatchJob:
    with _locate_errors(where):
        return convert_options(fields, BatchJob)


def _complete_job(where: str, job: BatchJob, folder: Path, outputs: Path) -> BatchJob:
    """Give a checked job its name, and absolute paths to its outputs."""
    output = job.output or (f"{job.name}.onnx" if job.name else "")
    if not output:
        raise FormatError(f"{where} has neither a name nor an output", hint=_WRITE)
    if not job.output and Path(job.name).name != job.name:
        raise FormatError(
            f"{where}: no file can have the name {job.name!r}",
            hint="give the job an output of its own",
        )
    with _locate_errors(where):
        _check_job(job, output, folder)
    files = graph_files(job)
    if job.graphml_output is not None:
        files["graphml_output"] = job.graphml_output
    try:
        f"{job.name}{job.model}{outputs}{output}".encode()
        return msgspec.structs.replace(
            job,
            name=job.name or output.removesuffix(".onnx"),
            output=os.path.normpath(outputs / output),
            **{option: str(outputs / path) for option, path in files.items()},
        )
    except ValueError as error:
        raise FormatError(
            f"{where}: a name has characters that are not valid in a file name", hint=_WRITE
        ) from error


def _check_job(job: BatchJob, output: str, folder: Path) -> None:
    check_limits(job.timeout, job.memory)
    check_options(job)
    if not output.endswith(".onnx"):
        raise ArgumentError(
            f"the output {output!r} does not end in .onnx", hint="name it, for example, model.onnx"
        )
    factory = job.model.rpartition(":")[0]
    if factory.endswith(".py") and not is_file(folder / factory):
        raise ArgumentError(
            f"there is no file {factory}", hint="paths start from the folder of the list"
        )


def check_limits(timeout: float | None, memory: int | str | None) -> None:
    """Raise for limits that no job can have."""
    if timeout is not None and not 0 < timeout < _LONGEST_TIMEOUT:
        raise ArgumentError(
            f"timeout must be a positive number of seconds, got {timeout:g}",
            hint="for example 1800",
        )
    if memory is not None and not 0 < as_bytes(memory) < _MOST_MEMORY:
        raise ArgumentError(
            f"memory must be positive and below 4 EiB, got {memory}", hint='for example "4 GiB"'
        )


def as_bytes(memory: int | str) -> int:
    """Convert a size as people write it to bytes; each unit is 1024 times the one below."""
    if isinstance(memory, int):
        return memory
    match = _MEMORY.fullmatch(memory)
    if match is None:
        raise FormatError(
            f"memory must be a size, got {memory[:80]!r}", hint='write it as bytes, or as "4 GiB"'
        )
    number, unit = match.groups()
    return int(float(number) * 1024 ** " kmgt".index(unit.lower() or " "))
