/** The details of what is selected: facts, neighbours to click on, commands to copy. */

import type { ContentBuilder } from "./content";
import { button, clear, el, formatCount, visible } from "./dom";
import type { Selection } from "./link";
import { Kind, type Model } from "./model";
import { formatNumber, type Overlay } from "./overlay";

const MOST_LISTED = 30;
const MOST_MORE = 1000;
const ABSORBED = "absorbed: no nodes of its own (folded, fused or identity)";

/** Which boxes draw repeated modules one by one. */
export interface Stacking {
  isUnstacked(box: number): boolean;
  setUnstacked(box: number, on: boolean): void;
}

interface Entry {
  text: string;
  note?: string;
  selection: Selection;
}

export class Details {
  constructor(
    private readonly model: Model,
    private readonly contents: ContentBuilder,
    private readonly root: HTMLElement,
    private readonly select: (selection: Selection) => void,
    private readonly stacking: Stacking,
  ) {}

  show(selection: Selection | null, overlays: Overlay[]): void {
    clear(this.root);
    if (!selection) this.showModel(overlays);
    else if (selection.kind === "value") this.showValue(selection.value, selection.edge ?? []);
    else if (selection.kind === "stack") this.showStack(selection.boxes, overlays);
    else if (selection.kind === "module") this.showModule(selection.module, -1, overlays);
    else this.showBox(selection.box, overlays);
  }

  private heading(text: string): void {
    this.root.append(el("h2", {}, visible(text)));
  }

  private section(text: string): void {
    this.root.append(el("h3", {}, text));
  }

  private facts(rows: [string, Node | string | null | undefined][]): void {
    const list = el("dl");
    for (const [name, value] of rows) {
      if (value === null || value === undefined || value === "") continue;
      const shown = typeof value === "string" ? visible(value) : value;
      list.append(el("dt", {}, visible(name)), el("dd", {}, shown));
    }
    this.root.append(list);
  }

  /** List what can be clicked on, the first ones at once and more on demand. */
  private links(entries: Entry[]): void {
    const list = el("ul", { class: "links" });
    const add = (start: number, count: number): void => {
      for (const { text, note, selection } of entries.slice(start, start + count)) {
        const link = button(text || "(unnamed)", () => this.select(selection), { class: "link" });
        list.append(el("li", {}, link, note ? el("span", { class: "note" }, visible(note)) : null));
      }
      const left = entries.length - start - count;
      if (left <= 0) return;
      const more = button(`${formatCount(left)} more`, () => {
        row.remove();
        add(start + count, MOST_MORE);
      });
      const row = el("li", {}, more);
      list.append(row);
    };
    add(0, MOST_LISTED);
    this.root.append(list);
  }

  private command(text: string): void {
    const copy = button("copy", () => {
      navigator.clipboard?.writeText(text).then(
        () => (copy.textContent = "copied"),
        () => selectText(code),
      ) ?? selectText(code);
    }, { class: "copy", "aria-label": "copy the command" });
    const code = el("code", {}, visible(text));
    this.root.append(el("div", { class: "command" }, code, copy));
  }

  /** Offer to draw repeated modules in a box as stacks again. */
  private restack(box: number): void {
    if (box < 0 || !this.stacking.isUnstacked(box)) return;
    const stack = (): void => this.stacking.setUnstacked(box, false);
    this.root.append(button("draw repeated modules as one", stack, { class: "action" }));
  }

  private showModel(overlays: Overlay[]): void {
    const { model } = this;
    this.heading(model.file);
    this.facts(Object.entries(model.facts));
    this.restack(0);
    this.top(overlays);
    this.section("commands");
    const file = quote(model.file);
    this.command(`modelexport analyze ${file}`);
    this.command(`modelexport profile ${file}`);
  }

  private top(overlays: Overlay[]): void {
    for (const overlay of overlays) {
      const rows = overlay.top(10);
      if (!rows.length) continue;
      this.section(`top ten: ${overlay.raw.name}`);
      this.links(
        rows.map(({ module, value }) => ({
          text: this.model.modulePaths[module] || "(root)",
          note: overlay.text(value),
          selection: this.selectionOf(module),
        })),
      );
    }
  }

  private selectionOf(module: number): Selection {
    const box = this.model.boxesOfModule(module)[0];
    return box === undefined ? { kind: "module", module } : { kind: "box", box };
  }

