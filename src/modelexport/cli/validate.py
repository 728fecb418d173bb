"""`modelexport validate`: check a file and its tags, and repair them from what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from modelexport.analysis.findings import Finding, Severity
from modelexport.analysis.validate import Repair, Validation, validate
from modelexport.cli.console import emit_json, line, output_format_option, progress, show
from modelexport.errors import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST = 10


@click.command("validate")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.option(
    "--check-consistency",
    is_flag=True,
    help="Also check nodes, metadata, sidecar and graph against each other.",
)
@click.option(
    "--repair",
    is_flag=True,
    help="First restore what is recorded elsewhere; keeps a backup, never guesses.",
)
@output_format_option("text", "json")
@click.pass_context
def validate_command(
    ctx: click.Context, onnx: Path, check_consistency: bool, repair: bool, output_format: str
) -> None:
    """Check ONNX with ONNX's own full check, the form of its tags, and on request their agreement.

    Exit code 0 if nothing is wrong, 1 if there are errors, 2 if the file cannot be read. --repair
    implies --check-consistency, and reports what is wrong afterwards.

    \b
    Examples:
      modelexport validate bert.onnx --check-consistency
      modelexport validate bert.onnx --repair
    """
    with progress(f"check {onnx.name}"):
        result = validate(onnx, check_consistency, repair)
    if output_format == "json":
        emit_json({"valid": result.valid, **msgspec.to_builtins(result)})
    else:
        show(_view(result))
    ctx.exit(0 if result.valid else 1)


def _view(result: Validation) -> Iterator[RenderableType]:
    """Show a validation as text, its findings by code."""
    yield line(result.file)
    for check, outcome in result.checks.items():
        yield line(f"{check:12} {outcome}", 2)
    if result.repair is not None:
        yield from _repair_lines(result.repair, result.valid)
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in result.findings:
        groups.setdefault((finding.code, finding.severity), []).append(finding)
    for (code, severity), group in groups.items():
        yield ""
        yield line(f"{severity} {code}{f' ({len(group)})' if len(group) > 1 else ''}")
        for finding in group[:_MOST]:
            yield line(f"{finding.place or '(root)'}: {finding.message}", 2)
        if len(group) > _MOST:
            yield line(f"… and {len(group) - _MOST} more; --output-format json has them all", 2)
        yield line(f"fix: {group[0].fix}", 2)
    yield ""
    errors = sum(finding.severity == Severity.ERROR for finding in result.findings)
    yield line("valid" if not result.findings else f"{plural(errors, 'error')} found")


def _repair_lines(repair: Repair, is_valid: bool) -> Iterator[RenderableType]:
    """Show what was repaired, and where the files are as they were."""
    yield ""
    repaired = [plural(len(repair.nodes), "doc_string")] if repair.nodes else []
    repaired += ["the model's metadata"] if repair.metadata else []
    repaired += ["the sidecar"] if repair.sidecar else []
    if repaired:
        yield line(f"repaired {', '.join(repaired)}")
    elif is_valid:
        yield line("nothing needs repair")
    else:
        yield line(
            "nothing could be repaired: no intact record is left; "
            "put the export's sidecar beside the file"
        )
    for backup in repair.backups:
        yield line(f"as it was: {backup}", 2)
