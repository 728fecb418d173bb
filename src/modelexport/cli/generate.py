"""`modelexport generate`: greedy text from the parts of a language model, in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import click

from modelexport.cli.console import escape_control, note, progress
from modelexport.errors import plural
from modelexport.generation.prompt import make_prompt
from modelexport.generation.records import read_generation
from modelexport.generation.run import Generation, generate
from modelexport.verification.feeds import read_arrays


def _parse_ids(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> list[int] | None:
    """Parse `1,2,3`."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form 1,2,3") from None


@click.command("generate")
@click.argument("generation", type=click.Path(path_type=Path))
@click.argument("text", required=False)
@click.option(
    "--input-ids", metavar="N,N,...", callback=_parse_ids, help="Token ids instead of TEXT."
)
@click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="An .npz with other inputs of the model by name, such as features of a sound.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="The greatest number of tokens to generate.",
)
@click.option(
    "--check", metavar="MODEL", help="Also generate with PyTorch, and compare token for token."
)
@click.option(
    "--trust-remote-code", is_flag=True, help="With --check: run the code that comes with MODEL."
)
@click.pass_context
def generate_command(
    ctx: click.Context,
    generation: Path,
    text: str | None,
    input_ids: list[int] | None,
    inputs: Path | None,
    max_new_tokens: int,
    check: str | None,
    trust_remote_code: bool,
) -> None:
    """Continue TEXT with the model of GENERATION, a file that `export --generation` writes.

    Each token is the one with the highest score. The new text goes to stdout as it comes, the rest
    to stderr. Without a tokenizer, pass --input-ids; the new ids are printed.

    \b
    Examples:
      modelexport generate llama_generation.json "Once upon a" --max-new-tokens 50
      modelexport generate llama_generation.json "Once upon a time" --check llama
      modelexport generate llama_generation.json --input-ids 1,15043,29892

    Exit code 0 if done, 1 if --check finds another token, 2 for bad input or usage.
    """
    arrays = None if inputs is None else read_arrays(inputs)
    result = generate(
        generation,
        text,
        input_ids=input_ids,
        inputs=arrays,
        max_new_tokens=max_new_tokens,
        on_text=lambda piece: click.echo(_printable(piece), nl=False),
    )
    click.echo()
    note(_describe_speed(result))
    if check is None:
        return
    with progress() as step:
        step("load torch and the model")
        from modelexport.generation.check import check_tokens

        record = read_generation(generation)
        ids = input_ids if text is None else result.prompt
        prompt = make_prompt(record, None, None, ids, arrays)
        answer = check_tokens(
            check, generation, record, result, prompt, max_new_tokens, trust_remote_code, step
        )
    if answer.first_difference is None:
        note(f"PyTorch generates the same {plural(len(result.tokens), 'token')}")
        return
    number = answer.first_difference
    got, expected = (tokens[number : number + 1] for tokens in (result.tokens, answer.expected))
    note(
        f"token {number + 1} differs: {_one(got)} in ONNX Runtime, {_one(expected)} in PyTorch "
        f"({','.join(map(str, answer.expected))})"
    )
    ctx.exit(1)


def _describe_speed(result: Generation) -> str:
    """Say how many tokens there are, and how fast they came."""
    count, first = plural(len(result.tokens), "token"), f"{_duration(result.first_seconds)}"
    if len(result.tokens) < 2:
        return f"{count} in {first}"
    speed = f"{result.tokens_per_second:,.1f} tokens per second"
    return f"{count}, {speed} after the first, which took {first}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _one(tokens: tuple[int, ...]) -> str:
    return str(tokens[0]) if tokens else "none"


def _printable(text: str) -> str:
    """Escape control characters but for line breaks and tabs, which a text may have."""
    return "".join(one if one in "\n\t" else escape_control(one) for one in text)
