"""The page in a real browser: what it draws, and what people do with it."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import onnx
import pytest
import torch
from benchmarks.generated import write_graph
from onnx import helper
from torch import nn

import modelexport
from exports import export
from retag.tools import apply
from viewing.browser import VIEWER, Browser, missing
from viewing.handmade import node, write
from viewing.pages import FRAMES, PageModel, Picture, read_page
from viewing.test_page_data import Hostile, export_hostile

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
PANE = "modelexportPage.inspect().panes[0]"
ALL = "header button:text-is('all')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a model with repeated layers."""
    folder = tmp_path_factory.mktemp("bert")
    path, _, _ = export("bert", "fx", folder)
    return modelexport.view(path, folder / "bert.html").path


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tower")
    path = folder / "tower.onnx"
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(12)))
    model = nn.Sequential(layers, nn.Dropout(), nn.Linear(8, 3)).eval()
    modelexport.export_model(model, torch.rand(2, 8), path)
    return modelexport.view(path).path


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


def test_overlay_colours(browser: Browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Softmax(-1)).eval()
    path = tmp_path / "m.onnx"
    modelexport.export_model(model, torch.rand(2, 8), path)
    rows = [{"path": str(i), "own_ms": own} for i, own in enumerate((8.0, 1.0, 0.0))]
    overlay = tmp_path / "times.json"
    overlay.write_text(json.dumps({"kernel_ms": 9.0, "modules": rows}))
    page = modelexport.view(path, overlays=[overlay]).path
    browser.open(page, "#open=")
    browser.screenshot("overlay")
    assert browser.problems() == []  # reading pixels, below, adds a warning of its own
    hot, warm, cold = (browser.color_at(name) for name in ("0", "1", "2"))
    assert hot[2] < warm[2] < cold[2]  # less blue is more orange
    assert "latency" in browser.text(".legend")
    assert "9 ms" in browser.text(".legend")
    assert "top ten: latency" in browser.text(".details")
    assert browser.text(".details .links li").startswith("0")
    browser.choose("select[aria-label=scale]", "log")
    browser.choose("select[aria-label='over modules']", "max")
    assert "maximum" in browser.text(".legend")
    assert "8 ms" in browser.text(".legend")
    browser.choose("select[aria-label=colour]", "-1")
    assert browser.color_at("0") == browser.color_at("2")


def test_two_files_have_one_scale_of_colours(browser: Browser, tmp_path: Path) -> None:
    nodes = [node("a", "Relu", ["x"], ["v"]), node("b", "Relu", ["v"], ["y"])]
    path = write(tmp_path / "m.onnx", nodes)
    other = write(tmp_path / "other.onnx", [node("b", "Relu", ["x"], ["y"])])
    rows = [
        {"module": name, "own_bytes": size, "own_nodes": 1}
        for name, size in (("a", 15_600_000), ("b", 260_000))
    ]
    overlay = tmp_path / "sizes.json"
    overlay.write_text(json.dumps({"by_operator": {}, "modules": rows}))
    page = modelexport.view(path, tmp_path / "both.html", other=other, overlays=[overlay]).path
    browser.open(page)
    assert "15.9 MB" in browser.text(".legend")
    shares = browser.evaluate(
        """modelexportPage.inspect().panes.map(p =>
             p.picture.drawing.drawn.map(d => d.item.title === "b" ? p.overlay.heat(d.item) : null)
               .filter(Boolean))"""
    )
    assert shares[0] == shares[1]
    assert shares[0][0]["text"] == "260 KB"


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


def test_long_and_invisible_texts_are_drawn(browser: Browser, tmp_path: Path) -> None:
    nodes = [
        node("m" * 3000, "Relu", ["x"], ["v" * 5000], name="n" * 5000),
        node("m" * 3000, "Op" * 1000, ["v" * 5000], ["a"]),
        node("rtl\u202eabc\x01", "Relu", ["a"], ["b"]),
        node("日本" * 100, "Relu", ["b"], ["y"]),
    ]
    path = write(tmp_path / "names.onnx", nodes)
    model = onnx.load(path)
    dim = model.graph.input[0].type.tensor_type.shape.dim[0]
    dim.dim_param = "batch_size_and_" * 100
    onnx.save(model, path)
    browser.open(modelexport.view(path).path)
    browser.button(ALL)
    browser.screenshot("long-names")
    assert all(box["width"] < 1000 for box in browser.boxes().values())
    assert "rtl\\u202eabc\\u0001" in browser.titles()
    labels = browser.evaluate(f"{PANE}.picture.drawing.labels.map(l => l.text)")
    assert any(label.startswith("batch_size") for label in labels)
    assert all(len(label) < 50 for label in labels)
    browser.button("summary")
    browser.download("text=save as SVG", tmp_path / "saved.svg")
    ElementTree.parse(tmp_path / "saved.svg")
    assert browser.problems() == []


def test_save_as_svg_and_print(browser: Browser, bert: Path, tmp_path: Path) -> None:
    browser.open(bert)
    browser.button("summary")
    name = browser.download("text=save as SVG", tmp_path / "saved.svg")
    assert name == "model.svg"
    texts = [e.text for e in ElementTree.parse(tmp_path / "saved.svg").iter() if e.text]
    assert any("encoder" in text for text in texts)
    browser.pdf(tmp_path / "printed.pdf")
    assert (tmp_path / "printed.pdf").read_bytes().startswith(b"%PDF")
    assert browser.problems() == []


