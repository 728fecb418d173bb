/** The content of an open box: the items in it, and the edges between them. */

import { visible } from "./dom";
import { Kind, type Model } from "./model";
import { findRuns, groupRuns, Shapes } from "./stacks";

export type ItemKind = "module" | "operator" | "subgraph" | "stack" | "input" | "output" | "empty";

/** Something drawn inside a box. */
export interface Item {
  /** Identifies the item in the whole picture. */
  key: string;
  kind: ItemKind;
  /** Its boxes: one, or those of a stack; none for a graph's input or output. */
  boxes: number[];
  /** The value of an input or output; the module of an empty one; else -1. */
  subject: number;
  /** The texts that are drawn: shortened, and without characters that cannot be seen. */
  title: string;
  subtitle: string;
  /** Initializers and constants that an operator reads. */
  chips: string[];
  /** Whether a click opens it. */
  canOpen: boolean;
  /** Position in file order. */
  rank: number;
}

/** Values that go the same way: from one item to others, or through the border of the box. */
export interface Link {
  values: number[];
  /** The index of the item, or -1 where the values come in through the border. */
  from: number;
  to: number[];
  /** Whether the values also leave through the border. */
  leaves: boolean;
}

export interface Content {
  items: Item[];
  links: Link[];
  /** The values that come in and go out through the border. */
  entering: number[];
  leaving: number[];
}

export interface Choices {
  isOpen(box: number): boolean;
  /** Whether repeated members of a box are drawn one by one. */
  isUnstacked(box: number): boolean;
  /** Whether modules without nodes are drawn. */
  showEmpty: boolean;
}

const MOST_CHIPS = 3;
const LONGEST_TITLE = 48;
const LONGEST_SHAPE = 40;

/** Builds the content of boxes. */
export class ContentBuilder {
  private readonly shapes: Shapes;
  private readonly itemOf: Int32Array;
  /** For each node 0 if it was not asked for, 1 if it is drawn as a box, 2 if in its consumers. */
  private readonly folding: Uint8Array;
  /** The boxes of all graphs in the order of `enter`, so that those in a box are neighbours. */
  private readonly graphBoxes: number[];

  constructor(private readonly model: Model) {
    const boxes = model.raw.graphs.map((graph) => graph.box);
    this.graphBoxes = boxes.sort((a, b) => model.enter[a] - model.enter[b]);
    this.shapes = new Shapes(model);
    this.itemOf = new Int32Array(model.nodeCount);
    this.folding = new Uint8Array(model.nodeCount);
  }

  build(box: number, choices: Choices): Content {
    const members = this.members(box);
    const single = members.map((inner) => [inner]);
    let groups = single;
    if (!choices.isUnstacked(box)) {
      const runs = findRuns(this.model, this.shapes, members, choices);
      if (runs.length) {
        const unstacked = this.connect(box, single.map((boxes) => this.item(boxes)));
        groups = groupRuns(this.model, unstacked, members, runs);
      }
    }
    const items = groups.map((boxes) => this.item(boxes));
    if (choices.showEmpty) items.push(...this.emptyModules(box));
    return this.connect(box, items);
  }

  /** The boxes inside a box that are drawn as items: all but constants drawn in their consumers. */
  private members(box: number): number[] {
    const { model } = this;
    return [...model.children.of(box)].filter(
      (inner) => !model.isNode(inner) || !this.isFolded(inner - model.groupCount),
    );
  }

  /** Whether a node is drawn as a line in the boxes of its consumers: it reads nothing. */
  isFolded(node: number): boolean {
    if (!this.folding[node]) this.folding[node] = this.canFold(node) ? 2 : 1;
    return this.folding[node] === 2;
  }

  private canFold(node: number): boolean {
    const { model } = this;
    const box = model.boxOfNode(node);
    if (model.inputs.of(node).length || model.children.of(box).length) return false;
    let used = false;
    for (const value of model.outputs.of(node)) {
      if (model.outputOf.has(value)) return false;
      for (const consumer of model.consumers.of(value)) {
        if (model.parent[model.boxOfNode(consumer)] !== model.parent[box]) return false;
        used = true;
      }
    }
    return used;
  }

  /** The other modules around a module's box that have the same structure, single operators apart. */
  alike(box: number): number[] {
    const { model } = this;
    if (box === 0 || this.onlyNode(box) >= 0) return [];
    const shape = this.shapes.of(box);
    return [...model.children.of(model.parent[box])].filter(
      (inner) => inner !== box && !model.isNode(inner) && this.shapes.of(inner) === shape,
    );
  }

