/** Search over modules, operators, values, initializers and shapes. */

import type { Model } from "./model";

export type Found =
  | { kind: "module"; module: number; text: string; note: string }
  | { kind: "node"; node: number; text: string; note: string }
  | { kind: "value" | "initializer"; value: number; text: string; note: string };

const MOST_EACH = 12;

/** Find everything that contains a text, whatever its case; the best matches of each kind first. */
export function search(model: Model, query: string): { found: Found[]; total: number } {
  const text = query.trim().toLowerCase();
  if (!text) return { found: [], total: 0 };
  const shape = text.replace(/[x*]/g, "×").replace(/[\s[\]()]/g, "").replace(/,/g, "×");
  const asShape = /^[\d×?]+$/.test(shape) && shape.includes("×");
  const lists = [new Best(text), new Best(text), new Best(text), new Best(text)];
  model.modulePaths.forEach((path, module) => {
    const name = model.className(module);
    if (matches(path, text) || matches(name, text) || matches(model.carriedTag(module), text)) {
      lists[0].add(path || name, () => ({ kind: "module", module, text: path || name, note: name }));
    }
  });
  for (let node = 0; node < model.nodeCount; node++) {
    const op = model.op(node);
    const name = model.raw.nodes.name[node];
    if (matches(op, text) || matches(name, text)) {
      const module = model.nodeModule[node];
      const where = module >= 0 ? model.modulePaths[module] : "";
      const note = where ? `${op} in ${where}` : op;
      lists[1].add(name || op, () => ({ kind: "node", node, text: name || op, note }));
    }
  }
  model.valueNames.forEach((name, value) => {
    const type = model.type(value);
    const hit = matches(name, text) || (asShape ? model.shape(value).includes(shape) : matches(type, text));
    if (!hit) return;
    const stored = model.isInitializer[value] === 1;
    const kind = stored ? "initializer" : "value";
    lists[stored ? 3 : 2].add(name, () => ({ kind, value, text: name, note: type }));
  });
  const total = lists.reduce((sum, list) => sum + list.count, 0);
  return { found: lists.flatMap((list) => list.found), total };
}

/** Keeps the best matches of one kind, the best first, and counts all. */
class Best {
  count = 0;
  private readonly entries: { score: number; found: Found }[] = [];

  constructor(private readonly text: string) {}

  get found(): Found[] {
    return this.entries.map(({ found }) => found);
  }

  add(name: string, make: () => Found): void {
    const { entries } = this;
    const own = score(name, this.text);
    this.count++;
    if (entries.length === MOST_EACH && own >= entries[MOST_EACH - 1].score) return;
    let at = entries.length;
    while (at > 0 && entries[at - 1].score > own) at--;
    entries.splice(at, 0, { score: own, found: make() });
    entries.length = Math.min(entries.length, MOST_EACH);
  }
}

function matches(candidate: string, text: string): boolean {
  return candidate.toLowerCase().includes(text);
}

function score(candidate: string, text: string): number {
  const lower = candidate.toLowerCase();
  const last = lower.slice(Math.max(lower.lastIndexOf("."), lower.lastIndexOf("/")) + 1);
  return (lower === text ? 0 : last === text ? 1 : last.startsWith(text) ? 2 : 3) * 1e6 + lower.length;
}