def test_dark_and_narrow(browser: Browser, bert: Path) -> None:
    browser.open(bert, dark=True, width=760, height=700)
    browser.screenshot("dark")
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(24, 29, 40)"
    width = browser.evaluate(f"{PANE}.picture.canvas.clientWidth")
    assert width == 760  # the tree and the details are below
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    printed = browser.evaluate("document.querySelector('.print rect').getAttribute('fill')")
    assert printed == "#fbfcfe"
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    browser.button("summary")
    browser.button("text=light or dark")
    assert browser.evaluate("document.documentElement.dataset.theme") == "light"
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


PICTURES = (
    *((name, "fx") for name in ("bert", "llama", "t5", "swin", "resnet", "sixty_levels")),
    *(("conditional_bodies", "fx"), ("swin", "htp"), ("block_three_times", "htp")),
    ("optimized", "fx"),
)


@pytest.mark.parametrize(("name", "strategy"), PICTURES)
def test_every_node_once_and_every_edge(
    name: str, strategy: str, browser: Browser, tmp_path: Path
) -> None:
    path, _, _ = export("bert" if name == "optimized" else name, strategy, tmp_path)
    if name == "optimized":
        changed, out = tmp_path / "changed.onnx", tmp_path / "out.onnx"
        assert apply("ort-all", path, changed, {})
        modelexport.retag(path, changed, out)
        path = out
    page = modelexport.view(path, tmp_path / "page.html").path
    graph = modelexport.load(path).graph
    model = PageModel(read_page(page)["models"][0])
    browser.open(page)
    browser.screenshot(f"{name}-{strategy}")
    Picture(model, browser.evaluate(FRAMES)).check_nodes(graph)
    chooser = random.Random(0)
    for _ in range(3):
        groups = [box for box in range(1, model.count) if chooser.random() < 0.5]
        opened = {outer for box in groups for outer in model.around(box)} | {0}
        browser.evaluate(
            f"""(() => {{ const p = {PANE}.picture; p.open.clear();
              for (const b of {sorted(opened)}) p.open.add(b);
              p.builder.clear(); p.layOut(); }})()"""
        )
        picture = Picture(model, browser.evaluate(FRAMES))
        picture.check_nodes(graph)
        picture.check_edges()
    browser.button(ALL)
    browser.screenshot(f"{name}-{strategy}-all")
    picture = Picture(model, browser.evaluate(FRAMES))
    picture.check_nodes(graph)
    assert picture.check_edges() >= len(graph.nodes) // 3
    overlaps = browser.evaluate(OVERLAPS.format(pane=PANE))
    assert overlaps == []
    assert browser.problems() == []


OVERLAPS = """(() => {{
  const drawn = {pane}.picture.drawing.drawn;
  const found = [];
  const inside = new Map();
  drawn.forEach((d, i) => {{
    if (d.around < 0) return;
    const box = drawn[d.around];
    if (d.x < box.x - 1 || d.y < box.y - 1 || d.x + d.width > box.x + box.width + 1
        || d.y + d.height > box.y + box.height + 1) found.push([d.item.title, "outside"]);
    if (!inside.has(d.around)) inside.set(d.around, []);
    for (const other of inside.get(d.around)) {{
      if (d.x < other.x + other.width && other.x < d.x + d.width
          && d.y < other.y + other.height && other.y < d.y + d.height)
        found.push([d.item.title, other.item.title]);
    }}
    inside.get(d.around).push(d);
  }});
  return found;
}})()"""


def test_a_wide_picture_begins_at_its_inputs(browser: Browser, tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, 1, [2]) for name in ("x", "mask", "y")]
    nodes, last = [], "x"
    for number in range(3000):  # a chain that leans to one side
        other = "mask" if number % 10 == 0 else f"v{number - 3}" if number > 3 else "x"
        nodes.append(helper.make_node("Add", [last, other], [f"v{number}"]))
        last = f"v{number}"
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    graph = helper.make_graph(nodes, "net", values[:2], values[2:])
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    browser.open(modelexport.view(tmp_path / "m.onnx").path)
    assert browser.evaluate(f"{PANE}.picture.drawing.width") > 4000
    browser.screenshot("wide")
    at = browser.boxes()["i0.0"]
    assert 270 < at["x"] < 1180
    assert 0 < at["y"] < 900


def test_a_hundred_thousand_nodes(browser: Browser, tmp_path: Path) -> None:
    write_graph(tmp_path / "m.onnx", 100_000)
    result = modelexport.view(tmp_path / "m.onnx")
    assert result.size < 3_000_000
    browser.open(result.path)
    browser.screenshot("hundred-thousand")
    assert "100,000 nodes" in browser.text("footer")
    browser.press("/")
    browser.type("Sigmoid_50000")
    browser.press("Enter")
    assert browser.text("h2") == "Sigmoid"
    browser.screenshot("hundred-thousand-node")
    browser.button(ALL)
    count = browser.evaluate(f"{PANE}.picture.drawing.drawn.length")
    assert 2_000 < count < 20_000
    assert "Too many boxes" in browser.text("footer") or count > 5_000
    assert browser.problems() == []


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
