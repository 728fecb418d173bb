/** Search over modules, operators, values, initializers and shapes. */

import type { Model } from "./data";

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
  const lists: Found[][] = [[], [], [], []];
  model.modulePaths.forEach((path, module) => {
    const name = model.className(module);
    if (matches(path, text) || matches(name, text) || matches(model.carriedTag(module), text)) {
      lists[0].push({ kind: "module", module, text: path || name, note: name });
    }
  });
  for (let node = 0; node < model.nodeCount; node++) {
    const op = model.op(node);
    const name = model.raw.nodes.name[node];
    if (matches(op, text) || matches(name, text)) {
      const module = model.nodeModule[node];
      const where = module >= 0 ? model.modulePaths[module] : "";
      lists[1].push({ kind: "node", node, text: name || op, note: `${op}${where ? ` in ${where}` : ""}` });
    }
  }
  model.valueNames.forEach((name, value) => {
    const type = model.type(value);
    const hit = matches(name, text) || (asShape ? model.shape(value).includes(shape) : matches(type, text));
    if (!hit) return;
    const stored = model.isInitializer[value] === 1;
    lists[stored ? 3 : 2].push({ kind: stored ? "initializer" : "value", value, text: name, note: type });
  });
  const total = lists.reduce((sum, list) => sum + list.length, 0);
  for (const list of lists) list.sort((a, b) => score(a.text, text) - score(b.text, text));
  return { found: lists.flatMap((list) => list.slice(0, MOST_EACH)), total };
}

function matches(candidate: string, text: string): boolean {
  return candidate.toLowerCase().includes(text);
}

function score(candidate: string, text: string): number {
  const lower = candidate.toLowerCase();
  const last = lower.split(/[./]/).pop()!;
  return (lower === text ? 0 : last === text ? 1 : last.startsWith(text) ? 2 : 3) * 1e6 + lower.length;
}
