"""Outputs that cannot be written, or are unusual: full disks, folders, links, strange names."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import modelexport
from modelexport.cli.main import main
from modelexport.errors import FileError, ModelExportError
from modelexport.onnx_file import atomic_write

pytestmark = [pytest.mark.must, pytest.mark.integration]

MODEL = """
import torch
from torch import nn

def make():
    return nn.Linear(600, 600), (torch.ones(1, 600),)
"""


def export(target: Path, width: int = 4, **options: object) -> None:
    modelexport.export_model(
        nn.Linear(width, width), torch.ones(1, width), target, strategy="htp", **options
    )


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system, where this process may do so."""
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
    )
    if mount.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def quota(size: int) -> Iterator[None]:
    """Limit the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("external", [False, True], ids=["inside", "outside"])
def test_a_full_disk(external: bool, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=1m") as folder:
        export(folder / "m.onnx")
        before = content(folder)
        with pytest.raises(FileError, match="No space left"):
            export(folder / "m.onnx", 600, external_data=external)
        assert content(folder) == before
        (tmp_path / "model.py").write_text(MODEL)
        arguments = [
            "export",
            f"{tmp_path / 'model.py'}:make",
            str(folder / "m.onnx"),
            "--strategy",
            "htp",
        ]
        shown = CliRunner().invoke(main, arguments)
        assert shown.exit_code == 2
        assert "No space left" in shown.stderr
        assert content(folder) == before


@pytest.mark.parametrize("external", [False, True], ids=["inside", "outside"])
def test_a_quota(external: bool, tmp_path: Path) -> None:
    export(tmp_path / "m.onnx")
    before = content(tmp_path)
    with quota(1 << 20), pytest.raises(FileError, match="File too large"):
        export(tmp_path / "m.onnx", 600, external_data=external)
    assert content(tmp_path) == before


def test_a_full_disk_for_what_comes_after_an_export(tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    export(source, 600)
    modelexport.export_graphml(source)
    with mounted(tmp_path / "small", "size=1m") as folder:
        writers = [
            lambda: modelexport.strip(source, folder / "out.onnx"),
            lambda: modelexport.extract(source, "", folder / "out.onnx"),
            lambda: modelexport.export_graphml(source, folder / "out.graphml"),
            lambda: modelexport.import_onnx(
                tmp_path / "m_hierarchical_graph.graphml", folder / "out.onnx"
            ),
        ]
        for writer in writers:
            with pytest.raises(FileError, match="No space left"):
                writer()
            assert content(folder) == {}


def test_a_read_only_file_system(tmp_path: Path) -> None:
    with mounted(tmp_path / "fixed", "ro") as folder:
        with pytest.raises(FileError, match="cannot write to"):
            export(folder / "m.onnx")
        assert content(folder) == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    export(tmp_path / "m.onnx")
    before = content(tmp_path)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(FileError, match="cannot write to"):
            export(tmp_path / "m.onnx", 5)
    finally:
        tmp_path.chmod(0o755)
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["m.onnx", "m_hierarchy.json", "m.onnx.data"])
def test_a_folder_with_the_name_of_an_output(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "inside").write_text("kept")
    with pytest.raises(ModelExportError, match="is a folder"):
        export(tmp_path / "m.onnx", 40, external_data=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "inside").read_text() == "kept"


def test_when_one_of_the_files_cannot_be_replaced_none_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path / "m.onnx", 40, external_data=True)
    before = content(tmp_path)
    replace = os.replace

    def refusing(source: Path, target: Path) -> None:
        if Path(target).name == "m.onnx":
            raise PermissionError(1, "Operation not permitted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refusing)
    with pytest.raises(FileError, match="Operation not permitted"):
        export(tmp_path / "m.onnx", 60, external_data=True)
    monkeypatch.undo()
    assert content(tmp_path) == before


def test_a_link_is_replaced_and_what_it_led_to_stays(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    export(other / "old.onnx")
    before = content(other)
    (tmp_path / "m.onnx").symlink_to(other / "old.onnx")
    (tmp_path / "m_hierarchy.json").symlink_to(tmp_path / "nowhere")
    export(tmp_path / "m.onnx", 6)
    assert content(other) == before
    assert not (tmp_path / "m.onnx").is_symlink()
    assert modelexport.validate(tmp_path / "m.onnx", check_consistency=True).valid
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    export(tmp_path / "link" / "m.onnx")
    assert sorted(content(tmp_path / "real")) == ["m.onnx", "m_hierarchy.json"]


@pytest.mark.parametrize(
    "stem", ["with some spaces", "größe 模型 🧩", "-v", "a'b\"c", "%2F", "new\nline"]
)
def test_odd_names(stem: str, tmp_path: Path) -> None:
    folder = tmp_path / stem
    folder.mkdir()
    target = folder / f"{stem}.onnx"
    export(target, 40, external_data=True)
    assert sorted(content(folder)) == sorted(
        [target.name, f"{target.name}.data", f"{stem}_hierarchy.json"]
    )
    assert modelexport.validate(target, check_consistency=True).valid
    modelexport.extract(target, "", folder / "part.onnx")
    assert modelexport.compare(target, folder / "part.onnx").same_topology
    shown = CliRunner().invoke(main, ["analyze", "--", str(target)])
    assert shown.exit_code == 0, shown.output


def test_a_temporary_folder_elsewhere_is_left_empty(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with mounted(tmp_path / "tmp", "size=20m") as temporary:
        export(tmp_path / "out" / "m.onnx", 40, external_data=True, temp_dir=temporary)
        assert content(temporary) == {}
    assert sorted(content(tmp_path / "out")) == ["m.onnx", "m.onnx.data", "m_hierarchy.json"]


def left_behind(folder: Path, number: int) -> Path:
    """Create the work folder of a killed run, with one file in it."""
    left = folder / f"{atomic_write.PREFIX}{number:012x}"
    left.mkdir()
    (left / "0").write_bytes(b"the new one")
    return left


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left_behind(tmp_path, 1)
    atomic_write.write_moves(left_behind(tmp_path, 2), ["other.bin"], ["old.bin"])
    (tmp_path / "old.bin").write_bytes(b"old")
    export(tmp_path / "m.onnx")
    assert sorted(content(tmp_path)) == ["m.onnx", "m_hierarchy.json", "other.bin"]
    assert (tmp_path / "other.bin").read_bytes() == b"the new one"


def test_what_others_planted_is_not_obeyed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    notes = folder / f"{atomic_write.PREFIX}notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("kept")
    (folder / "weights").write_text("kept")
    # as it would come in an archive
    planted = '{"folder": [1, 2], "names": ["conftest.py"], "removed": ["weights"]}'
    (left_behind(folder, 1) / "moves.json").write_text(planted)
    atomic_write.write_moves(left_behind(folder, 2), ["../climbed"], ["../../weights"])
    os.mkfifo(left_behind(folder, 3) / "moves.json")
    (left_behind(folder, 4) / "moves.json").write_text("[" * 100_000)
    tricky = left_behind(folder, 5)
    (tricky / "0").unlink()
    (tricky / "0").mkdir()
    atomic_write.write_moves(tricky, ["m.onnx"], [])
    (left_behind(folder, 6) / "moves.json").symlink_to(folder / "weights")
    export(folder / "m.onnx")
    assert sorted(path.name for path in folder.iterdir()) == [
        notes.name,
        "m.onnx",
        "m_hierarchy.json",
        "weights",
    ]
    assert (notes / "thesis.txt").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


def test_interrupted_twice_while_files_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path / "m.onnx", 40, external_data=True)
    replace, left = os.replace, [2]

    def interrupting(source: Path, target: Path) -> None:
        if Path(target).name == "m.onnx" and left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupting)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "m.onnx", 60, external_data=True)
    assert sorted(content(tmp_path)) == ["m.onnx", "m.onnx.data", "m_hierarchy.json"]
    assert modelexport.validate(tmp_path / "m.onnx", check_consistency=True).valid
    assert modelexport.load(tmp_path / "m.onnx").sidecar.export.inputs[0].shape == (1, 60)