  private showModule(module: number, box: number, overlays: Overlay[]): void {
    const { model } = this;
    const { raw } = model;
    const path = model.modulePaths[module];
    this.heading(path || model.className(module) || model.file);
    const boxes = model.boxesOfModule(module);
    const nodes = boxes.reduce((sum, b) => sum + model.nodesIn(b).length, 0);
    const count = raw.modules.parameters[module];
    const flops = raw.modules.flops[module];
    const status = model.status(module);
    this.facts([
      ["path", path || "(root)"],
      ["class", model.text(raw.modules.class[module])],
      ["tag", model.text(raw.modules.tag[module]) || `${model.carriedTag(module)} (of the module around it)`],
      ["status", status === "absorbed" ? ABSORBED : status],
      ["nodes", formatCount(nodes)],
      ["calls", String(raw.modules.calls[module])],
      ["call", box >= 0 && model.callOf(box) >= 0 ? String(model.callOf(box)) : null],
      ["parameters", count === null ? null : formatCount(count)],
      ["operations", flops === null ? null : formatNumber(flops, "FLOP")],
      ...overlays
        .filter((overlay) => overlay.known[module])
        .map((overlay): [string, string] => [overlay.raw.name, overlay.text(overlay.values[module])]),
    ]);
    this.restack(box);
    if (boxes.length > 1) {
      this.section("calls");
      this.links(
        boxes.map((b) => ({
          text: model.callOf(b) >= 0 ? `call ${model.callOf(b)}` : nameOf(model, b),
          selection: { kind: "box", box: b },
        })),
      );
    }
    if (box < 0) return;
    this.boundary(box);
    this.operators(box);
    const alike = this.contents.alike(box);
    if (alike.length) {
      this.section("siblings with the same structure");
      this.links(alike.map((b) => ({ text: nameOf(model, b), selection: { kind: "box", box: b } })));
    }
    if (path) this.moduleCommands(path);
  }

  private moduleCommands(path: string): void {
    this.section("commands");
    const file = quote(this.model.file);
    const name = quote(path);
    const stem = path.replace(/[^\w.-]/g, "_");
    this.command(`modelexport extract ${file} ${name} ${stem}.onnx`);
    this.command(`modelexport select ${file} ${name}`);
    this.command(`modelexport profile ${file} --module ${name}`);
  }

  private operators(box: number): void {
    const counts = new Map<string, number>();
    for (const node of this.model.nodesIn(box)) {
      const op = this.model.op(node);
      counts.set(op, (counts.get(op) ?? 0) + 1);
    }
    this.section("operators");
    const sorted = [...counts].sort((a, b) => b[1] - a[1]);
    this.facts(sorted.slice(0, 12).map(([op, count]) => [op, String(count)]));
  }

  /** The values that enter and leave a box. */
  private boundary(box: number): void {
    const { entering, leaving } = this.model.boundary(box);
    this.values("values in", entering);
    this.values("values out", leaving);
  }

  private values(title: string, values: number[]): void {
    if (!values.length) return;
    this.section(title);
    const { model } = this;
    this.links(
      values.map((value) => ({
        text: model.valueNames[value],
        note: model.type(value),
        selection: { kind: "value", value },
      })),
    );
  }

  private showStack(boxes: number[], overlays: Overlay[]): void {
    const { model } = this;
    this.heading(`${boxes.length} modules with the same structure`);
    this.facts([
      ["class", model.text(model.raw.modules.class[model.moduleOf(boxes[0])])],
      ["nodes in each", formatCount(model.nodesIn(boxes[0]).length)],
    ]);
    const around = model.parent[boxes[0]];
    const unstack = (): void => this.stacking.setUnstacked(around, true);
    this.root.append(button("draw them one by one", unstack, { class: "action" }));
    this.section("members");
    this.links(
      boxes.map((box) => ({
        text: nameOf(model, box),
        note: overlays.map((overlay) => overlay.textOf(model.moduleOf(box))).join(" "),
        selection: { kind: "box", box },
      })),
    );
    this.operators(boxes[0]);
  }