  private item(boxes: number[]): Item {
    const { model } = this;
    const box = boxes[0];
    const item: Item = {
      key: `b${box}`,
      kind: "module",
      boxes,
      subject: -1,
      title: drawable(model.boxName(box)),
      subtitle: "",
      chips: [],
      canOpen: true,
      rank: this.rank(box),
    };
    if (boxes.length > 1) {
      const end = boxes[boxes.length - 1];
      const call = model.callOf(box);
      item.key = `s${box}-${end}`;
      item.kind = "stack";
      const tail = call >= 0 ? String(model.callOf(end)) : model.boxName(end).split(".").pop()!;
      item.title = `${item.title.replace(/\)$/, "")} … ${tail}${call >= 0 ? ")" : ""} × ${boxes.length}`;
      item.subtitle = drawable(model.className(model.moduleOf(box)));
    } else if (model.isNode(box)) {
      item.kind = "operator";
      item.canOpen = model.children.of(box).length > 0;
      item.chips = this.chips(box - model.groupCount);
    } else if (model.kind(box) !== Kind.module) {
      item.kind = "subgraph";
      item.subtitle = model.kind(box) === Kind.function ? "function" : "subgraph";
    } else {
      const only = this.onlyNode(box);
      item.subtitle = drawable(only >= 0 ? model.op(only) : model.className(model.moduleOf(box)));
      if (only >= 0) {
        item.canOpen = false;
        item.chips = this.chips(only);
      }
    }
    return item;
  }

  /** The node of a module of one operator; -1 for other boxes. */
  onlyNode(box: number): number {
    const { model } = this;
    if (model.isNode(box) || box === 0) return -1;
    const members = this.members(box);
    if (members.length !== 1 || !model.isNode(members[0])) return -1;
    return model.children.of(members[0]).length ? -1 : members[0] - model.groupCount;
  }

  private rank(box: number): number {
    const nodes = this.model.nodesIn(box);
    return nodes.length ? nodes.reduce((a, b) => Math.min(a, b)) : this.model.nodeCount;
  }

  /** Short texts for the initializers and constants that a node reads. */
  private chips(node: number): string[] {
    const { model } = this;
    const chips: string[] = [];
    for (const value of model.inputs.of(node)) {
      const producer = model.producer[value];
      if (producer < 0 && model.isInitializer[value]) {
        const name = model.valueNames[value].split(/[./]/).pop()!;
        chips.push(`${drawable(name, 18)} ${drawnShape(model, value)}`);
      } else if (producer >= 0 && this.isFolded(producer)) {
        const shown = Object.values(model.attributesOf(producer))[0];
        const tail = typeof shown === "string" ? shown.split(" = ").pop()! : String(shown ?? "");
        chips.push(drawable(tail || model.shape(value), 24));
      }
    }
    if (chips.length <= MOST_CHIPS) return chips;
    return [...chips.slice(0, MOST_CHIPS - 1), `and ${chips.length - MOST_CHIPS + 1} more`];
  }

  /** Modules without nodes, drawn in the box of the nearest module around them. */
  private emptyModules(box: number): Item[] {
    const { model } = this;
    if (model.isNode(box) || model.kind(box) !== Kind.module) return [];
    const module = model.moduleOf(box);
    if (module < 0 || model.boxesOfModule(module)[0] !== box) return [];
    const items: Item[] = [];
    const pending = [...model.moduleChildren.of(module)].reverse();
    while (pending.length) {
      const m = pending.pop()!;
      if (model.boxesOfModule(m).length) continue;
      const status = model.status(m);
      if (status === "nodes") {
        pending.push(...[...model.moduleChildren.of(m)].reverse());
        continue;
      }
      items.push({
        key: `e${m}`,
        kind: "empty",
        boxes: [],
        subject: m,
        title: drawable(
          model.modulePaths[m].slice(
            model.modulePaths[module] ? model.modulePaths[module].length + 1 : 0,
          ),
        ),
        subtitle: drawable(status ? `${model.className(m)}, ${status}` : model.className(m)),
        chips: [],
        canOpen: false,
        rank: model.nodeCount,
      });
    }
    return items;
  }

