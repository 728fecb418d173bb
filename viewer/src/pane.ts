/** One model on the page: its picture, tree and details, and what is selected in it. */

import type { Item } from "./content";
import type { Mark } from "./data";
import { Details } from "./details";
import { el, visible } from "./dom";
import { readLink, type Selection, shownOpen, writeLink } from "./link";
import { Minimap } from "./minimap";
import type { Model } from "./model";
import { Overlay } from "./overlay";
import { Picture } from "./picture";
import { type Hit, neighbour } from "./pointing";
import type { Drawn } from "./drawing";
import { Tree } from "./tree";

export type ChangedBy = "choice" | "arrow key";

export interface PaneListener {
  /** The selection or what is open changed. */
  onChange(pane: Pane, by: ChangedBy): void;
  onActivate(pane: Pane): void;
  onHover(pane: Pane, hit: Hit, x: number, y: number): void;
  onDraw(pane: Pane): void;
}

interface SelectOptions {
  /** Whether to open the boxes around it and to bring it into view. */
  reveal?: boolean;
  /** Whether to keep it from the listener. */
  quiet?: boolean;
  by?: ChangedBy;
}

export class Pane {
  readonly element: HTMLElement;
  readonly picture: Picture;
  readonly tree: Tree;
  readonly treeElement = el("div", { class: "tree" });
  readonly detailsElement = el("div", { class: "details" });
  selection: Selection | null = null;
  overlay: Overlay | null = null;
  overlays: Overlay[] = [];
  /** The item that the arrow keys start from. */
  private cursor: string | null = null;
  private readonly details: Details;
  private readonly minimap: Minimap;
  private readonly nodeCounts: Float64Array;
  /** A link to the first picture, for a way back to it. */
  private readonly first: string;

  constructor(
    readonly model: Model,
    private readonly listener: PaneListener,
    container: HTMLElement,
    showName: boolean,
  ) {
    const canvas = el("canvas", {
      class: "picture",
      tabindex: 0,
      role: "application",
      "aria-label":
        `picture of ${model.file}; arrow keys move between boxes, ` +
        "Enter opens and closes one, Escape goes to the box around it",
    });
    const small = el("canvas", { class: "minimap", "aria-hidden": "true" });
    const name = showName ? el("div", { class: "pane-name" }, visible(model.file)) : null;
    this.element = el("section", { class: "pane" }, canvas, small, name);
    container.append(this.element);
    this.picture = new Picture(model, canvas, {
      onClick: (hit) => this.onClick(hit),
      onHover: (hit, x, y) => listener.onHover(this, hit, x, y),
      onDraw: () => {
        this.minimap?.draw();
        listener.onDraw(this);
      },
    });
    this.minimap = new Minimap(this.picture, small);
    this.nodeCounts = model.nodeCounts();
    this.tree = new Tree(model, this.treeElement, (module) => this.selectModule(module));
    this.details = new Details(
      model,
      this.picture.builder.contents,
      this.detailsElement,
      // another value of an edge lies where the one before did: keep the picture as it is
      (selection) => this.select(selection, { reveal: selection.kind !== "value" || !selection.edge }),
      {
        isUnstacked: (box) => this.picture.unstacked.has(box),
        setUnstacked: (box, on) => this.setUnstacked(box, on),
      },
    );
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("focus", () => listener.onActivate(this));
    canvas.addEventListener("pointerdown", () => listener.onActivate(this));
    this.first = this.link();
    this.showMarks();
    this.showShares();
    this.picture.fit();
    this.details.show(null, this.overlays);
  }

  setOverlay(overlay: Overlay | null, all: Overlay[]): void {
    this.overlay = overlay;
    this.overlays = all;
    const heat = overlay ? (item: Item) => overlay.heat(item) : () => null;
    this.picture.emphasis.heat = heat;
    this.picture.builder.suffix = (item) => heat(item)?.text ?? "";
    this.showShares();
    this.details.show(this.selection, all);
    this.rebuild(() => undefined);
  }

  private showShares(): void {
    const { overlay, nodeCounts, model } = this;
    const total = nodeCounts[0] || 1;
    this.tree.setShares(
      overlay
        ? { share: (m) => overlay.share(overlay.values[m]), text: (m) => overlay.textOf(m) }
        : {
            share: (m) => nodeCounts[m] / total,
            text: (m) => `${nodeCounts[m]} of ${model.nodeCount} nodes`,
          },
    );
  }

