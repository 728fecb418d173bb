/** Deep links: which boxes are open and what is selected, in the fragment of the address. */

import { Kind, type Model } from "./model";

export type Selection =
  | { kind: "box"; box: number }
  | { kind: "stack"; boxes: number[] }
  /** A value, and the others on the edge that was clicked. */
  | { kind: "value"; value: number; edge?: readonly number[] }
  | { kind: "module"; module: number };

/** Name a box: its module and call, or for operators and subgraphs the node's first output. */
function nameBox(model: Model, box: number): string {
  if (model.isNode(box)) return `n:${nodeKey(model, box - model.groupCount)}`;
  if (model.kind(box) !== Kind.module) {
    return `g:${model.raw.boxes.node[box]}:${model.text(model.raw.boxes.label[box])}`;
  }
  const module = model.moduleOf(box);
  const boxes = model.boxesOfModule(module);
  return nameModule(model, module, boxes.length > 1 ? boxes.indexOf(box) : -1);
}

/** Name a module, with the number of its box if it has several or if its path ends like a number. */
function nameModule(model: Model, module: number, number = -1): string {
  const path = model.modulePaths[module] ?? "";
  return number >= 0 || /@\d+$/.test(path) ? `m:${path}@${Math.max(0, number)}` : `m:${path}`;
}

function readModule(model: Model, name: string): { module: number | undefined; number: number } {
  const [, path, number = "0"] = /^m:(.*?)(?:@(\d+))?$/s.exec(name) ?? [];
  return { module: path === undefined ? undefined : model.moduleIndex.get(path), number: Number(number) };
}

function nodeKey(model: Model, node: number): string {
  const outputs = model.outputs.of(node);
  return outputs.length ? model.valueNames[outputs[0]] : `#${node}`;
}

function findBox(model: Model, name: string): number | null {
  const rest = name.slice(2);
  if (name.startsWith("n:")) {
    const node = rest.startsWith("#") ? Number(rest.slice(1)) : model.producer[model.findValue(rest)];
    return node !== undefined && node >= 0 && node < model.nodeCount ? model.boxOfNode(node) : null;
  }
  if (name.startsWith("g:")) {
    const [node, ...label] = rest.split(":");
    for (let g = 0; g < model.groupCount; g++) {
      if (model.raw.boxes.node[g] !== Number(node)) continue;
      if (model.text(model.raw.boxes.label[g]) === label.join(":")) return g;
    }
    return null;
  }
  const { module, number } = readModule(model, name);
  return module === undefined ? null : (model.boxesOfModule(module)[number] ?? null);
}

/** The open boxes that are not inside a closed one. */
export function shownOpen(model: Model, open: ReadonlySet<number>): number[] {
  return [...open].filter((box) => {
    let b = model.parent[box];
    while (b >= 0 && open.has(b)) b = model.parent[b];
    return b < 0;
  });
}

/** Write the state as a fragment; of nested open boxes only the innermost are listed. */
export function writeLink(model: Model, open: ReadonlySet<number>, selection: Selection | null): string {
  const shown = shownOpen(model, open);
  const outer = new Set<number>();
  for (const box of shown) outer.add(model.parent[box]);
  const parts: string[] = [];
  const names = shown.filter((box) => box > 0 && !outer.has(box)).map((box) => nameBox(model, box));
  parts.push(`open=${names.map(encodeURIComponent).join(",")}`);
  if (selection) parts.push(`select=${encodeURIComponent(nameSelection(model, selection))}`);
  return `#${parts.join("&")}`;
}

function nameSelection(model: Model, selection: Selection): string {
  switch (selection.kind) {
    case "box":
      return nameBox(model, selection.box);
    case "stack":
      return nameBox(model, selection.boxes[0]);
    case "value":
      return `v:${model.valueNames[selection.value]}`;
    case "module":
      return nameModule(model, selection.module);
  }
}

export interface ReadLink {
  open: Set<number> | null;
  selection: Selection | null;
}

/** Read a fragment; parts that name nothing in this model are left out. */
export function readLink(model: Model, fragment: string): ReadLink {
  const result: ReadLink = { open: null, selection: null };
  for (const part of fragment.replace(/^#/, "").split("&")) {
    const [key, text = ""] = part.split("=", 2);
    if (key === "open") {
      result.open = new Set([0]);
      for (const name of text.split(",")) {
        for (let b = name ? (findBox(model, decode(name)) ?? -1) : -1; b >= 0; b = model.parent[b]) {
          result.open.add(b);
        }
      }
    } else if (key === "select" && text) result.selection = readSelection(model, decode(text));
  }
  return result;
}

function readSelection(model: Model, name: string): Selection | null {
  if (name.startsWith("v:")) {
    const value = model.findValue(name.slice(2));
    return value < 0 ? null : { kind: "value", value };
  }
  const box = findBox(model, name);
  if (box !== null) return { kind: "box", box };
  const { module } = readModule(model, name);
  return module === undefined ? null : { kind: "module", module };
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
