/** A model of the page: its columns decoded, and what follows from them. */

import type { RawModel } from "./data";

export const enum Kind {
  module = 0,
  subgraph = 1,
  function = 2,
}

/** Lists of numbers of different lengths, one after the other. */
class Lists {
  constructor(
    readonly starts: Int32Array,
    readonly items: Int32Array,
  ) {}

  of(index: number): Int32Array {
    return this.items.subarray(this.starts[index], this.starts[index + 1]);
  }

  /** Group the numbers `0 … keys.length - 1` by their key; those with a negative key are left out. */
  static group(keys: ArrayLike<number>, count: number): Lists {
    const starts = new Int32Array(count + 1);
    for (let i = 0; i < keys.length; i++) if (keys[i] >= 0) starts[keys[i] + 1]++;
    for (let i = 0; i < count; i++) starts[i + 1] += starts[i];
    const next = starts.slice();
    const items = new Int32Array(starts[count]);
    for (let i = 0; i < keys.length; i++) if (keys[i] >= 0) items[next[keys[i]]++] = i;
    return new Lists(starts, items);
  }

  static fromCounts(counts: readonly number[], items: Int32Array): Lists {
    const starts = new Int32Array(counts.length + 1);
    for (let i = 0; i < counts.length; i++) starts[i + 1] = starts[i] + counts[i];
    return new Lists(starts, items);
  }
}

function sums(deltas: readonly number[]): Int32Array {
  const result = new Int32Array(deltas.length);
  let last = 0;
  for (let i = 0; i < deltas.length; i++) result[i] = last += deltas[i];
  return result;
}

/** A model: modules, nodes, values, and the boxes that hold them.
 *
 * Boxes are numbered: first those of the data (calls of modules, subgraphs, functions), then one
 * for every node.
 */
export class Model {
  readonly file: string;
  readonly facts: Record<string, string>;
  readonly texts: string[];
  readonly raw: RawModel;

  readonly modulePaths: string[];
  readonly moduleIndex = new Map<string, number>();
  readonly moduleChildren: Lists;

  readonly nodeCount: number;
  readonly nodeModule: Int32Array;
  readonly inputs: Lists;
  readonly outputs: Lists;
  private readonly attributes = new Map<number, string>();

  readonly valueNames: string[];
  readonly producer: Int32Array;
  readonly consumers: Lists;
  /** For each value, the box of the graph that has it as an input, an output or an initializer. */
  readonly inputOf: Int32Array;
  readonly outputOf = new Map<number, number[]>();
  readonly isInitializer: Uint8Array;

  readonly groupCount: number;
  readonly boxCount: number;
  readonly parent: Int32Array;
  readonly children: Lists;
  readonly enter: Int32Array;
  readonly exit: Int32Array;
  /** The nodes in the order of `enter`, so that those of a box are neighbours. */
  readonly nodeOrder: Int32Array;
  private readonly nodeStart: Int32Array;
  private readonly graphOfBox = new Map<number, RawModel["graphs"][number]>();

  constructor(raw: RawModel) {
    this.raw = raw;
    this.file = raw.file;
    this.facts = raw.facts;
    this.texts = raw.texts;

    const modules = raw.modules;
    this.modulePaths = [];
    for (let i = 0; i < (modules.parent ?? []).length; i++) {
      const above = modules.parent[i] < 0 ? "" : this.modulePaths[modules.parent[i]];
      const name = raw.texts[modules.name[i]];
      const path = above ? `${above}.${name}` : name;
      this.modulePaths.push(path);
      this.moduleIndex.set(path, i);
    }
    this.moduleChildren = Lists.group(modules.parent ?? [], this.modulePaths.length);

    const nodes = raw.nodes;
    this.nodeCount = nodes.op.length;
    this.nodeModule = sums(nodes.module);
    this.inputs = Lists.fromCounts(nodes.inputCount, sums(nodes.inputs));
    this.outputs = Lists.fromCounts(nodes.outputCount, sums(nodes.outputs));
    sums(nodes.attributed).forEach((node, i) => {
      this.attributes.set(node, raw.texts[nodes.attributes[i]]);
    });

    const count = raw.values.name.length;
    this.producer = new Int32Array(count).fill(-1);
    for (let n = 0; n < this.nodeCount; n++) for (const v of this.outputs.of(n)) this.producer[v] = n;
    this.valueNames = raw.values.name.map((name, v) =>
      raw.values.begins[v] ? nodes.name[this.producer[v]] + name : name,
    );
    this.consumers = this.findConsumers(count);
    this.inputOf = new Int32Array(count).fill(-1);
    this.isInitializer = new Uint8Array(count);
    for (const graph of raw.graphs) {
      this.graphOfBox.set(graph.box, graph);
      for (const v of graph.inputs) this.inputOf[v] = graph.box;
      for (const v of graph.initializers) this.isInitializer[v] = 1;
      for (const v of graph.outputs) {
        const boxes = this.outputOf.get(v);
        if (boxes) boxes.push(graph.box);
        else this.outputOf.set(v, [graph.box]);
      }
    }

    this.groupCount = raw.boxes.parent.length;
    this.boxCount = this.groupCount + this.nodeCount;
    this.parent = this.findParents();
    this.children = Lists.group(this.parent, this.boxCount);
    this.enter = new Int32Array(this.boxCount);
    this.exit = new Int32Array(this.boxCount);
    this.nodeOrder = new Int32Array(this.nodeCount);
    this.nodeStart = new Int32Array(this.boxCount + 1);
    this.number();
  }