  private showMarks(): void {
    const { model } = this;
    const marks = Object.entries(model.raw.marks);
    if (!marks.length) return;
    const ofNode = new Map(marks.map(([node, mark]) => [Number(node), mark]));
    const modules = new Set<number>();
    for (const node of ofNode.keys()) {
      for (let m = model.nodeModule[node]; m >= 0; m = model.raw.modules.parent[m]) modules.add(m);
    }
    this.tree.setMarked(modules);
    const known = new Map<number, Mark | null>();
    const markOf = (box: number): Mark | null => {
      if (!known.has(box)) {
        const found = new Set<Mark>();
        for (const n of model.nodesIn(box)) if (ofNode.has(n)) found.add(ofNode.get(n)!);
        const whole = found.size === 1 && [...model.nodesIn(box)].every((n) => ofNode.has(n));
        known.set(box, found.size === 0 ? null : whole ? [...found][0] : "changed");
      }
      return known.get(box)!;
    };
    this.picture.emphasis.mark = (item: Item) => {
      for (const box of item.boxes) if (markOf(box)) return markOf(box);
      return null;
    };
  }

  /** Select something and bring it into view. */
  select(selection: Selection | null, options: SelectOptions = {}): void {
    const { picture, model } = this;
    if (selection && options.reveal !== false) {
      if (selection.kind === "box") picture.reveal(selection.box);
      else if (selection.kind === "value") {
        const producer = model.producer[selection.value];
        const near = producer >= 0 ? producer : model.consumers.of(selection.value)[0];
        if (near !== undefined) picture.reveal(model.boxOfNode(near));
      }
    }
    this.selection = selection;
    this.emphasize();
    const key = this.selectedKey();
    if (options.reveal !== false) this.cursor = key;
    if (key && options.reveal !== false) picture.showItem(key);
    this.tree.select(this.selectedModule());
    this.details.show(selection, this.overlays);
    picture.draw();
    if (!options.quiet) this.listener.onChange(this, options.by ?? "choice");
  }

  selectModule(module: number): void {
    const boxes = this.model.boxesOfModule(module);
    this.select(boxes.length ? { kind: "box", box: boxes[0] } : { kind: "module", module });
  }

  selectedModule(): number {
    const { selection, model } = this;
    if (!selection) return -1;
    if (selection.kind === "module") return selection.module;
    if (selection.kind === "box") return model.moduleOf(selection.box);
    if (selection.kind === "stack") return model.moduleOf(selection.boxes[0]);
    const producer = model.producer[selection.value];
    return producer >= 0 ? model.nodeModule[producer] : -1;
  }

  selectedKey(): string | null {
    const { selection, picture, model } = this;
    if (!selection) return null;
    if (selection.kind === "box") return picture.keyOf(selection.box);
    if (selection.kind === "stack") return picture.keyOf(selection.boxes[0]);
    if (selection.kind === "module") return `e${selection.module}`;
    const producer = model.producer[selection.value];
    if (producer >= 0) return picture.keyOf(model.boxOfNode(producer));
    const { value } = selection;
    const isPill = ({ item }: Drawn): boolean => item.kind === "input" && item.subject === value;
    return picture.drawing.drawn.find(isPill)?.item.key ?? null;
  }

  /** What is selected, as a screen reader says it; empty if nothing is. */
  selectedName(): string {
    const { selection, picture, model } = this;
    if (selection?.kind === "value") {
      return `value ${model.valueNames[selection.value]} ${model.type(selection.value)}`;
    }
    const key = this.selectedKey();
    const index = key === null ? undefined : picture.drawing.byKey.get(key);
    if (index === undefined) return "";
    const { item, open } = picture.drawing.drawn[index];
    const state = item.canOpen ? (open ? ", open" : ", closed") : "";
    return `${item.title} ${item.subtitle}${state}`;
  }

  /** Draw the selection: the box with its edges, or the way of a value up and down. */
  private emphasize(): void {
    const { selection, picture, model } = this;
    const { emphasis } = picture;
    emphasis.values = emphasis.lit = null;
    const key = this.selectedKey();
    emphasis.selected = new Set(key && selection?.kind !== "value" ? [key] : []);
    if (selection?.kind === "value") {
      const { values, nodes } = pathOf(model, selection.value);
      emphasis.values = values;
      const lit = new Set<string>();
      for (const { item } of picture.drawing.drawn) {
        const inside = item.boxes.some((box) => model.nodesIn(box).some((n) => nodes[n] === 1));
        const isPill = item.kind === "input" || item.kind === "output";
        if (inside || (isPill && values.has(item.subject))) lit.add(item.key);
      }
      emphasis.lit = lit;
    } else if (selection && selection.kind !== "module") {
      const boxes = selection.kind === "box" ? [selection.box] : selection.boxes;
      emphasis.values = new Set(boxes.flatMap((box) => crossing(model, box)));
    }
  }

  private onClick(hit: Hit): void {
    if (!hit) return this.select(null);
    if (hit.kind === "values") {
      return this.select({ kind: "value", value: hit.values[0], edge: hit.values }, { reveal: false });
    }
    const { item, open } = hit.drawn;
    this.cursor = item.key;
    if (item.canOpen && (!open || hit.header)) this.toggle(item);
    this.select(this.selectionOf(item), { reveal: false });
  }

