"""The picture of the page is complete, without overlaps, and drawn for graphs of any size."""

from __future__ import annotations

import json
import random
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
from viewing.browser import ALL, PANE, Browser, missing
from viewing.handmade import node, write
from viewing.pages import FRAMES, PageModel, Picture, read_page

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


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
