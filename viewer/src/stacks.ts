/** Stacks: repeated modules that are drawn as one. */

import type { Choices, Content } from "./content";
import { Kind, type Model } from "./model";

const LEAST_STACK = 3;

/** Numbers structures: boxes with equal numbers have equal classes, names and operators. */
export class Shapes {
  private readonly known = new Map<number, number>();
  private readonly ids = new Map<string, number>();

  constructor(private readonly model: Model) {}

  of(box: number): number {
    const found = this.known.get(box);
    if (found !== undefined) return found;
    const { model } = this;
    const text: string[] = [];
    if (model.isNode(box)) {
      const node = box - model.groupCount;
      text.push(model.op(node), String(model.inputs.of(node).length));
    } else text.push(model.className(model.moduleOf(box)));
    for (const inner of model.children.of(box)) {
      text.push(model.isNode(inner) ? "" : model.boxName(inner), String(this.of(inner)));
    }
    const key = text.join("\n");
    const id = this.ids.get(key) ?? this.ids.size;
    this.ids.set(key, id);
    this.known.set(box, id);
    return id;
  }
}

/** Runs of closed members whose names are consecutive numbers and that have equal structure. */
export function findRuns(model: Model, shapes: Shapes, members: number[], choices: Choices): number[][] {
  const runs: number[][] = [];
  const last = new Map<string, { run: number[]; number: number; shape: number }>();
  for (const inner of members) {
    if (model.isNode(inner) || model.kind(inner) !== Kind.module || choices.isOpen(inner)) continue;
    const name = model.boxName(inner);
    const match = /^(.*?)(\d+)( \(call \d+\))?$/.exec(name);
    const call = model.callOf(inner);
    if (!match && call < 0) continue;
    // calls of one module are numbered as members of a list are
    const prefix = call >= 0 ? `${model.modulePaths[model.moduleOf(inner)]}#` : match![1];
    const number = call >= 0 ? call : Number(match![2]);
    if (call < 0 && prefix && !prefix.endsWith(".")) continue;
    const shape = shapes.of(inner);
    const known = last.get(prefix);
    if (known && known.number + 1 === number && known.shape === shape) {
      known.run.push(inner);
      known.number = number;
    } else {
      const run = [inner];
      runs.push(run);
      last.set(prefix, { run, number, shape });
    }
  }
  return runs.filter((run) => run.length >= LEAST_STACK);
}

/** Group members: runs as stacks, unless other members lie on a way out of the stack and back. */
export function groupRuns(
  model: Model,
  content: Content,
  members: number[],
  runs: number[][],
): number[][] {
  const after: number[][] = content.items.map(() => []);
  for (const link of content.links) if (link.from >= 0) after[link.from].push(...link.to);
  const index = new Map(members.map((inner, i) => [inner, i]));
  const stacked = new Map<number, number[]>();
  for (const run of runs) {
    const inside = new Set(run.map((inner) => index.get(inner)!));
    const nodes = run.flatMap((inner) => [...model.nodesIn(inner)]);
    const highest = nodes.reduce((a, b) => Math.max(a, b), 0);
    if (!returns(content, after, inside, highest)) for (const inner of run) stacked.set(inner, run);
  }
  const groups: number[][] = [];
  for (const inner of members) {
    const run = stacked.get(inner);
    if (!run) groups.push([inner]);
    else if (run[0] === inner) groups.push(run);
  }
  return groups;
}

/** Whether a way leads out of some items and back into them; none comes back beyond `highest`. */
function returns(content: Content, after: number[][], inside: Set<number>, highest: number): boolean {
  const seen = new Set<number>();
  const pending = [...inside].flatMap((i) => after[i]).filter((i) => !inside.has(i));
  while (pending.length) {
    const i = pending.pop()!;
    if (seen.has(i) || content.items[i].rank > highest) continue;
    seen.add(i);
    for (const next of after[i]) {
      if (inside.has(next)) return true;
      pending.push(next);
    }
  }
  return false;
}
