"""Files beside an output: nothing that is read is overwritten, and data files are copied along."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from modelexport.errors import ArgumentError, FileError, FormatError
from modelexport.onnx_file.atomic_write import Transaction
from modelexport.onnx_file.model_file import (
    external_files,
    is_file,
    open_mapped,
    parse_model,
    require_data_file,
)


def check_no_overwrite(source: Path, data_files: Iterable[str], *targets: Path) -> None:
    """Refuse to overwrite a model that is read, or one of its data files, also through links.

    Raises:
        ArgumentError: One of the targets is a file of the model.
    """
    own = [source, *(source.parent / name for name in data_files)]
    for target in targets:
        if any(_is_same(target, path) for path in own):
            raise ArgumentError(
                f"output {target.name} would overwrite the input", hint="choose another output"
            )


def copy_data_files(
    stage: Transaction,
    source: Path,
    names: Sequence[str],
    target: Path,
    keep: Collection[Path] = (),
) -> None:
    """Add the data files of a model to the files to write, if the target is in another folder.

    Args:
        stage: The files to write.
        source: The model.
        names: The names of its data files.
        target: The model file that is written with them.
        keep: Further files that are read, which must stay as they are.

    Raises:
        ArgumentError: The target has the name of a data file.
        FileError: A data file is missing, or one of another model has its name.
    """
    if target in (target.parent / name for name in names):
        raise ArgumentError(
            f"output {target.name} has the name of a data file of {source.name}",
            hint="choose another output",
        )
    files = [require_data_file(source, name) for name in names]
    if source.parent.resolve() != target.parent.resolve():
        for number, (name, file) in enumerate(zip(names, files, strict=True)):
            _check_free(file, target.parent / name, target, keep)
            stage.publish(Path(shutil.copyfile(file, stage.work / f"data-{number}")), name)


def _check_free(file: Path, copy: Path, target: Path, keep: Collection[Path]) -> None:
    """Refuse to replace a data file, unless it belongs to the old target or has the same data."""
    if not is_file(copy):
        return
    is_read = any(_is_same(copy, path) for path in keep)
    if not is_read and copy.name in _data_files_of(target):
        return
    if not filecmp.cmp(file, copy, shallow=False):
        raise FileError(
            f"{copy} already exists, with other data",
            hint="choose an output in another folder, or remove the file",
        )


def _data_files_of(target: Path) -> set[str]:
    """Return the names of the data files of a model that is replaced, if there is one."""
    own = {f"{target.name}.data"}
    with suppress(FileError, FormatError), open_mapped(target) as data:
        own.update(external_files(parse_model(data, target)))
    return own


def _is_same(first: Path, second: Path) -> bool:
    """Return whether two paths are one file, also through links of either kind."""
    try:
        return first.resolve() == second.resolve() or first.samefile(second)
    except (OSError, ValueError):
        return False
