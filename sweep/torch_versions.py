"""`python -m sweep.torch_versions RESULT TORCH`: add a run of `make compat` to the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
_TITLES = "| torch | passed | failed | skipped |\n|---|---|---|---|"


def read_table(page: Path) -> str:
    """Return the table of the page, with a row for each version; one without rows if none is."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    found = re.search(re.escape(_TITLES) + r"(\n\|.*)*", text)
    return _TITLES if found is None else found.group()


def add_result(page: Path, result: Path, version: str) -> str:
    """Add the counts of a JUnit file to the table, in place of an earlier row of the version.

    Returns:
        The counts in a line.
    """
    suite = ElementTree.parse(result).getroot().find("testsuite")
    if suite is None:
        raise ValueError(f"{result} has no test suite")
    names = ("tests", "failures", "errors", "skipped")
    total, failures, errors, skipped = (int(suite.attrib[name]) for name in names)
    failed = failures + errors
    passed = total - failed - skipped
    table = read_table(page)
    rows = {row.split("|")[1].strip(): row for row in table.splitlines()[2:]}
    rows[version] = f"| {version} | {passed} | {failed} | {skipped} |"
    by_version = sorted(rows, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    text = page.read_text(encoding="utf-8")
    if table not in text:
        raise ValueError(f"{page} has no table of versions of torch")
    new_table = "\n".join((_TITLES, *(rows[name] for name in by_version)))
    page.write_text(text.replace(table, new_table), encoding="utf-8")
    return f"torch {version}: {passed} passed, {failed} failed, {skipped} skipped"


if __name__ == "__main__":
    print(add_result(PAGE, Path(sys.argv[1]), sys.argv[2]))
