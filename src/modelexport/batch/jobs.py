"""The list of jobs: read from a file or given as records, with shared defaults, checked as a whole."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
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
from modelexport.job import Job, check_options
from modelexport.onnx_file.model_file import StrPath, as_path, check_regular_file, is_file

_WRITE = (
    'write [[jobs]] with model = "..." and output = "m.onnx", and what they share under [defaults]'
)
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_TIMEOUT = 1800.0
_LARGEST_FILE = 64 << 20
_LONGEST, _MOST = 1e9, 1 << 62


class BatchJob(Job, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A job of a batch: an export with a name, a time limit in seconds and a memory limit in bytes or as "4 GiB"."""

    output: str = ""
    name: str = ""
    timeout: float = _TIMEOUT
    memory: int | str | None = None

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit in bytes; None where the machine decides."""
        return None if self.memory is None else as_bytes(self.memory)


class JobsFile(msgspec.Struct, forbid_unknown_fields=True):
    """The list: its jobs, what they share, and the folder that relative outputs go to."""

    jobs: list[dict[str, Any]]
    defaults: dict[str, Any] = {}
    output_dir: str = "."


class Batch(msgspec.Struct, frozen=True):
    """Jobs, what their list is called, the folder that their paths start from, and the one that their outputs go to."""

    jobs: tuple[BatchJob, ...]
    name: str
    folder: Path
    output_dir: Path

    @property
    def results(self) -> Path:
        """The file that gets a line for each job."""
        return self.output_dir / f"{self.name}_results.jsonl"


def read_jobs(
    path: StrPath, output_dir: StrPath | None = None, defaults: Mapping[str, Any] | None = None
) -> Batch:
    """The jobs of a TOML or JSON file; paths in it start from its folder. `defaults` win over those in the file."""
    path = as_path(path)
    content = _content(path)
    try:
        told = (
            tomllib.loads(content.decode())
            if path.suffix == ".toml"
            else msgspec.json.decode(content)
        )
        file = msgspec.convert(told, JobsFile)
    except msgspec.ValidationError as error:
        raise FormatError(f"{path} is no list of jobs: {error}", hint=_WRITE) from error
    except (
        ValueError,
        msgspec.DecodeError,
        RecursionError,
    ) as error:  # tomllib raises several kinds of the first
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise FormatError(f"{path} is not {kind}: {error}", hint=_WRITE) from error
    _check_defaults(f"{path}, defaults", file.defaults)
    _check_defaults("the defaults", defaults or {})
    folder = path.parent.absolute()
    outputs = folder / file.output_dir if output_dir is None else Path(output_dir).absolute()
    jobs = _jobs(str(path), file.jobs, {**file.defaults, **(defaults or {})}, folder, outputs)
    return Batch(jobs, path.stem, folder, outputs)


def given_jobs(
    jobs: Sequence[Mapping[str, Any] | Job],
    output_dir: StrPath | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Batch:
    """Jobs as records or dicts; paths start from the current folder."""
    folder = Path.cwd()
    told = []
    for number, job in enumerate(jobs, 1):
        if not isinstance(job, Mapping | Job):
            raise ArgumentTypeError(
                f"job {number} is {describe_type(job)}",
                hint='pass dicts such as {"model": "...", "output": "m.onnx"}',
            )
        told.append(msgspec.to_builtins(job) if isinstance(job, Job) else dict(job))
    outputs = folder if output_dir is None else Path(output_dir).absolute()
    _check_defaults("the defaults", defaults or {})
    return Batch(
        _jobs("the list of jobs", told, dict(defaults or {}), folder, outputs),
        "jobs",
        folder,
        outputs,
    )


def _content(path: Path) -> bytes:
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


def _jobs(
    place: str, told: list[dict[str, Any]], defaults: dict[str, Any], folder: Path, output_dir: Path
) -> tuple[BatchJob, ...]:
    if not told:
        raise FormatError(f"{place} has no jobs", hint=_WRITE)
    for field in ("name", "output"):
        if field in defaults:
            raise FormatError(f"{place}: {field} is for one job, not for all", hint=_WRITE)
    jobs = []
    for number, fields in enumerate(told):
        told_place = f"{place}, job {number + 1}"
        job = _converted(told_place, {**defaults, **fields})
        jobs.append(_placed(told_place, job, folder, output_dir))
    for kind, found in (
        ("name", [job.name for job in jobs]),
        ("output", [job.output for job in jobs]),
    ):
        seen: set[str] = set()
        for value in found:
            if value in seen:
                raise FormatError(
                    f"{place}: two jobs have the {kind} {value}", hint=f"give each its own {kind}"
                )
            seen.add(value)
    return tuple(jobs)


def _check_defaults(place: str, defaults: Mapping[str, Any]) -> None:
    """What is wrong with the defaults is in none of the jobs."""
    job = _converted(place, {"model": "", **defaults})
    try:
        check_limits(job.timeout, job.memory)
    except (ArgumentError, FormatError) as error:
        raise FormatError(f"{place}: {error.message}", hint=error.hint) from error


def _converted(place: str, fields: Mapping[str, Any]) -> BatchJob:
    _check_fields(place, fields)
    try:
        return msgspec.convert(fields, BatchJob, str_keys=True)
    except msgspec.ValidationError as error:
        raise FormatError(f"{place}: {error}", hint=_WRITE) from error


def _check_fields(place: str, fields: Mapping[str, Any]) -> None:
    known = BatchJob.__struct_fields__
    for name in fields:
        if name not in known:
            meant = difflib.get_close_matches(str(name).replace("-", "_"), known, 1)
            hint = (
                f"did you mean {meant[0]}?"
                if meant
                else "the names are those of the options of export"
            )
            raise FormatError(f"{place}: there is no option {str(name)[:80]!r}", hint=hint)


def _placed(place: str, job: BatchJob, folder: Path, output_dir: Path) -> BatchJob:
    """A job with a name, and with its outputs where they go."""
    output = job.output or (f"{job.name}.onnx" if job.name else "")
    if not output:
        raise FormatError(f"{place} has neither a name nor an output", hint=_WRITE)
    if not job.output and Path(job.name).name != job.name:
        raise FormatError(
            f"{place}: no file can have the name {job.name!r}",
            hint="give the job an output of its own",
        )
    try:
        check_limits(job.timeout, job.memory)
        check_options(job)
        if not output.endswith(".onnx"):
            raise ArgumentError(
                f"the output {output!r} does not end in .onnx",
                hint="name it, for example, model.onnx",
            )
        if (factory := job.model.rpartition(":")[0]).endswith(".py") and not is_file(
            folder / factory
        ):
            raise ArgumentError(
                f"there is no file {factory}", hint="paths start from the folder of the list"
            )
    except (ArgumentError, FormatError) as error:
        raise FormatError(f"{place}: {error.message}", hint=error.hint) from error
    try:
        f"{job.name}{job.model}{output_dir}{output}".encode()
        extras = {
            field: str(output_dir / value)
            for field in ("graphml_output", "jit_graph", "fx_graph")
            if (value := getattr(job, field)) is not None
        }
        name = job.name or output.removesuffix(".onnx")
        return msgspec.structs.replace(
            job, name=name, output=os.path.normpath(output_dir / output), **extras
        )
    except ValueError as error:
        raise FormatError(
            f"{place}: a name in it is no text, or none for a file", hint=_WRITE
        ) from error


def check_limits(timeout: float | None, memory: int | str | None) -> None:
    """Raise for limits that no job can have."""
    if timeout is not None and not 0 < timeout < _LONGEST:
        raise ArgumentError(f"the timeout {timeout:g} is no time", hint="it is in seconds")
    if memory is not None and not 0 < as_bytes(memory) < _MOST:
        raise ArgumentError(f"no machine has the memory {memory}", hint='for example "4 GiB"')


def as_bytes(memory: int | str) -> int:
    """A size as people write it, in bytes; every unit is 1024 of the one below."""
    if isinstance(memory, int):
        return memory
    match = _MEMORY.fullmatch(memory)
    if match is None:
        raise FormatError(f"{memory[:80]!r} is no size", hint='write it as bytes, or as "4 GiB"')
    number, unit = match.groups()
    return int(float(number) * 1024 ** " kmgt".index(unit.lower() or " "))
