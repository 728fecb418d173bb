"""`modelexport validate`: is a file what it should be, and mending it from what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.console import RenderableType

from modelexport.analysis.findings import Finding, Severity
from modelexport.analysis.repair import Repair
from modelexport.analysis.validate import Validation, validate
from modelexport.cli.console import emit_json, line, show, waiting
from modelexport.errors import plural

_MOST = 10


@click.command("validate", short_help="Whether a file is what it should be; repair.")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.option(
    "--check-consistency",
    is_flag=True,
    help="Also check nodes, metadata, sidecar and graph against each other.",
)
@click.option(
    "--repair",
    is_flag=True,
    help="First mend what is recorded elsewhere; keeps a backup, never guesses.",
)
@click.option(
    "--output-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json is complete.",
)
@click.pass_context
def validate_command(
    ctx: click.Context, onnx: Path, check_consistency: bool, repair: bool, output_format: str
) -> None:
    """Check ONNX: compliance by ONNX's own full check, the form of the tags, and on request that everything agrees.

    Exit code 0 if nothing is wrong, 1 if there are errors, 2 if the file cannot be read. --repair implies
    --check-consistency, and what it reports is what is left.

    \b
    Examples:
      modelexport validate bert.onnx --check-consistency
      modelexport validate bert.onnx --repair
    """
    with waiting(f"check {onnx.name}"):
        result = validate(onnx, check_consistency, repair)
    if output_format == "json":
        emit_json({"valid": result.valid, **msgspec.to_builtins(result)})
    else:
        show(_view(result))
    ctx.exit(0 if result.valid else 1)


def _view(result: Validation) -> Iterator[RenderableType]:
    yield line(result.file)
    for name, word in result.checks.items():
        yield line(f"{name:12} {word}", 2)
    if result.repair is not None:
        yield from _mended(result.repair, result.valid)
    groups: dict[tuple[str, str], list[Finding]] = {}
    for found in result.findings:
        groups.setdefault((found.code, found.severity), []).append(found)
    for (code, severity), group in groups.items():
        yield ""
        yield line(f"{severity} {code}{f' ({len(group)})' if len(group) > 1 else ''}")
        for found in group[:_MOST]:
            yield line(f"{found.place or '(root)'}: {found.message}", 2)
        if len(group) > _MOST:
            yield line(f"… and {len(group) - _MOST} more; --output-format json has them all", 2)
        yield line(f"fix: {group[0].fix}", 2)
    yield ""
    errors = sum(found.severity == Severity.ERROR for found in result.findings)
    yield line("valid" if not result.findings else f"{plural(errors, 'error')} found")


def _mended(repair: Repair, is_valid: bool) -> Iterator[RenderableType]:
    yield ""
    mended = [plural(len(repair.nodes), "doc_string")] if repair.nodes else []
    mended += ["the model's metadata"] if repair.metadata else []
    mended += ["the sidecar"] if repair.sidecar else []
    nothing = "nothing had to be mended"
    if not is_valid:
        nothing = "nothing could be mended: no record that is left tells more; put the export's sidecar beside the file"
    yield line(f"mended {', '.join(mended)}" if mended else nothing)
    for backup in repair.backups:
        yield line(f"as it was: {backup}", 2)
