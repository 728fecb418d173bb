"""The command group: finds commands when they are called, and turns errors into a line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

import modelexport
from modelexport.errors import ModelExportError

_COMMANDS = {
    "export": ("modelexport.cli.export", "export_command"),
    "analyze": ("modelexport.cli.analyze", "analyze_command"),
    "validate": ("modelexport.cli.validate", "validate_command"),
    "compare": ("modelexport.cli.compare", "compare_command"),
    "extract": ("modelexport.cli.extract", "extract_command"),
    "verify": ("modelexport.cli.verify", "verify_command"),
    "export-graphml": ("modelexport.cli.graphml", "export_graphml_command"),
    "import-onnx": ("modelexport.cli.graphml", "import_onnx_command"),
    "strip": ("modelexport.cli.strip", "strip_command"),
    "batch": ("modelexport.cli.batch", "batch_command"),
    "demo": ("modelexport.cli.demo", "demo_command"),
}


class _Commands(click.Group):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        if sys.stdout is None:  # closed by the caller, who wants none of it
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            place = f"{error.filename}: " if error.filename else "cannot write the output: "
            click.echo(f"Error: {place}{error.strerror or error}", err=True)
            from modelexport.cli.console import mute_stdout

            mute_stdout()
            sys.exit(2)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        home, attribute = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(home), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModelExportError as error:
            from modelexport.cli.console import visible

            click.echo(f"Error: {visible(error.headline)}", err=True)
            for line in error.details:
                click.echo(visible(line), err=True)
            ctx.exit(error.exit_code)
        except MemoryError:
            click.echo("Error: out of memory (use smaller inputs or a smaller model)", err=True)
            ctx.exit(3)
        except KeyboardInterrupt:
            click.echo("Interrupted; no output is half written.", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            ctx.exit(0)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(modelexport.__version__, prog_name="modelexport")
def main() -> None:
    """Export PyTorch models to ONNX with every node mapped to the nn.Module that made it.

    Exit codes: 0 done, 1 the answer is no, 2 bad input or usage, 3 the export itself failed.
    """
