/** The layers of a layout: which item lies in which, and the places that links take between. */

import type { LayoutLink, Sized } from "./layout";

const RAIL = 12;

/** A place in a layer: an item, or a link that passes. */
export interface Place {
  item: number;
  link: number;
  layer: number;
  order: number;
  x: number;
  width: number;
  up: Segment[];
  down: Segment[];
}

export interface Segment {
  a: Place;
  b: Place;
  link: number;
}

export function makePlace(item: number, link: number, layer: number, width: number): Place {
  return { item, link, layer, order: 0, x: 0, width, up: [], down: [] };
}

/** Put every item below those that it reads, and items that read nothing just above a reader. */
export function assignLayers(items: Sized[], links: LayoutLink[]): Int32Array {
  const n = items.length;
  const sorted = topological(items, links);
  const position = new Int32Array(n);
  sorted.forEach((item, i) => (position[item] = i));
  const down: number[][] = items.map(() => []);
  const hasAbove = new Uint8Array(n);
  for (const { from, to } of links) {
    for (const end of to) {
      // a link that closes a circle counts in reverse
      const [upper, lower] = position[from] < position[end] ? [from, end] : [end, from];
      if (upper === lower) continue;
      down[upper].push(lower);
      hasAbove[lower] = 1;
    }
  }
  const layer = new Int32Array(n);
  const top = items.some((item) => item.pin === "top") ? 1 : 0;
  for (const i of sorted) {
    if (items[i].pin !== "top") layer[i] = Math.max(layer[i], top);
    for (const to of down[i]) layer[to] = Math.max(layer[to], layer[i] + 1);
  }
  for (let k = sorted.length - 1; k >= 0; k--) {
    const i = sorted[k];
    if (hasAbove[i] || items[i].pin || !down[i].length) continue;
    layer[i] = Math.max(top, down[i].reduce((least, to) => Math.min(least, layer[to]), n) - 1);
  }
  let lowest = Math.max(top - 1, 0);
  for (let i = 0; i < n; i++) if (items[i].pin !== "bottom") lowest = Math.max(lowest, layer[i]);
  for (let i = 0; i < n; i++) {
    if (items[i].pin === "bottom") layer[i] = lowest + 1;
    if (items[i].pin === "top") layer[i] = 0;
  }
  return layer;
}

/** Sort items so that links lead forward. Where they go in circles, the first in file order leads. */
function topological(items: Sized[], links: LayoutLink[]): number[] {
  const after: number[][] = items.map(() => []);
  const waiting = new Int32Array(items.length);
  for (const { from, to } of links) {
    for (const end of to) {
      if (end === from) continue;
      after[from].push(end);
      waiting[end]++;
    }
  }
  const byRank = items.map((_, i) => i).sort((a, b) => items[a].rank - items[b].rank || a - b);
  const sorted: number[] = [];
  const done = new Uint8Array(items.length);
  const ready = byRank.filter((i) => waiting[i] === 0).reverse();
  let next = 0;
  while (sorted.length < items.length) {
    let item = ready.pop();
    while (item === undefined || done[item]) item = ready.pop() ?? byRank[next++];
    done[item] = 1;
    sorted.push(item);
    for (const end of after[item]) if (--waiting[end] === 0) ready.push(end);
  }
  return sorted;
}

/** Lead a link through the layers between its items; return the places on its way. */
export function route(
  link: LayoutLink,
  index: number,
  places: Place[],
  layers: Place[][],
  segments: Segment[],
  backwards: Segment[],
): Place[] {
  const source = places[link.from];
  const rail: Place[] = [];
  const at = (layer: number): Place => {
    while (rail.length < layer - source.layer) {
      const previous = rail.length ? rail[rail.length - 1] : source;
      const next = makePlace(-1, index, previous.layer + 1, RAIL);
      layers[next.layer].push(next);
      rail.push(next);
      join(previous, next, index, segments);
    }
    return layer === source.layer ? source : rail[layer - source.layer - 1];
  };
  const targets = link.to.map((to) => places[to]).sort((a, b) => a.layer - b.layer);
  for (const target of targets) {
    if (target.layer > source.layer) join(at(target.layer - 1), target, index, segments);
    else backwards.push({ a: source, b: target, link: index });
  }
  return rail;
}

function join(a: Place, b: Place, link: number, segments: Segment[]): void {
  const segment = { a, b, link };
  a.down.push(segment);
  b.up.push(segment);
  segments.push(segment);
}
