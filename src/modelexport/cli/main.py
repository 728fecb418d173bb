"""The `modelexport` command: import a command when it is called, and map errors to exit codes."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

import click

import modelexport
from modelexport.errors import ModelExportError

COMMANDS = {
    "export": ("export:export_command", "Export a model with its map."),
    "generate": ("generate:generate_command", "Generate text with an exported language model."),
    "analyze": ("analyze:analyze_command", "Show what is in a file, module by module."),
    "view": ("view:view_command", "Write a page that shows the model as nested modules."),
    "validate": ("validate:validate_command", "Check a file and its tags; repair them."),
    "compare": ("compare:compare_command", "Compare two files, module by module."),
    "extract": ("extract:extract_command", "Write one module as a runnable model."),
    "verify": ("verify:verify_command", "Compare every module with PyTorch."),
    "retag": ("retag:retag_command", "Carry the map over to what another tool made of a file."),
    "profile": ("profile:profile_command", "Show the latency of each module."),
    "select": ("select:select_command", "Print names of the nodes of modules, for other tools."),
    "quantize": ("quantize:quantize_command", "Quantize by module, and measure the error."),
    "functions": (
        "functions:functions_command",
        "Write modules as ONNX local functions, for Netron.",
    ),
    "export-graphml": (
        "graphml:export_graphml_command",
        "Write a GraphML for yEd, with modules as groups.",
    ),
    "import-onnx": ("graphml:import_onnx_command", "Restore the model from a GraphML."),
    "strip": ("extract:strip_command", "Restore the bytes of the baseline."),
    "batch": ("batch:batch_command", "Run many exports, each in its own process."),
    "demo": ("demo:demo_command", "Take the tour on a tiny BERT, offline."),
}
"""Of each command, where it is in `modelexport.cli`, and its line in `modelexport --help`.

The line is here, and not in the command, so that `modelexport --help` imports no command.
"""


class _Commands(click.Group):
    """The group of the commands in the table above."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; a file that cannot be read or written ends it with exit code 2."""
        if sys.stdout is None:  # the caller has closed it
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            subject = f"{error.filename}: " if error.filename else "cannot write the output: "
            click.echo(f"Error: {subject}{error.strerror or error}", err=True)
            from modelexport.cli.console import mute_stdout

            mute_stdout()
            sys.exit(2)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of the commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(
            importlib.import_module(f"modelexport.cli.{module}"), attribute
        )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name; suggest the nearest for an unknown one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else "modelexport --help lists them"
            ctx.fail(f"there is no command {args[0]!r} ({hint})")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and the short help of the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and print an error as one line, its details, and an exit code."""
        try:
            from modelexport.option_values import name_options

            with name_options(as_flags=True):
                return super().invoke(ctx)
        except ModelExportError as error:
            from modelexport.cli.console import escape_control

            click.echo(f"Error: {escape_control(error.headline)}", err=True)
            for line in error.details:
                click.echo(escape_control(line), err=True)
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
