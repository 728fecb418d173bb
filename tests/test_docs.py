"""What the README and the pages of docs/ say to type is typed here, and what they show is what comes of it."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from filelock import FileLock

from exports import Shared
from modelexport.attribution import strategies
from modelexport.cli.main import main
from pages import Reader, UnfitError, anchors, inline_code, links

ROOT = Path(__file__).parents[1]
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")})
CLONE = (
    "src",
    "docs",
    "examples",
    "tests",
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


def _the_demo_that_was_made(reader: Reader, line: str) -> str:
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


def _say_what_it_takes(reader: Reader, line: str) -> str:
    words = [word for word in shlex.split(line) if word.startswith("--")]
    output = CliRunner().invoke(main, ["batch", "--help"]).output
    assert all(word in output for word in words), line
    return output


def _not_found_offline(reader: Reader, line: str) -> str:
    code, output = reader.shell(line)
    assert code == 2, output
    assert "cannot load" in output
    return output


ELSEWHERE: dict[str, Callable[[Reader, str], str]] = {
    "make demo": _the_demo_that_was_made,  # sets up .venv from an index; the demo itself is run
    "make ": _print_recipe,  # sets up .venv from an index, and runs for minutes
    "modelexport batch jobs.toml --resume --executor ray": _say_what_it_takes,  # starts a cluster; tests/batch does
    "pip install --no-deps --no-build-isolation ./examples/": _install_beside,  # installed into a folder of the page
    "pip install": _install_nothing,  # reads an index; what is named must be there and can be built
    "modelexport export google/": _not_found_offline,  # reads the hub; the options are understood
}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with what a fresh clone has after `make demo`; the demo itself is run once for all."""
    made = Shared.folder / "demo"
    with FileLock(f"{made}.lock"):
        if not made.exists():
            fresh = made.with_name("demo.part")
            fresh.mkdir()
            monkeypatch.chdir(fresh)
            result = CliRunner().invoke(main, ["demo", "demo-output"])
            assert result.exit_code == 0, result.output
            (fresh / "demo-output" / "stdout.txt").write_text(result.stdout)
            fresh.rename(made)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for name in CLONE:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
            shutil.copytree(source, tmp_path / name, ignore=ignored)
        else:
            shutil.copyfile(source, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as in a Python that is started there
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(strategies, "_REGISTRY", dict(strategies._REGISTRY))
    _forget_modules(Shared.folder.parent)  # of other tests, that may have the same names
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


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path.read_text()):
        name, _, place = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not place or place in anchors(target.read_text()), link


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_commands_and_options_in_the_text_exist(path: Path) -> None:
    known = {name: _options(name) for name in main.list_commands(None)}  # type: ignore[arg-type]
    every = set().union(*known.values()) | {"--help"}
    for code in inline_code(path.read_text()):
        words = code.replace("\\|", " ").split()
        if words[0] == "modelexport" and len(words) > 1 and words[1].islower():
            assert words[1] in known, code
            assert {word for word in words if word.startswith("--")} <= known[words[1]] | {
                "--help"
            }, code
        elif words[0].startswith("--"):
            assert words[0].partition("=")[0] in every, code


def _options(name: str) -> set[str]:
    command = main.get_command(None, name)  # type: ignore[arg-type]
    return {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }


@pytest.mark.parametrize(
    ("page", "check_onnx"),
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
def test_a_page_that_is_wrong_is_found_out(page: str, check_onnx: str, tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "Makefile", tmp_path / "Makefile")
    with pytest.raises(UnfitError, match=check_onnx):
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


def test_links_and_code_words_are_found() -> None:
    page = "# One (two)\n[a](b.md#c) `[no](x)` [w](https://example.org) `--flag x`\n```sh\n[no](y) `z`\n```\n"
    assert links(page) == ["b.md#c"]
    assert inline_code("`--flag x` and `y`\n```\n`z`\n```\n") == ["--flag x", "y"]
    assert anchors(page) == {"one-two"}