  private findConsumers(values: number): Lists {
    const starts = new Int32Array(values + 1);
    const { items } = this.inputs;
    for (const v of items) starts[v + 1]++;
    for (let i = 0; i < values; i++) starts[i + 1] += starts[i];
    const next = starts.slice();
    const nodes = new Int32Array(items.length);
    for (let n = 0; n < this.nodeCount; n++) {
      for (const v of this.inputs.of(n)) nodes[next[v]++] = n;
    }
    return new Lists(starts, nodes);
  }

  private findParents(): Int32Array {
    const boxes = this.raw.boxes;
    const parents = sums(boxes.parent);
    const result = new Int32Array(this.boxCount);
    for (let g = 0; g < this.groupCount; g++) {
      const node = boxes.node[g];
      result[g] = node >= 0 ? this.groupCount + node : parents[g];
    }
    result.set(sums(this.raw.nodes.box), this.groupCount);
    return result;
  }

  /** Number the boxes so that those inside a box follow it. */
  private number(): void {
    let next = 0;
    let nodes = 0;
    const path: [number, number][] = [];
    const begin = (box: number): void => {
      this.enter[box] = next++;
      this.nodeStart[box] = nodes;
      if (box >= this.groupCount) this.nodeOrder[nodes++] = box - this.groupCount;
      path.push([box, 0]);
    };
    this.nodeEnd = new Int32Array(this.boxCount);
    begin(0);
    while (path.length) {
      const top = path[path.length - 1];
      const inside = this.children.of(top[0]);
      if (top[1] < inside.length) begin(inside[top[1]++]);
      else {
        this.exit[top[0]] = next;
        this.nodeEnd[top[0]] = nodes;
        path.pop();
      }
    }
  }
  private nodeEnd!: Int32Array;

  text(index: number): string {
    return this.texts[index];
  }

  isNode(box: number): boolean {
    return box >= this.groupCount;
  }

  boxOfNode(node: number): number {
    return this.groupCount + node;
  }

  isInside(box: number, outer: number): boolean {
    return this.enter[box] >= this.enter[outer] && this.enter[box] < this.exit[outer];
  }

  /** The nodes in a box, those in nested boxes included; a node's own box holds the node, too. */
  nodesIn(box: number): Int32Array {
    return this.nodeOrder.subarray(this.nodeStart[box], this.nodeEnd[box]);
  }

  /** The values that enter and leave a box, without initializers. */
  boundary(box: number): { entering: number[]; leaving: number[] } {
    const entering = new Set<number>();
    const leaving = new Set<number>();
    for (const node of this.nodesIn(box)) {
      for (const value of this.inputs.of(node)) {
        const producer = this.producer[value];
        if (producer >= 0) {
          if (!this.isInside(this.boxOfNode(producer), box)) entering.add(value);
        } else if (!this.isInitializer[value] && !this.isInputWithin(value, box)) entering.add(value);
      }
      for (const value of this.outputs.of(node)) if (this.isUsedOutside(value, box)) leaving.add(value);
    }
    return { entering: [...entering], leaving: [...leaving] };
  }

  private isInputWithin(value: number, box: number): boolean {
    return this.inputOf[value] >= 0 && this.isInside(this.inputOf[value], box);
  }

  /** Whether a value of a box is read, or an output of a graph, outside of it. */
  isUsedOutside(value: number, box: number): boolean {
    for (const consumer of this.consumers.of(value)) {
      if (!this.isInside(this.boxOfNode(consumer), box)) return true;
    }
    const graphs = this.outputOf.get(value);
    return graphs !== undefined && graphs.some((graph) => !this.isInside(graph, box));
  }

