"""Run what the README and the pages of docs/ say to type, and compare what they show."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from exports import Shared, shared_folder
from modelexport.attribution import strategies
from modelexport.cli.main import main
from pages import Reader, UnfitError, anchors, first_use, inline_code, links

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    {
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    }
)
CLONE = (
    "src",
    "docs",
    "examples",
    "tests",
    "viewer",
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
)

pytestmark = pytest.mark.integration


def _print_recipe(reader: Reader, line: str) -> str:
    code, output = reader.shell(f"make -n {shlex.join(shlex.split(line)[1:])}")
    assert code == 0, output
    return output


def _print_demo(reader: Reader, line: str) -> str:
    return _print_recipe(reader, line) + (reader.folder / "demo-output" / "stdout.txt").read_text()


def _install_nothing(reader: Reader, line: str) -> str:
    arguments = shlex.join(shlex.split(line)[2:])
    code, output = reader.shell(
        f"python -m pip install --dry-run --no-deps --no-index --no-build-isolation {arguments}"
    )
    assert code == 0, output
    return output


def _install_beside(reader: Reader, line: str) -> str:
    code, output = reader.shell(
        f"python -m pip install --no-index --target site {shlex.join(shlex.split(line)[2:])}"
    )
    assert code == 0, output
    return output


def _check_batch_options(reader: Reader, line: str) -> str:
    words = [word for word in shlex.split(line) if word.startswith("--")]
    output = CliRunner().invoke(main, ["batch", "--help"]).output
    assert all(word in output for word in words), line
    return output


def _fail_offline(reader: Reader, line: str) -> str:
    code, output = reader.shell(line)
    assert code == 2, output
    assert "cannot load" in output
    return output


def _check_files_to_show(reader: Reader, line: str) -> str:
    for word in shlex.split(line)[1:]:
        name, _, value = word.rpartition("=")
        if name == "--extensions":
            assert find_spec(f"{value}.main") is not None
        else:
            assert (reader.folder / value).exists()
    return ""


ELSEWHERE: dict[str, Callable[[Reader, str], str]] = {
    # Sets up .venv from a package index; the demo itself is run.
    "make demo": _print_demo,
    # Sets up .venv from a package index, and runs for minutes.
    "make ": _print_recipe,
    # Starts a cluster; tests/batch does that.
    "modelexport batch jobs.toml --resume --executor ray": _check_batch_options,
    # Installed into a folder of the page.
    "pip install --no-deps --no-build-isolation ./examples/": _install_beside,
    # Reads a package index; the packages must exist and build.
    "pip install": _install_nothing,
    # Starts a server; the files and the extension must exist.
    "model-explorer ": _check_files_to_show,
    # Reads the hub; the options must be accepted.
    "modelexport export google/": _fail_offline,
}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with the files of a fresh clone after `make demo`."""

    def run_demo(folder: Path) -> None:
        monkeypatch.chdir(folder)
        result = CliRunner().invoke(main, ["demo", "demo-output"])
        assert result.exit_code == 0, result.output
        (folder / "demo-output" / "stdout.txt").write_text(result.stdout)

    shutil.copytree(shared_folder("demo", run_demo), tmp_path, dirs_exist_ok=True)
    for name in CLONE:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "node_modules")
            shutil.copytree(source, tmp_path / name, ignore=ignored)
        else:
            shutil.copyfile(source, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # like Python when it starts in that folder
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(strategies, "_REGISTRY", dict(strategies._REGISTRY))
    _forget_modules(Shared.folder.parent)  # other tests may import modules of the same names
    yield tmp_path
    _forget_modules(tmp_path)


def _forget_modules(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [path for path in PAGES if "```" in path.read_text()], ids=_name)
def test_what_a_page_says_can_be_done(path: Path, clone: Path) -> None:
    Reader(clone, ELSEWHERE).follow(path.read_text())


def test_links_have_a_target() -> None:
    broken = [
        f"{_name(path)}: {link}"
        for path in (*PAGES, ROOT / "CHANGELOG.md")
        for link in links(path.read_text())
        if not _has_target(path, link)
    ]
    assert broken == []


def _has_target(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in anchors(target.read_text()))


@pytest.mark.parametrize("word", ["absorbed", "baseline", "scope", "sidecar"])
def test_the_first_use_of_a_word_links_to_the_glossary(word: str) -> None:
    """Reference pages are not read from the top, and GraphML has a scope of its own."""
    without = {"api", "benchmarks", "compatibility", "fuzzing", "glossary"}
    unlinked = [
        f"{_name(path)}: {use}"
        for path in PAGES
        if path.stem not in without
        if (use := first_use(path.read_text(), word)) and not use.endswith(f"glossary.md#{word})")
    ]
    assert unlinked == []


def test_commands_and_options_in_the_text_exist() -> None:
    known = {name: _options(name) for name in main.list_commands(None)}  # type: ignore[arg-type]
    wrong = [
        f"{_name(path)}: {code}"
        for path in PAGES
        for code in inline_code(path.read_text())
        if not _exists(code.replace("\\|", " ").split(), known)
    ]
    assert wrong == []


def _exists(words: list[str], known: dict[str, set[str]]) -> bool:
    """Return whether a piece of code in the text is no command line, or one that exists."""
    if words[0] == "modelexport" and len(words) > 1 and words[1].islower():
        options = {word for word in words if word.startswith("--")}
        return words[1] in known and options <= known[words[1]]
    name = words[0].partition("=")[0]
    return not name.startswith("--") or any(name in options for options in known.values())


def _options(name: str) -> set[str]:
    command = main.get_command(None, name)  # type: ignore[arg-type]
    options = (option for item in command.params for option in (*item.opts, *item.secondary_opts))
    return {*options, "--help"}


@pytest.mark.parametrize(
    ("code", "exists"),
    [
        ("modelexport analyze --filter-tag", True),
        ("modelexport analyze --no-such-option", False),
        ("modelexport no-such-command", False),
        ("--scrub", True),
        ("--no-such-option=1", False),
        ("something else", True),
    ],
)
def test_a_command_that_does_not_exist_is_seen(code: str, exists: bool) -> None:
    known = {name: _options(name) for name in main.list_commands(None)}  # type: ignore[arg-type]
    assert _exists(code.split(), known) == exists


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```sh\nmodelexport analyze absent.onnx\n```", "exits with 2"),
        ("```sh\nfalse\n```", "exits with 1"),
        ("```sh\ntrue  # exits with 1\n```", "exits with 0"),
        ("```sh\necho one\n```\n\n```text\ntwo\n```", "no such lines"),
        ("```sh\necho one; echo two\n```\n\n```text\ntwo\none\n```", "no such lines"),
        ("```sh\necho one 1.5 2\n```\n\n```text\none 1.6 3\n```", "no such lines"),
        ("```text\none\n```", "without a command"),
        ("```python\nassert False\n```", "AssertionError"),
        ("```python\nx = 1\n```\n\n```python\ny\n```", "NameError"),
        ("```json\n{\n```", "JSONDecodeError"),
        ("```\nmodelexport demo\n```", "of the kind ''"),
        ("```bash\ntrue\n```", "of the kind 'bash'"),
        ("Something else:\n```python file=models.py\n```", "does not say that it is models.py"),
        ("```sh\nmake no-such-target\n```", "no-such-target"),
        ("```sh\nmodelexport export google/absent m.onnx --no-such-option\n```", "No such option"),
        ("```sh\npip install ./absent\n```", "absent"),
    ],
)
def test_a_wrong_page_is_refused(page: str, complaint: str, tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "Makefile", tmp_path / "Makefile")
    with pytest.raises(UnfitError, match=complaint):
        Reader(tmp_path, ELSEWHERE).follow(page)


RIGHT = """
Save this as `numbers.txt`:

```json file=numbers.txt
[1, 2]
```

```python
from pathlib import Path
print("numbers", Path("numbers.txt").read_text().strip(), 3.25)
print("more")
print("end")
```

```text
numbers [1, 2] 3.26
...
end
```

1. In a list:

   ```sh
   modelexport analyze \\
       absent.onnx  # exits with 2
   echo "it's | 'done'" | wc -l
   ```

   ```text
   1
   ```
"""


def test_a_page_that_is_right_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Reader(tmp_path, ELSEWHERE).follow(RIGHT)


def test_links_and_code_words_are_read() -> None:
    text = "# One (two)\n[a](b.md#c) `[no](x)` [w](https://example.org) `--flag x`\n"
    page = f"{text}```sh\n[no](y) `z`\n```\n"
    assert links(page) == ["b.md#c"]
    assert first_use("`a` and [the a](b.md#a), a", "a") == "[the a](b.md#a)"
    assert first_use("An A, and [a](b.md)", "a") == "A"
    assert first_use("`a`", "a") is None
    assert inline_code("`--flag x` and `y`\n```\n`z`\n```\n") == ["--flag x", "y"]
    assert anchors(page) == {"one-two"}
