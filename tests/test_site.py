"""The documentation site: every page is in it, every link leads somewhere, and it works offline."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import modelexport
from exports import export, shared_folder
from test_docs import PAGES
from viewing import browser as browsers
from viewing.browser import Browser

ROOT = Path(__file__).parents[1]
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""The elements that make a browser load something, and the attribute that says what."""

pytestmark = pytest.mark.integration


class Page(HTMLParser):
    """The ids of a page, what it links to, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids |= {value for name in ("id", "name") if (value := values.get(name))}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        if tag in LOADED and (address := values.get(LOADED[tag])):
            self.loaded.append(address)


@pytest.fixture(scope="module")
def site() -> Path:
    pytest.importorskip("sphinx", reason="no Sphinx (the extra docs): the site is not built")

    def build(folder: Path) -> None:
        path, _, _ = export("bert", "fx", folder)
        page = modelexport.view(path, folder / "model.html").path
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT / 'docs')!r}); import build_site; "
            "from pathlib import Path; build_site.build(Path(sys.argv[1]), Path(sys.argv[2]))"
        )
        command = [sys.executable, "-c", code, str(folder / "site"), str(page)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return shared_folder("site", build) / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_in_the_site(site: Path, pages: dict[Path, Page]) -> None:
    wanted = {path.relative_to(ROOT).with_suffix(".html") for path in PAGES}
    assert wanted <= {path.relative_to(site) for path in pages}
    assert (site / "index.html").read_bytes() == (site / "README.html").read_bytes()
    menu = {_target(site / "index.html", link)[0] for link in pages[site / "index.html"].links}
    assert {site / path for path in wanted} <= menu | {site / "README.html"}


def test_links_lead_somewhere(pages: dict[Path, Page]) -> None:
    broken = [
        f"{path.name}: {link}"
        for path, page in pages.items()
        for link in (*page.links, *page.loaded)
        if not urlsplit(link).scheme and not _leads_somewhere(path, link, pages)
    ]
    assert broken == []


def _leads_somewhere(path: Path, link: str, pages: dict[Path, Page]) -> bool:
    target, anchor = _target(path, link)
    if not target.exists():
        return False
    return not anchor or target not in pages or anchor in pages[target].ids


def _target(path: Path, link: str) -> tuple[Path, str]:
    parts = urlsplit(link)
    return (path.parent / unquote(parts.path)).resolve() if parts.path else path, parts.fragment


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    remote = {
        address
        for page in pages.values()
        for address in page.loaded
        if urlsplit(address).scheme not in ("", "data") or address.startswith("//")
    }
    assert remote == set()
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", style.read_text())


def test_no_page_discloses_the_machine(site: Path) -> None:
    for path in site.rglob("*.*"):
        if path.suffix in (".html", ".js"):
            assert str(ROOT) not in path.read_text(encoding="utf-8"), path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    reason = browsers.missing()
    if reason:
        pytest.skip(reason)
    with Browser() as opened:
        yield opened


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_a_guide_with_the_page_of_a_model(
    dark: bool, width: int, browser: Browser, site: Path
) -> None:
    browser.open(site / "docs/guides/look-at-your-model.html", dark=dark, width=width, ready="html")
    assert browser.evaluate_in_frame("modelexportPage.inspect().panes.length") == 1
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", background)[:3])) < 128) == dark
    browser.screenshot(f"site-{width}-{'dark' if dark else 'light'}")
    assert [each for each in browser.problems() if not _is_local(each)] == []


def test_search_works_without_a_server(browser: Browser, site: Path) -> None:
    browser.open(site / "search.html", "?q=absorbed", ready="html")
    found = browser.evaluate(
        """new Promise(done => { const look = () => {
             const links = [...document.querySelectorAll("#search-results li a")];
             if (links.length && document.querySelector(".search-summary").textContent
                 .includes("found")) done(links.map(link => link.textContent));
             else setTimeout(look, 50); }; look(); })"""
    )
    assert "Glossary > absorbed" in found[:2]
    assert [each for each in browser.problems() if not _is_local(each)] == []


def _is_local(problem: str) -> bool:
    return problem.startswith("request: file:")