  /** Find the edges between items, and the values that cross the border of the box. */
  private connect(box: number, items: Item[]): Content {
    const { model, itemOf } = this;
    items.forEach((item, i) => {
      for (const inner of item.boxes) for (const n of model.nodesIn(inner)) itemOf[n] = i;
    });
    const nodes = model.nodesIn(box);
    // a constant that is drawn in its consumers is in no box of its own
    const folded = -2;
    for (const n of nodes) {
      const parent = model.parent[model.boxOfNode(n)];
      if (parent === box && this.isFolded(n)) itemOf[n] = folded;
    }
    const pills = this.addPills(box, items);
    const links = new Map<number, { from: number; to: Set<number>; leaves: boolean }>();
    const own = model.isNode(box) ? box - model.groupCount : -1;

    const source = (value: number): number => {
      const producer = model.producer[value];
      if (producer >= 0) {
        return producer !== own && model.isInside(model.boxOfNode(producer), box) ? itemOf[producer] : -1;
      }
      const graph = model.inputOf[value];
      if (graph === box) return pills.inputs.get(value)!;
      if (graph >= 0 && model.isInside(graph, box)) return folded;
      return model.isInitializer[value] ? folded : -1;
    };
    const link = (value: number, to: number): void => {
      let known = links.get(value);
      if (!known) {
        const from = source(value);
        if (from === folded || from === to) return;
        links.set(value, (known = { from, to: new Set(), leaves: false }));
      }
      if (known.from !== to) known.to.add(to);
    };
    for (const n of nodes) {
      if (n === own) continue;
      for (const value of model.inputs.of(n)) link(value, itemOf[n]);
    }
    for (const [value, item] of pills.outputs) link(value, item);
    for (const inner of this.graphsIn(box)) {
      if (inner === box) continue;
      const node = model.raw.boxes.node[inner];
      const item = node >= 0 && node !== own ? itemOf[node] : itemOfBox(model, inner, items);
      for (const value of model.graphAt(inner)!.outputs) if (item >= 0) link(value, item);
    }
    for (const n of nodes) {
      if (n === own) continue;
      for (const value of model.outputs.of(n)) {
        if (!model.isUsedOutside(value, box)) continue;
        let known = links.get(value);
        if (!known) links.set(value, (known = { from: itemOf[n], to: new Set(), leaves: false }));
        known.leaves = true;
      }
    }
    const [inputs, outputs] = own < 0 ? [[], []] : [model.inputs.of(own), model.outputs.of(own)];
    return finish(items, links, [...inputs], [...outputs], model);
  }

  private addPills(box: number, items: Item[]): { inputs: Map<number, number>; outputs: [number, number][] } {
    const { model } = this;
    const inputs = new Map<number, number>();
    const outputs: [number, number][] = [];
    const graph = model.graphAt(box);
    const pill = (kind: "input" | "output", value: number, position: number): number => {
      items.push({
        key: `${kind[0]}${box}.${position}`,
        kind,
        boxes: [],
        subject: value,
        title: drawable(localName(model.valueNames[value])),
        subtitle: "",
        chips: [],
        canOpen: false,
        rank: kind === "input" ? -1 : model.nodeCount,
      });
      return items.length - 1;
    };
    graph?.inputs.forEach((value, i) => inputs.set(value, pill("input", value, i)));
    graph?.outputs.forEach((value, i) => outputs.push([value, pill("output", value, i)]));
    return { inputs, outputs };
  }

  /** The nested graphs inside a box, by their boxes. */
  private graphsIn(box: number): number[] {
    const { enter, exit } = this.model;
    let low = 0;
    let high = this.graphBoxes.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (enter[this.graphBoxes[middle]] < enter[box]) low = middle + 1;
      else high = middle;
    }
    let end = low;
    while (end < this.graphBoxes.length && enter[this.graphBoxes[end]] < exit[box]) end++;
    return this.graphBoxes.slice(low, end);
  }
}

function itemOfBox(model: Model, inner: number, items: Item[]): number {
  return items.findIndex((item) => item.boxes.some((outer) => model.isInside(inner, outer)));
}

function finish(
  items: Item[],
  links: Map<number, { from: number; to: Set<number>; leaves: boolean }>,
  ownInputs: number[],
  ownOutputs: number[],
  model: Model,
): Content {
  const result: Link[] = [];
  const entering = new Set(ownInputs.filter((v) => !model.isInitializer[v]));
  const leaving = new Set(ownOutputs);
  for (const [value, { from, to, leaves }] of links) {
    if (from < 0) entering.add(value);
    if (leaves) leaving.add(value);
    result.push({ values: [value], from, to: [...to].sort((a, b) => a - b), leaves });
  }
  return { items, links: result, entering: [...entering], leaving: [...leaving] };
}

/** The name of a value without the path of its subgraph. */
function localName(key: string): string {
  const parts = key.split("/");
  return key.length > 40 && parts.length > 1 ? parts[parts.length - 1] : key;
}

/** A text as it is drawn: its end, with characters that cannot be seen as code points. */
function drawable(text: string, most = LONGEST_TITLE): string {
  const end = [...text.slice(-2 * most)];
  return visible(text.length > most && end.length > most ? `…${end.slice(1 - most).join("")}` : text);
}

/** The shape of a value as it is drawn, its beginning if it is long. */
export function drawnShape(model: Model, value: number): string {
  const shape = visible(model.shape(value));
  return shape.length > LONGEST_SHAPE ? `${shape.slice(0, LONGEST_SHAPE - 1)}…` : shape;
}
