"""Find the way in the page: search, links, the history and the keyboard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import modelexport
from viewing.browser import PANE, Browser, missing
from viewing.handmade import node, write

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


def test_search_with_the_keyboard(browser: Browser, bert: Path) -> None:
    browser.open(bert)
    browser.press("/")
    browser.type("softmax")
    browser.screenshot("search")
    first = browser.text("#results [role=option]")
    assert first.startswith("node")
    assert "Softmax" in first
    browser.press("ArrowDown", "ArrowUp", "Enter")
    assert browser.text("h2") == "Softmax"
    assert "Softmax" in browser.titles()
    assert browser.evaluate("document.activeElement.className") == "picture"
    for query, kind in (("LayerNorm", "module"), ("word_embeddings.weight", "initializer")):
        browser.press("/")
        browser.evaluate("document.activeElement.value = ''")
        browser.type(query)
        assert browser.text("#results [role=option] .kind") == kind
    browser.evaluate("document.activeElement.value = ''")
    browser.type("1x1x")
    assert browser.text("#results [role=option] .kind") == "value"
    browser.press("Escape")
    assert browser.evaluate("document.querySelector('#results').hidden")
    assert browser.problems() == []


def test_deep_links_back_and_forward(browser: Browser, bert: Path) -> None:
    browser.open(bert, "#open=m:encoder.layer.1.attention.self&select=m:encoder.layer.1.attention")
    assert browser.text("h2") == "encoder.layer.1.attention"
    assert {"query", "key", "value"} <= set(browser.titles())
    assert browser.text(".crumbs").endswith("layer›1›attention")
    first = set(browser.titles())
    browser.click("query")
    link = browser.evaluate("location.hash")
    assert "query" in link
    opened = set(browser.titles())
    browser.back()
    assert set(browser.titles()) == first
    browser.open(bert, link)
    assert set(browser.titles()) == opened
    browser.open(bert, "#open=m:nothing,%ZZ&select=v:nothing")
    assert browser.problems() == []


def test_back_to_the_first_picture(browser: Browser, bert: Path) -> None:
    browser.open(bert)
    first = set(browser.titles())
    browser.click("encoder")
    closed = set(browser.titles())
    assert closed < first
    link = browser.evaluate("location.hash")
    browser.back()
    assert set(browser.titles()) == first
    browser.open(bert, link)  # layers are open inside the encoder, which is closed
    assert set(browser.titles()) == closed


def test_links_to_modules_of_any_name(browser: Browser, tmp_path: Path) -> None:
    names = [
        "a",
        "a@1",
        "a#b",
        "p%41",
        "p&q=1",
        "c,d",
        "m:x",
        "new\nline",
        "\u202eabc",
        "日本",
        "x y",
    ]
    nodes, last = [], "x"
    for number, name in enumerate(names):
        for op, path in enumerate((f"{name}.inner", name)):
            nodes.append(node(path, "Relu", [last], [f"v{number}_{op}"]))
            last = f"v{number}_{op}"
    nodes.append(node("", "Identity", [last], ["y"]))
    browser.open(modelexport.view(write(tmp_path / "names.onnx", nodes)).path)
    for name in names:
        assert browser.evaluate(
            f"""(() => {{ const p = {PANE};
              const module = p.model.moduleIndex.get({json.dumps(name)});
              p.selectModule(module);
              p.picture.setOpen(p.selection.box, true);
              const link = p.link();
              p.restore("#open=");
              p.restore(link);
              return p.selectedModule() === module && p.picture.open.has(p.selection.box)
                && p.link() === link; }})()"""
        ), name
        assert browser.evaluate("location.hash").startswith("#open=")
    assert browser.problems() == []


def test_a_value_shows_its_way(browser: Browser, bert: Path) -> None:
    browser.open(bert, "#open=m:encoder.layer.0.attention.self")
    value = browser.evaluate(
        f"""(() => {{ const p = {PANE}; const m = p.model;
          const node = m.raw.nodes.op.findIndex(op => m.texts[op] === "Softmax");
          p.select({{ kind: "value", value: m.outputs.of(node)[0] }}); return node; }})()"""
    )
    browser.screenshot("value-selected")
    assert value >= 0
    lit = set(browser.evaluate(f"[...{PANE}.picture.emphasis.lit]"))
    boxes = browser.boxes()
    dimmed = {box["title"] for key, box in boxes.items() if key not in lit}
    assert "value" in dimmed  # what the attention weights multiply is not on their way
    assert {"query", "key", "encoder"} <= {boxes[key]["title"] for key in lit if key in boxes}
    assert "producer" in browser.text(".details")


def test_keyboard_only(browser: Browser, bert: Path) -> None:
    browser.open(bert, "#open=")
    browser.evaluate(f"{PANE}.picture.canvas.focus()")
    titles = []
    for _ in range(4):
        browser.press("ArrowDown")
        titles.append(browser.text("footer"))
    assert len(set(titles)) > 2
    assert all("selected: " in title for title in titles)
    browser.evaluate(f"{PANE}.selectModule({PANE}.model.moduleIndex.get('encoder'))")
    browser.evaluate(f"{PANE}.picture.canvas.focus()")
    before = browser.find("encoder")["open"]
    browser.press("Enter")
    assert browser.find("encoder")["open"] != before
    browser.press("+", "-", "0", "Escape")
    browser.evaluate("document.querySelector('[role=tree]').focus()")
    browser.press("Home", "ArrowDown", "ArrowDown", "Enter")
    assert browser.text("[role=treeitem][aria-selected=true] .name")
    browser.press("ArrowLeft", "ArrowRight", "End", "ArrowUp", "Enter")
    browser.screenshot("keyboard")
    roles = browser.evaluate("[...document.querySelectorAll('[role]')].map(e => e.role)")
    assert {"tree", "treeitem", "application", "combobox", "status"} <= set(roles)
    browser.press("?")
    assert browser.evaluate("document.querySelector('dialog').open")
    browser.press("Escape")
    assert browser.problems() == []


def test_keys_of_the_browser_and_its_history(browser: Browser, bert: Path) -> None:
    browser.open(bert, "#open=")
    browser.evaluate(f"{PANE}.picture.canvas.focus()")
    view = browser.evaluate(f"{PANE}.picture.view")
    browser.press("Control+=", "Control+-", "Control+0")
    assert browser.evaluate(f"{PANE}.picture.view") == view
    entries = browser.evaluate("history.length")
    browser.press(*["ArrowDown"] * 5)
    browser.evaluate(
        """new Promise(done => { const wait = () =>
             location.hash.includes("select") ? done(1) : setTimeout(wait, 20); wait(); })"""
    )
    assert browser.evaluate("history.length") <= entries + 2
    assert browser.problems() == []