  private showBox(box: number, overlays: Overlay[]): void {
    const { model } = this;
    if (model.isNode(box)) return this.showNode(box - model.groupCount);
    if (model.kind(box) === Kind.module) {
      const module = model.moduleOf(box);
      if (module < 0) return this.showModel(overlays);
      this.showModule(module, box, overlays);
      const only = this.contents.onlyNode(box);
      if (only >= 0) this.showNode(only);
      return;
    }
    this.heading(model.boxName(box));
    const graph = model.graphAt(box)!;
    this.facts([
      ["kind", model.kind(box) === Kind.function ? "local function" : "subgraph"],
      ["nodes", formatCount(model.nodesIn(box).length)],
    ]);
    this.values("inputs", graph.inputs);
    this.values("outputs", graph.outputs);
    this.operators(box);
  }

  private showNode(node: number): void {
    const { model } = this;
    const { raw } = model;
    const module = model.nodeModule[node];
    const covers = raw.nodes.covers[String(node)];
    const call = raw.nodes.call[node];
    this.heading(model.op(node));
    const open = (): void => this.select(this.selectionOf(module));
    const path = module < 0 ? "" : model.modulePaths[module] || "(root)";
    const where = module < 0 ? null : button(path, open, { class: "link" });
    this.facts([
      ["name", raw.nodes.name[node]],
      ["operator set", model.domain(node) || "ai.onnx"],
      ["module", where],
      ["class", module < 0 ? null : model.className(module)],
      ["tag", module < 0 ? null : model.carriedTag(module)],
      ["evidence", model.text(raw.nodes.evidence[node])],
      ["call", call >= 0 ? String(call) : null],
    ]);
    if (covers) {
      this.section("implements operations of");
      this.links(
        covers.map((m) => ({
          text: model.modulePaths[m] || "(root)",
          selection: this.selectionOf(m),
        })),
      );
    }
    const attributes = Object.entries(model.attributesOf(node));
    if (attributes.length) {
      this.section("attributes");
      const text = (value: unknown): string => (typeof value === "string" ? value : JSON.stringify(value));
      this.facts(attributes.map(([name, value]) => [name, text(value)]));
    }
    const inputs = [...model.inputs.of(node)];
    this.values("initializers", inputs.filter((v) => model.producer[v] < 0 && model.isInitializer[v]));
    this.values("inputs", inputs.filter((v) => model.producer[v] >= 0 || !model.isInitializer[v]));
    this.values("outputs", [...model.outputs.of(node)]);
    this.neighbours("producers", inputs.map((v) => model.producer[v]));
    this.neighbours("consumers", [...model.outputs.of(node)].flatMap((v) => [...model.consumers.of(v)]));
  }

  private neighbours(title: string, nodes: number[]): void {
    const { model } = this;
    const known = [...new Set(nodes)].filter((n) => n >= 0);
    if (!known.length) return;
    this.section(title);
    this.links(
      known.map((n) => ({
        text: model.op(n),
        note:
          model.nodeModule[n] < 0
            ? model.raw.nodes.name[n]
            : model.modulePaths[model.nodeModule[n]] || "(root)",
        selection: { kind: "box", box: model.boxOfNode(n) },
      })),
    );
  }

  private showValue(value: number, edge: readonly number[]): void {
    const { model } = this;
    this.heading(model.valueNames[value]);
    const producer = model.producer[value];
    const isInput = model.inputOf[value] >= 0;
    const given = model.isInitializer[value] ? "initializer" : isInput ? "graph input" : "";
    this.facts([
      ["type", model.type(value) || "not in the file"],
      ["kind", producer >= 0 ? "computed" : given],
      ["output of", model.outputOf.has(value) ? "the graph" : null],
    ]);
    this.neighbours("producer", [producer]);
    this.neighbours("consumers", [...model.consumers.of(value)]);
    if (edge.length > 1) {
      this.section(`${edge.length} values on this edge`);
      this.links(
        edge.map((each) => ({
          text: model.valueNames[each],
          note: model.type(each),
          selection: { kind: "value", value: each, edge },
        })),
      );
    }
    const note = "Its way up and down the graph is drawn in colour; the rest is dimmed.";
    this.root.append(el("p", { class: "note" }, note));
  }
}

function nameOf(model: Model, box: number): string {
  const path = model.modulePaths[model.moduleOf(box)];
  const call = model.callOf(box);
  return call >= 0 ? `${path} (call ${call})` : path;
}

/** Quote an argument for a shell where it needs that. */
function quote(text: string): string {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

function selectText(element: HTMLElement): void {
  const range = document.createRange();
  range.selectNodeContents(element);
  getSelection()?.removeAllRanges();
  getSelection()?.addRange(range);
}