  graphAt(box: number): RawModel["graphs"][number] | undefined {
    return this.graphOfBox.get(box);
  }

  kind(group: number): Kind {
    return this.raw.boxes.kind[group];
  }

  op(node: number): string {
    return this.texts[this.raw.nodes.op[node]];
  }

  domain(node: number): string {
    return this.texts[this.raw.nodes.domain[node]];
  }

  attributesOf(node: number): Record<string, unknown> {
    const text = this.attributes.get(node);
    if (!text) return {};
    try {
      return JSON.parse(text) as Record<string, unknown>;
    } catch {
      return { "…": text };
    }
  }

  /** The value with a name; -1 if there is none. */
  findValue(name: string): number {
    this.valueIndex ??= new Map(this.valueNames.map((each, value) => [each, value]));
    return this.valueIndex.get(name) ?? -1;
  }
  private valueIndex: Map<string, number> | undefined;

  type(value: number): string {
    return this.texts[this.raw.values.type[value]];
  }

  /** The shape of a value as it is drawn: `1×16×128`, or its type if the shape is unknown. */
  shape(value: number): string {
    const type = this.type(value);
    const start = type.indexOf("[");
    if (start < 0) return type;
    const sizes = type.slice(start + 1, -1);
    return sizes ? sizes.split(",").join("×") : type.slice(0, start);
  }

  /** The module of a box; -1 if there is none. */
  moduleOf(box: number): number {
    return this.isNode(box) ? this.nodeModule[box - this.groupCount] : this.groupModule(box);
  }

  private groupModules: Int32Array | undefined;
  private groupModule(group: number): number {
    this.groupModules ??= sums(this.raw.boxes.module);
    return this.groupModules[group];
  }

  callOf(box: number): number {
    return this.isNode(box)
      ? this.raw.nodes.call[box - this.groupCount]
      : this.raw.boxes.call[box];
  }

  className(module: number): string {
    const name = module < 0 ? "" : this.texts[this.raw.modules.class[module]];
    return name.slice(name.lastIndexOf(".") + 1);
  }

  /** The tag that nodes of a module carry: its own, or that of the nearest shown module. */
  carriedTag(module: number): string {
    for (let m = module; m >= 0; m = this.raw.modules.parent[m]) {
      const tag = this.texts[this.raw.modules.tag[m]];
      if (tag) return tag;
    }
    return "";
  }

  status(module: number): string {
    return this.texts[this.raw.modules.status[module]];
  }

  /** The name of a box relative to the box around it. */
  boxName(box: number): string {
    if (this.isNode(box)) return this.op(box - this.groupCount);
    const module = this.moduleOf(box);
    if (this.kind(box) !== Kind.module) return this.texts[this.raw.boxes.label[box]];
    if (box === 0) return this.className(module) || this.file;
    let above = "";
    for (let outer = this.parent[box]; outer >= 0; outer = this.parent[outer]) {
      if (!this.isNode(outer)) {
        above = this.moduleOf(outer) < 0 ? "" : this.modulePaths[this.moduleOf(outer)];
        break;
      }
    }
    const path = this.modulePaths[module];
    const name = above && path.startsWith(`${above}.`) ? path.slice(above.length + 1) : path;
    const call = this.callOf(box);
    return call >= 0 ? `${name} (call ${call})` : name;
  }

  /** The boxes of a module: one for each call, and more in subgraphs. */
  boxesOfModule(module: number): number[] {
    if (!this.moduleBoxes) {
      this.moduleBoxes = new Map();
      for (let g = 0; g < this.groupCount; g++) {
        if (this.kind(g) !== Kind.module) continue;
        const m = this.moduleOf(g);
        const known = this.moduleBoxes.get(m);
        if (known) known.push(g);
        else this.moduleBoxes.set(m, [g]);
      }
    }
    return this.moduleBoxes.get(module) ?? [];
  }
  private moduleBoxes: Map<number, number[]> | undefined;

  /** The nodes of each module and of those below it. */
  nodeCounts(): Float64Array {
    const counts = new Float64Array(this.modulePaths.length);
    for (const m of this.nodeModule) if (m >= 0) counts[m]++;
    this.addUp(counts);
    return counts;
  }

  /** Add the numbers of modules to those of the modules around them. */
  addUp(numbers: Float64Array, combine = (a: number, b: number): number => a + b): void {
    const parents = this.raw.modules.parent;
    for (let m = numbers.length - 1; m > 0; m--) {
      const parent = parents[m];
      if (parent >= 0) numbers[parent] = combine(numbers[parent], numbers[m]);
    }
  }
}
