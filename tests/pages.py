"""Markdown pages: their blocks, links and code words, and a reader that runs what they say."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner

from modelexport.cli.main import main

_FENCE = re.compile(r"^( *)```(.*)$")
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_EXITS = re.compile(r"# exits with (\d+)")
_MEASURED = re.compile(r"( ?) *(\d+\.\d+(e[-+]?\d+)?|\de[-+]\d+)")
_SHELL = set("|&;<>$`*")
_OURS = ("modelexport", ".venv/bin/modelexport")
_COMMAND = re.compile(r"^\s*(\$ |modelexport |\.venv/|make |pip |python )")


class Block(NamedTuple):
    """A fenced block: its language, the file to save it as, its text, and its position."""

    language: str
    file: str
    text: str
    line: int
    before: str


class Command(NamedTuple):
    text: str
    exit_code: int


class UnfitError(AssertionError):
    """A page says something that is not true."""


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order."""
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        indent, info = opening.groups()
        end = next(at for at in range(number + 1, len(lines)) if lines[at].strip() == "```")
        text = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end]) + "\n"
        language, _, file = info.strip().partition(" file=")
        before = next((line for line in reversed(lines[:number]) if line.strip()), "")
        yield Block(language, file, text, number + 1, before)
        number = end + 1


def prose(page: str) -> str:
    """Return a page without its blocks."""
    lines, fenced = [], False
    for line in page.splitlines():
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            lines.append(line)
    return "\n".join(lines)


def inline_code(page: str) -> list[str]:
    return _INLINE.findall(prose(page))


def links(page: str) -> list[str]:
    """Return the targets of all links that are not addresses."""
    targets = _LINK.findall(_INLINE.sub("", prose(page)))
    return [target for target in targets if "://" not in target]


def first_use(page: str, word: str) -> str | None:
    """Return the first use of a word outside code, with the whole link if it is in one."""
    link = rf"\[[^\]]*\b{word}\b[^\]]*\]\([^)]*\)|\[\]\([^)]*#{word}\)"  # without code, [] is left
    use = re.search(rf"{link}|\b{word}\b", _INLINE.sub("", prose(page)), re.IGNORECASE)
    return None if use is None else use[0]


def anchors(page: str) -> set[str]:
    """Return the anchors that a link into this page may name."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def commands(text: str) -> Iterator[Command]:
    """Yield the command lines of a block; a comment states an exit code other than 0."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            stated = _EXITS.search(line)
            yield Command(line.strip(), 0 if stated is None else int(stated[1]))


Elsewhere = dict[str, Callable[["Reader", str], str]]
"""How command lines begin that cannot run here, and a substitute that returns the output."""


class Reader:
    """A reader who does what a page says, in one folder."""

    def __init__(self, folder: Path, elsewhere: Elsewhere) -> None:
        self.folder = folder
        self.elsewhere = elsewhere
        self.output: str | None = None
        self.namespace: dict[str, Any] = {"__name__": "page"}

    def follow(self, page: str) -> None:
        for block in blocks(page):
            try:
                self._do(block)
            except Exception as error:
                raise UnfitError(f"line {block.line}: {type(error).__name__}: {error}") from error

    def _do(self, block: Block) -> None:
        if block.file:
            if f"`{block.file}`" not in block.before:
                raise UnfitError(f"the line above does not say that it is {block.file}")
            (self.folder / block.file).write_text(block.text)
        if block.language in ("sh", "console"):
            self.output = "".join(self._type(command) for command in commands(block.text))
        elif block.language == "python" and not block.file:
            self.output = self._execute(block)
        elif block.language == "text":
            if self.output is None:
                raise UnfitError("an output without a command")
            check_sample(block.text, self.output)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "" and not any(map(_COMMAND.match, block.text.splitlines())):
            pass  # a drawing
        elif not block.file:
            raise UnfitError(f"a block of the kind {block.language!r}")

    def _type(self, command: Command) -> str:
        for beginning, instead in self.elsewhere.items():
            if command.text.startswith(beginning):
                return instead(self, shlex.join(shlex.split(command.text, comments=True)))
        words = shlex.split(command.text, comments=True)
        line = command.text.partition(" #")[0]
        if words[0] in _OURS and not _SHELL & set(re.sub("'[^']*'", "", line)):
            result = CliRunner().invoke(main, words[1:])
            code, output = result.exit_code, result.output
        else:
            code, output = self.shell(command.text)
        if code != command.exit_code:
            raise UnfitError(f"{command.text} exits with {code}\n{output}")
        return output

    def shell(self, line: str) -> tuple[int, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def _execute(self, block: Block) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(block.text, f"page, line {block.line}", "exec"), self.namespace)
        return output.getvalue()


def check_sample(sample: str, output: str) -> None:
    """Check that a sample is part of an output, line by line.

    `...` stands for omitted lines, `…` for a part of a line. Any number matches a measured one,
    that is, one with a point or an exponent, whatever its alignment.
    """
    lines = [_measured(line) for line in output.splitlines()]
    start = 0
    for part in re.split(r"^ *\.\.\.\n", sample, flags=re.MULTILINE):
        wanted = [_pattern(line) for line in part.splitlines()]
        matches = (at for at in range(start, len(lines)) if _begins(wanted, lines[at:]))
        match = next(matches, None)
        if match is None:
            missing = (
                line for line in part.splitlines() if not any(map(_pattern(line).fullmatch, lines))
            )
            raise UnfitError(
                "the output has no such lines, or not in this order: "
                f"{next(missing, part)!r}\n{output}"
            )
        start = match + len(wanted)


def _begins(wanted: list[re.Pattern[str]], lines: list[str]) -> bool:
    return len(wanted) <= len(lines) and all(map(re.Pattern.fullmatch, wanted, lines))


def _pattern(line: str) -> re.Pattern[str]:
    return re.compile(re.escape(_measured(line)).replace("…", ".*"))


def _measured(line: str) -> str:
    return _MEASURED.sub(r"\1#", line.rstrip())