  private selectionOf(item: Item): Selection {
    if (item.kind === "empty") return { kind: "module", module: item.subject };
    if (item.kind === "input" || item.kind === "output") return { kind: "value", value: item.subject };
    const first = item.boxes[0];
    if (item.kind === "stack" && !this.picture.open.has(first)) return { kind: "stack", boxes: item.boxes };
    return { kind: "box", box: first };
  }

  /** Open or close an item; of a stack, open the first member, which leaves the stack. */
  toggle(item: Item): void {
    const box = item.boxes[0];
    this.picture.setOpen(box, !this.picture.open.has(box), item.key);
  }

  private setUnstacked(box: number, on: boolean): void {
    const { unstacked } = this.picture;
    this.picture.change(() => void (on ? unstacked.add(box) : unstacked.delete(box)), [box]);
    this.select(box === 0 ? null : { kind: "box", box });
  }

  /** Apply a change that affects every box: empty modules, stacks. */
  rebuild(edit: () => void): void {
    const { picture } = this;
    picture.change(() => {
      edit();
      picture.builder.clear();
    }, []);
    this.emphasize();
  }

  openToDepth(depth: number): boolean {
    const complete = this.picture.openToDepth(depth);
    this.emphasize();
    this.listener.onChange(this, "choice");
    return complete;
  }

  link(): string {
    return writeLink(this.model, this.picture.open, this.selection);
  }

  /** Restore what a link says; without one, the first picture. */
  restore(fragment: string): void {
    const { open, selection } = readLink(this.model, fragment.length > 1 ? fragment : this.first);
    if (open) this.setOpen(open);
    this.select(selection, { quiet: true });
  }

  /** Open these boxes and close all others. */
  private setOpen(open: ReadonlySet<number>): void {
    const { picture, model } = this;
    const before = new Set(shownOpen(model, picture.open));
    const changed = [...before].filter((box) => !open.has(box));
    for (const box of open) if (!before.has(box)) changed.push(box);
    if (!changed.length) return;
    picture.change(() => {
      picture.open.clear();
      for (const box of open) picture.open.add(box);
    }, changed);
  }

  private onKey(event: KeyboardEvent): void {
    // the browser's own shortcuts, such as those that zoom the page or go back
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { picture } = this;
    const key = this.selectedKey();
    const arrows: Record<string, [number, number]> = {
      ArrowUp: [0, -1],
      ArrowDown: [0, 1],
      ArrowLeft: [-1, 0],
      ArrowRight: [1, 0],
    };
    const arrow = arrows[event.key];
    if (arrow && event.shiftKey) picture.pan(arrow[0] * 60, arrow[1] * 60);
    else if (arrow) {
      const known = this.cursor !== null && picture.drawing.byKey.has(this.cursor);
      const item = neighbour(picture.drawing, known ? this.cursor : key, arrow[0], arrow[1]);
      if (item) {
        this.cursor = item.key;
        this.select(this.selectionOf(item), { reveal: false, by: "arrow key" });
        picture.showItem(item.key);
      }
    } else if (event.key === "Enter" || event.key === " ") {
      const index = key === null ? undefined : picture.drawing.byKey.get(key);
      const item = index === undefined ? undefined : picture.drawing.drawn[index].item;
      if (item?.canOpen) {
        this.toggle(item);
        this.select(this.selectionOf(item), { reveal: false });
      }
    } else if (event.key === "Escape") this.goOut(key);
    else if (event.key === "+" || event.key === "=") picture.zoomAt(1.25);
    else if (event.key === "-") picture.zoomAt(0.8);
    else if (event.key === "0") picture.fit(true);
    else return;
    event.preventDefault();
  }

  private goOut(key: string | null): void {
    const index = key === null ? undefined : this.picture.drawing.byKey.get(key);
    const around = index === undefined ? -1 : this.picture.drawing.drawn[index].around;
    if (around <= 0) this.select(null);
    else this.select(this.selectionOf(this.picture.drawing.drawn[around].item));
  }
}

/** The values that enter or leave a box. */
function crossing(model: Model, box: number): number[] {
  const { entering, leaving } = model.boundary(box);
  return [...entering, ...leaving];
}

/** The values and nodes that a value depends on or that depend on it. */
function pathOf(model: Model, value: number): { values: Set<number>; nodes: Uint8Array } {
  const values = new Set([value]);
  const nodes = new Uint8Array(model.nodeCount);
  let pending = [value];
  while (pending.length) {
    const producer = model.producer[pending.pop()!];
    if (producer < 0 || nodes[producer]) continue;
    nodes[producer] = 1;
    for (const v of model.inputs.of(producer)) {
      if (model.isInitializer[v]) continue;
      values.add(v);
      pending.push(v);
    }
  }
  const below = new Uint8Array(model.nodeCount);
  pending = [value];
  while (pending.length) {
    for (const node of model.consumers.of(pending.pop()!)) {
      if (below[node]) continue;
      below[node] = nodes[node] = 1;
      for (const v of model.outputs.of(node)) {
        values.add(v);
        pending.push(v);
      }
    }
  }
  return { values, nodes };
}
