"""The page in a real browser: what it shows, and what people do with it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import modelexport
from exports import export
from retag.tools import apply
from viewing.browser import PANE, VIEWER, Browser, missing
from viewing.handmade import node, write
from viewing.test_page_data import Hostile, export_hostile

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


def test_opens_without_messages_and_requests(browser: Browser, bert: Path) -> None:
    browser.open(bert)
    browser.screenshot("bert")
    assert browser.problems() == []
    titles = browser.titles()
    assert {"input_ids", "embeddings", "encoder", "pooler"} <= set(titles)
    assert "word_embeddings" in titles
    assert "nodes" in browser.text("footer")
    assert browser.text("h2") == "model.onnx"


def test_a_click_opens_and_closes_in_place(browser: Browser, bert: Path) -> None:
    browser.open(bert, "#open=m:encoder")
    before = set(browser.titles())
    at = browser.click("layer.0")
    opened = browser.find("layer.0")
    browser.screenshot("bert-layer-open")
    assert opened["open"]
    assert opened["x"] == pytest.approx(at["x"], abs=1)
    assert opened["y"] == pytest.approx(at["y"], abs=1)
    assert {"attention", "intermediate", "output"} <= set(browser.titles())
    assert browser.text("h2") == "encoder.layer.0"
    assert "BertLayer" in browser.text(".details")
    browser.click("layer.0")
    assert set(browser.titles()) == before
    assert browser.problems() == []


def test_only_changes_move(browser: Browser, bert: Path) -> None:
    browser.open(bert, motion=True)
    moving = f"{PANE}.picture.previous !== null"
    assert not browser.evaluate(moving)
    at = browser.click("encoder")
    assert browser.evaluate(f"new Promise(done => setTimeout(() => done({moving}), 1000))") is False
    assert browser.find("encoder")["y"] == pytest.approx(at["y"], abs=1)


def test_initializers_and_single_operators(browser: Browser, bert: Path) -> None:
    browser.open(bert, "#open=m:embeddings")
    norm = browser.find("LayerNorm")
    assert norm["kind"] == "module"
    assert norm["subtitle"] == "LayerNormalization"
    assert [chip.split()[0] for chip in norm["chips"]] == ["weight", "bias"]
    words = browser.find("word_embeddings")
    assert words["chips"][0].startswith("weight ")
    assert "×" in words["chips"][0]


def test_repeated_modules_are_one_stack(browser: Browser, tower: Path) -> None:
    browser.open(tower, "#open=m:0")
    browser.screenshot("stack")
    stack = browser.find("0 … 11 × 12")
    assert stack["kind"] == "stack"
    browser.evaluate(f"{PANE}.selectModule({PANE}.model.moduleIndex.get('0.5'))")
    browser.screenshot("stack-member-open")
    titles = browser.titles()
    assert {"0 … 4 × 5", "5", "6 … 11 × 6"} <= set(titles)
    assert browser.find("5")["open"]
    browser.click("6 … 11 × 6")
    assert {"6", "7 … 11 × 5"} <= set(browser.titles())
    assert "siblings with the same structure" in browser.text(".details")
    assert "0.11" in browser.text(".details")
    browser.open(tower, "#open=m:0")
    browser.button("summary")
    browser.button("text=repeated modules one by one")
    assert {str(number) for number in range(12)} <= set(browser.titles())


def test_a_stack_is_drawn_one_by_one_and_again_as_one(browser: Browser, tower: Path) -> None:
    browser.open(tower, "#open=m:0")
    browser.evaluate(
        f"""(() => {{ const p = {PANE};
          const stack = p.picture.drawing.drawn.find(d => d.item.kind === "stack").item;
          p.select({{ kind: "stack", boxes: stack.boxes }}, {{ reveal: false }}); }})()"""
    )
    browser.button("text=draw them one by one")
    assert {str(number) for number in range(12)} <= set(browser.titles())
    browser.button("text=draw repeated modules as one")
    assert "0 … 11 × 12" in browser.titles()


def test_an_edge_of_many_values(browser: Browser, tmp_path: Path) -> None:
    count = 50
    nodes = [node("a", "Relu", ["x"], [f"v{i}"]) for i in range(count)]
    nodes.append(node("b", "Sum", [f"v{i}" for i in range(count)], ["s"]))
    nodes.append(node("b", "Relu", ["s"], ["y"]))
    browser.open(modelexport.view(write(tmp_path / "m.onnx", nodes)).path, "#open=")
    above, below = browser.find("a"), browser.find("b")
    x = below["x"] + below["width"] / 2
    browser.click_at(x, (above["y"] + above["height"] + below["y"]) / 2)
    browser.screenshot("edge-of-many-values")
    assert browser.text("h2") == "v0"
    assert "50 values on this edge" in browser.text(".details")
    assert "v49" not in browser.text(".details")
    browser.button("text=20 more")
    browser.button("text=v49")
    assert browser.text("h2") == "v49"
    assert "selected: value v49 float[2]" in browser.text("footer")
    assert not browser.find("a")["open"]
    assert browser.problems() == []


def test_a_click_inside_an_open_box_selects_it(browser: Browser, bert: Path) -> None:
    browser.open(bert, "#open=m:embeddings")
    box = browser.find("embeddings")
    browser.click_at(box["x"] + 6, box["y"] + box["height"] - 6)
    assert browser.text("h2") == "embeddings"
    assert browser.find("embeddings")["open"]
    browser.click("embeddings")
    assert not browser.find("embeddings")["open"]


def test_modules_without_nodes_are_dashed_where_wanted(browser: Browser, tower: Path) -> None:
    browser.open(tower)
    assert not any(box["kind"] == "empty" for box in browser.boxes().values())
    browser.button("summary")
    browser.button("text=modules without nodes")
    browser.screenshot("modules-without-nodes")
    empty = [box for box in browser.boxes().values() if box["kind"] == "empty"]
    assert [(box["title"], box["subtitle"]) for box in empty] == [("1", "Dropout, absorbed")]


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    page = modelexport.view(export_hostile(tmp_path)).path
    browser.open(page)
    browser.screenshot("hostile-names")
    titles = browser.titles()
    assert set(Hostile.NAMES[:2]) <= set(titles)
    for name in Hostile.NAMES:
        browser.evaluate(f"{PANE}.selectModule({PANE}.model.moduleIndex.get({json.dumps(name)}))")
    browser.press("/")
    browser.type("<img")
    assert "<img src=x onerror=alert(1)>" in browser.text("#results")
    assert browser.evaluate("document.querySelectorAll('img, iframe').length") == 0
    assert "\u202e" not in browser.evaluate("document.body.innerText")
    assert browser.problems() == []


def test_two_files_side_by_side(browser: Browser, tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    changed, other = tmp_path / "changed.onnx", tmp_path / "fused.onnx"
    assert apply("ort-extended", path, changed, {})
    modelexport.retag(path, changed, other)
    page = modelexport.view(path, tmp_path / "both.html", other=other).path
    browser.open(page, "#open=m:encoder.layer.0")
    browser.screenshot("side-by-side")
    assert browser.evaluate("modelexportPage.inspect().panes.length") == 2
    for pane in (0, 1):
        assert "attention" in browser.titles(pane)
    browser.click("attention", pane=1)
    assert browser.find("attention", pane=0)["open"]
    marks = browser.evaluate(
        """modelexportPage.inspect().panes.map(p =>
             p.picture.drawing.drawn.map(d => p.picture.emphasis.mark(d.item)).filter(Boolean))"""
    )
    assert "removed" in marks[0] or "changed" in marks[0]
    assert "added" in marks[1] or "changed" in marks[1]
    assert browser.problems() == []


def test_in_a_notebook(browser: Browser, tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    shown = modelexport.view(path)._repr_html_()
    notebook = tmp_path / "notebook.html"
    notebook.write_text(
        f'<!doctype html><meta charset="utf-8"><p id="cell" data-ready="1">cell</p>'
        f'<div id="out" style="display: none">{shown}</div>'
    )
    browser.open(notebook, ready="#cell")
    browser.evaluate_in_frame("1")  # drawn before it is shown
    browser.evaluate("document.querySelector('#out').style.display = ''")
    middle = """new Promise(done => { const look = () => {
      const { view, drawing, canvas } = modelexportPage.inspect().panes[0].picture;
      const left = (drawing.width / 2 - view.x) * view.zoom;
      if (canvas.clientWidth && Math.abs(left - canvas.clientWidth / 2) < 2) done(true);
      else setTimeout(look, 20); }; look(); })"""
    assert browser.evaluate_in_frame(middle)
    where = """(() => { const p = modelexportPage.inspect().panes[0].picture; p.fit(true);
      const d = p.drawing.drawn.find(d => d.item.title === "encoder");
      const at = p.canvas.getBoundingClientRect();
      return { open: d.open, x: at.x + (d.x + 30 - p.view.x) * p.view.zoom,
               y: at.y + (d.y + 12 - p.view.y) * p.view.zoom }; })()"""
    before = browser.evaluate_in_frame(where)
    frame = browser.evaluate("document.querySelector('iframe').getBoundingClientRect().toJSON()")
    browser.click_at(frame["x"] + 1 + before["x"], frame["y"] + 1 + before["y"])
    browser.screenshot("notebook")
    assert browser.evaluate_in_frame(where)["open"] != before["open"]
    assert browser.evaluate_in_frame("document.querySelector('h2').textContent") == "encoder"
    assert "encoder" in browser.evaluate_in_frame("location.hash")
    browser.evaluate_in_frame("document.querySelector('.copy').click()")
    browser.evaluate_in_frame("new Promise(done => setTimeout(done, 100))")
    assert [p for p in browser.problems() if not p.startswith("request: about:")] == []


def test_the_bundle_is_built_from_its_source(tmp_path: Path) -> None:
    subprocess.run(["node", str(VIEWER / "build.mjs"), str(tmp_path)], check=True)
    bundle = Path(modelexport.__file__).parent / "viewing" / "bundle"
    assert {path.name for path in bundle.iterdir()} == {path.name for path in tmp_path.iterdir()}
    for built in tmp_path.iterdir():
        assert built.read_bytes() == (bundle / built.name).read_bytes(), "run make viewer"


def test_types_of_the_source() -> None:
    compiler = VIEWER / "node_modules" / "typescript" / "bin" / "tsc"
    run = subprocess.run(
        ["node", str(compiler), "--noEmit", "-p", str(VIEWER)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout
