/** The picture as a whole: open boxes laid out inside each other, in absolute positions. */

import { type Choices, type Content, ContentBuilder, drawnShape, type Item } from "./content";
import { type LaidOut, layOut, type LayoutLink, type Sized } from "./layout";
import type { Model } from "./model";

export interface Rect {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** An item where it is drawn. */
export interface Drawn extends Rect {
  item: Item;
  open: boolean;
  depth: number;
  /** The index of the drawn box around it, -1 for the outermost. */
  around: number;
}

/** A curve of an edge. */
export interface Line {
  x1: number;
  y1: number;
  x2: number;
  y2: number;
  values: number[];
  arrow: boolean;
  upwards: boolean;
}

/** A dot where values cross the border of an open box. */
export interface Port {
  x: number;
  y: number;
  value: number;
}

/** A text beside the beginning of an edge. */
export interface Label {
  x: number;
  y: number;
  text: string;
  align: "left" | "right";
  values: number[];
}

export interface Drawing extends Rect {
  drawn: Drawn[];
  lines: Line[];
  ports: Port[];
  labels: Label[];
  byKey: Map<string, number>;
  /** The keys of the stacks that stand for boxes. */
  stackOf: Map<number, string>;
}

export type Measure = (text: string, font: Font) => number;
export type Font = "title" | "text" | "small";

export const HEADER = 30;
const SIDE = 16;
const BOTTOM = 18;
const MARGIN = 30;
const STACK_STEP = 4;

/** An item with its size and, if it is open, what is inside. */
interface Frame {
  item: Item;
  width: number;
  height: number;
  inner?: Inner;
}

interface Inner {
  content: Content;
  frames: Frame[];
  links: (LayoutLink & { values: number[] })[];
  laid: LaidOut;
  /** The offsets of ports from the left of the box, by value. */
  entries: Map<number, number>;
  exits: Map<number, number>;
}

const ROOT_ITEM: Item = {
  key: "b0",
  kind: "module",
  boxes: [0],
  subject: -1,
  title: "",
  subtitle: "",
  chips: [],
  canOpen: true,
  rank: 0,
};

/** Lays out the open boxes of a model; keeps what did not change since the last time. */
export class DrawingBuilder {
  readonly contents: ContentBuilder;
  /** A text that is drawn behind the subtitle of an item, such as a result. */
  suffix: (item: Item) => string = () => "";
  private frames = new Map<number, Frame>();

  constructor(
    private readonly model: Model,
    private readonly measure: Measure,
  ) {
    this.contents = new ContentBuilder(model);
  }

  /** Forget the layout of a box and of those around it. */
  invalidate(box: number): void {
    for (let b = box; b >= 0; b = this.model.parent[b]) this.frames.delete(b);
  }

  clear(): void {
    this.frames.clear();
  }

  build(choices: Choices): Drawing {
    const root = this.openFrame(ROOT_ITEM, choices, true);
    const drawing: Drawing = {
      x: 0,
      y: 0,
      width: root.width,
      height: root.height,
      drawn: [],
      lines: [],
      ports: [],
      labels: [],
      byKey: new Map(),
      stackOf: new Map(),
    };
    this.flatten(root, 0, 0, 0, -1, drawing);
    return drawing;
  }

  private frame(item: Item, choices: Choices): Frame {
    const box = item.boxes[0];
    if (item.canOpen && item.boxes.length === 1 && choices.isOpen(box)) {
      return this.openFrame(item, choices, false);
    }
    return { item, ...this.closedSize(item) };
  }

  private closedSize(item: Item): { width: number; height: number } {
    const { measure } = this;
    const isModule = item.kind !== "operator" && item.kind !== "input" && item.kind !== "output";
    const mark = item.canOpen ? 16 : 0;
    let width = measure(item.title, isModule ? "title" : "text") + mark;
    let height = 24;
    const details = [item.subtitle, this.suffix(item)].filter(Boolean).join(" · ");
    if (details) {
      width = Math.max(width, measure(details, "small"));
      height += 14;
    }
    for (const chip of item.chips) width = Math.max(width, measure(chip, "small") + 8);
    if (item.chips.length) height += 13 * item.chips.length + 3;
    if (item.kind === "stack") height += 2 * STACK_STEP;
    return { width: Math.max(54, Math.ceil(width) + 24), height };
  }

  private openFrame(item: Item, choices: Choices, isRoot: boolean): Frame {
    const box = item.boxes[0];
    const known = this.frames.get(box);
    if (known) return known;
    const content = this.contents.build(box, choices);
    const frames = content.items.map((inner) => this.frame(inner, choices));
    const links = merge(content, frames);
    const sized: Sized[] = frames.map((frame) => ({
      width: frame.width,
      height: frame.height,
      rank: frame.item.rank,
      pin: frame.item.kind === "input" ? "top" : frame.item.kind === "output" ? "bottom" : undefined,
      entry: frame.inner && ((link) => frame.inner!.entries.get(links[link].values[0]) ?? frame.width / 2),
      exit: frame.inner && ((link) => frame.inner!.exits.get(links[link].values[0]) ?? frame.width / 2),
    }));
    const portIndex = new Map<number, number>();
    for (const value of content.entering) {
      portIndex.set(value, sized.length);
      sized.push({ width: 8, height: 0, rank: -1, pin: "top" });
    }
    const exitIndex = new Map<number, number>();
    for (const value of content.leaving) {
      exitIndex.set(value, sized.length);
      sized.push({ width: 8, height: 0, rank: Infinity, pin: "bottom" });
    }
    for (const link of links) {
      if (link.from < 0) link.from = portIndex.get(link.values[0])!;
      if (link.leaves) link.to = [...link.to, exitIndex.get(link.values[0])!];
    }
    const laid = layOut(sized, links);
    const details = `${item.subtitle} · ${this.suffix(item)}`;
    const minimum = this.measure(item.title, "title") + this.measure(details, "small") + 64;
    const side = isRoot ? MARGIN : SIDE;
    const width = Math.max(laid.width + 2 * side, isRoot ? 0 : minimum);
    const left = (width - laid.width) / 2;
    const port = (index: number): number => left + laid.x[index] + 4;
    const frame: Frame = {
      item,
      width,
      height: laid.height + (isRoot ? 2 * MARGIN : HEADER + BOTTOM),
      inner: {
        content,
        frames,
        links,
        laid,
        entries: new Map([...portIndex].map(([value, index]) => [value, port(index)])),
        exits: new Map([...exitIndex].map(([value, index]) => [value, port(index)])),
      },
    };
    this.frames.set(box, frame);
    return frame;
  }

  private flatten(frame: Frame, x: number, y: number, depth: number, around: number, drawing: Drawing): void {
    const index = drawing.drawn.length;
    const { item, width, height, inner } = frame;
    drawing.drawn.push({ item, x, y, width, height, open: inner !== undefined, depth, around });
    drawing.byKey.set(item.key, index);
    if (item.kind === "stack") for (const box of item.boxes) drawing.stackOf.set(box, item.key);
    if (!inner) return;
    const isRoot = around < 0;
    const left = x + (width - inner.laid.width) / 2;
    const top = y + (isRoot ? MARGIN : HEADER);
    inner.frames.forEach((child, i) => {
      this.flatten(child, left + inner.laid.x[i], top + inner.laid.y[i], depth + 1, index, drawing);
    });
    const count = inner.frames.length;
    const entering = count + inner.content.entering.length;
    const bottom = y + height;
    const firsts = new Map<number, Line>();
    for (const piece of inner.laid.pieces) {
      const link = inner.links[piece.link];
      const fromPort = link.from >= count && link.from < entering;
      const line: Line = {
        x1: left + piece.from[0],
        y1: top + piece.from[1],
        x2: left + piece.to[0],
        y2: top + piece.to[1],
        values: link.values,
        arrow: piece.end >= 0 && piece.end < count,
        upwards: piece.upwards === true,
      };
      if (fromPort && piece.from[1] === 0) {
        drawing.lines.push({ ...line, y1: y, x2: line.x1, y2: line.y1, arrow: false });
      }
      if (piece.end >= entering) {
        drawing.lines.push({ ...line, x1: line.x2, y1: line.y2, y2: bottom, arrow: false });
      }
      drawing.lines.push(line);
      if (!fromPort && !firsts.has(piece.link)) firsts.set(piece.link, line);
    }
    for (const [value, offset] of inner.entries) drawing.ports.push({ x: x + offset, y, value });
    for (const [value, offset] of inner.exits) drawing.ports.push({ x: x + offset, y: bottom, value });
    this.label(inner, firsts, drawing, left, top);
  }

  /** Put a label beside the beginning of each edge where there is room for it. */
  private label(inner: Inner, firsts: Map<number, Line>, drawing: Drawing, left: number, top: number): void {
    const taken: Rect[] = inner.frames.map((frame, i) => ({
      x: left + inner.laid.x[i],
      y: top + inner.laid.y[i],
      width: frame.width,
      height: frame.height,
    }));
    const starts = [...firsts.values()].sort((a, b) => a.y1 - b.y1 || a.x1 - b.x1);
    for (const { x1, y1 } of starts) taken.push({ x: x1 - 1, y: y1 + 1, width: 2, height: 14 });
    const rows = new Rows(taken);
    for (const line of starts) {
      const { values } = line;
      const text = values.length > 1 ? `${values.length} values` : drawnShape(this.model, values[0]);
      if (!text || line.upwards) continue;
      const width = this.measure(text, "small") + 4;
      const sides: ("left" | "right")[] = line.x2 - line.x1 > 6 ? ["right", "left"] : ["left", "right"];
      for (const align of sides) {
        const x = line.x1 + (align === "left" ? 4 : -4);
        const rect = { x: align === "left" ? x : x - width, y: line.y1 + 4, width, height: 12 };
        if (rows.overlaps(rect)) continue;
        rows.add(rect);
        drawing.labels.push({ x, y: line.y1 + 11, text, align, values });
        break;
      }
    }
  }
}

function overlap(a: Rect, b: Rect): boolean {
  return a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
}

const ROW = 64;

/** Rectangles by the rows that they touch, to find overlaps quickly. */
class Rows {
  private readonly rows = new Map<number, Rect[]>();

  constructor(rects: Rect[]) {
    for (const rect of rects) this.add(rect);
  }

  add(rect: Rect): void {
    for (let row = Math.floor(rect.y / ROW); row <= Math.floor((rect.y + rect.height) / ROW); row++) {
      const known = this.rows.get(row);
      if (known) known.push(rect);
      else this.rows.set(row, [rect]);
    }
  }

  overlaps(rect: Rect): boolean {
    for (let row = Math.floor(rect.y / ROW); row <= Math.floor((rect.y + rect.height) / ROW); row++) {
      for (const other of this.rows.get(row) ?? []) {
        if (overlap(rect, other)) return true;
      }
    }
    return false;
  }
}

/** Draw values that go the same way as one edge, except at open boxes, where each has a port. */
function merge(content: Content, frames: Frame[]): (LayoutLink & { values: number[]; leaves: boolean })[] {
  const merged: (LayoutLink & { values: number[]; leaves: boolean })[] = [];
  const known = new Map<string, number>();
  for (const link of content.links) {
    const { values, from, to, leaves } = link;
    if (!to.length && !leaves) continue;
    const byPort = from < 0 || leaves || frames[from].inner || to.some((i) => frames[i].inner);
    const key = `${from}:${to.join(",")}`;
    const index = byPort ? undefined : known.get(key);
    if (index !== undefined) {
      merged[index].values.push(...values);
      continue;
    }
    if (!byPort) known.set(key, merged.length);
    merged.push({ values: [...values], from, to: [...to], leaves });
  }
  return merged;
}

/** The middle of the uppermost items, where a picture that is too wide for the window begins. */
export function topMiddle({ drawn, width }: Drawing): number {
  const inside = drawn.filter((d) => d.around === 0);
  const top = inside.reduce((least, d) => Math.min(least, d.y), Infinity);
  const uppermost = inside.filter((d) => d.y <= top);
  if (!uppermost.length) return width / 2;
  const left = uppermost.reduce((least, d) => Math.min(least, d.x), Infinity);
  const right = uppermost.reduce((most, d) => Math.max(most, d.x + d.width), -Infinity);
  return (left + right) / 2;
}
