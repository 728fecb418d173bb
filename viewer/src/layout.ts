/** A layered layout: items in layers from top to bottom, edges with few crossings and bends.
 *
 * Every link takes at most one place in a layer, however many items it leads to, so the work is
 * linear in the size of the picture.
 */

export interface Sized {
  width: number;
  height: number;
  /** Position in file order. */
  rank: number;
  /** Where values enter and leave, as offsets from the left; by default in the middle. */
  entry?: ((link: number) => number) | undefined;
  exit?: ((link: number) => number) | undefined;
  /** Pinned to the first or last layer. */
  pin?: "top" | "bottom" | undefined;
}

export interface LayoutLink {
  from: number;
  to: number[];
}

export type Point = readonly [number, number];

/** One piece of an edge: a curve between two points, each left and reached vertically. */
export interface Piece {
  link: number;
  from: Point;
  to: Point;
  /** The item that it ends at, or -1 where it goes on. */
  end: number;
  upwards?: boolean;
}

export interface LaidOut {
  x: Float64Array;
  y: Float64Array;
  width: number;
  height: number;
  pieces: Piece[];
}

export const GAP_X = 22;
const GAP_Y = 38;
const BORDER_GAP = 20;
const RAIL = 12;
const RAIL_GAP = 10;
const SWEEPS = 6;
const ALIGNMENTS = 12;
const MORE_ALIGNMENTS = 36;
const MOST_COUNTED = 20000;
const MOST_ALIGNED = 3000;

/** A place in a layer: an item, or a link that passes. */
interface Place {
  item: number;
  link: number;
  layer: number;
  order: number;
  x: number;
  width: number;
  up: Segment[];
  down: Segment[];
}

interface Segment {
  a: Place;
  b: Place;
  link: number;
}

export function layOut(items: Sized[], links: LayoutLink[]): LaidOut {
  const layerOf = assignLayers(items, links);
  const places = items.map((item, i) => makePlace(i, -1, layerOf[i], item.width));
  const layers: Place[][] = [];
  for (const place of places) (layers[place.layer] ??= []).push(place);
  for (let l = 0; l < layers.length; l++) layers[l] ??= [];
  const backwards: Segment[] = [];
  const segments: Segment[] = [];
  const rails = links.map((link, i) => route(link, i, places, layers, segments, backwards));
  order(layers, items, links);
  const offset = slots(items, places);
  align(layers, offset);
  straighten(layers, rails, offset);
  return place(items, layers, segments, backwards, offset);
}

function makePlace(item: number, link: number, layer: number, width: number): Place {
  return { item, link, layer, order: 0, x: 0, width, up: [], down: [] };
}

/** Put every item below those that it reads, and items that read nothing just above a reader. */
function assignLayers(items: Sized[], links: LayoutLink[]): Int32Array {
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
function route(
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

/** Order the places of each layer so that few links cross. */
function order(layers: Place[][], items: Sized[], links: LayoutLink[]): void {
  const rank = (place: Place): number =>
    place.item >= 0 ? items[place.item].rank : items[links[place.link].from].rank;
  for (const layer of layers) {
    layer.sort((a, b) => rank(a) - rank(b));
    layer.forEach((place, i) => (place.order = i));
  }
  const total = layers.reduce((sum, layer) => sum + layer.reduce((s, p) => s + p.down.length, 0), 0);
  const counts = total <= MOST_COUNTED;
  let best = counts ? crossings(layers) : Infinity;
  let kept = layers.map((layer) => layer.slice());
  for (let sweep = 0; sweep < SWEEPS && best > 0; sweep++) {
    const down = sweep % 2 === 0;
    for (let k = 1; k < layers.length; k++) {
      const layer = layers[down ? k : layers.length - 1 - k];
      const score = new Map(
        layer.map((place) => {
          const near = down ? place.up.map((s) => s.a.order) : place.down.map((s) => s.b.order);
          return [place, near.length ? near.reduce((a, b) => a + b) / near.length : place.order];
        }),
      );
      layer.sort((a, b) => score.get(a)! - score.get(b)! || a.order - b.order);
      layer.forEach((place, i) => (place.order = i));
    }
    const now = counts ? crossings(layers) : -sweep;
    if (now < best) {
      best = now;
      kept = layers.map((layer) => layer.slice());
    }
  }
  kept.forEach((layer, l) => {
    layers[l] = layer;
    layer.forEach((place, i) => (place.order = i));
  });
}

function crossings(layers: Place[][]): number {
  let count = 0;
  for (let l = 0; l + 1 < layers.length; l++) {
    const ends = layers[l].flatMap((place) => place.down.map((s) => s.b.order).sort((a, b) => a - b));
    const size = layers[l + 1].length;
    const tree = new Int32Array(size + 1);
    for (let k = ends.length - 1; k >= 0; k--) {
      for (let i = ends[k]; i > 0; i -= i & -i) count += tree[i];
      for (let i = ends[k] + 1; i <= size; i += i & -i) tree[i]++;
    }
  }
  return count;
}

/** Where each link enters and leaves an item, as offsets from its middle. */
type Offset = (place: Place, segment: Segment, below: boolean) => number;

function slots(items: Sized[], places: Place[]): Offset {
  const above = new Map<Segment, number>();
  const below: (Map<number, number> | undefined)[] = [];
  for (const place of places) {
    const item = items[place.item];
    if (!item.entry) {
      const arriving = place.up.slice().sort((a, b) => a.a.order - b.a.order);
      spread(arriving.length, item.width).forEach((offset, i) => above.set(arriving[i], offset));
    }
    if (!item.exit) {
      const near = new Map<number, number>();
      for (const s of place.down) near.set(s.link, Math.min(near.get(s.link) ?? Infinity, s.b.order));
      const sorted = [...near].sort((a, b) => a[1] - b[1]);
      const offsets = spread(sorted.length, item.width);
      below[place.item] = new Map(sorted.map(([link], i) => [link, offsets[i]]));
    }
  }
  return (place, segment, isBelow) => {
    if (place.item < 0) return 0;
    const item = items[place.item];
    const port = isBelow ? item.exit : item.entry;
    if (port) return port(segment.link) - item.width / 2;
    return (isBelow ? below[place.item]?.get(segment.link) : above.get(segment)) ?? 0;
  };
}

function spread(count: number, width: number): number[] {
  const step = count > 1 ? Math.min(26, (width - 16) / (count - 1)) : 0;
  return Array.from({ length: count }, (_, i) => (i - (count - 1) / 2) * step);
}

/** Move places over and under each other, keeping their order and distances. */
function align(layers: Place[][], offset: Offset): void {
  for (const layer of layers) {
    let x = 0;
    for (const place of layer) {
      place.x = x + place.width / 2;
      x += place.width + GAP_X;
    }
    const middle = (x - GAP_X) / 2;
    for (const place of layer) place.x -= middle;
  }
  const size = layers.reduce((sum, layer) => sum + layer.length, 0);
  const rounds = size > MOST_ALIGNED ? ALIGNMENTS : MORE_ALIGNMENTS;
  for (let round = 0; round < rounds; round++) {
    const down = round % 2 === 0;
    for (let k = 0; k < layers.length; k++) {
      const layer = layers[down ? k : layers.length - 1 - k];
      if (layer.length) settle(layer, offset, round >= rounds / 2 ? "both" : down ? "up" : "down");
    }
  }
}

/** Draw links that pass several layers as straight as their neighbours allow. */
function straighten(layers: Place[][], rails: Place[][], offset: Offset): void {
  for (const rail of rails.filter((each) => each.length).sort((a, b) => b.length - a.length)) {
    let start = 0;
    while (start < rail.length) {
      let low = -Infinity;
      let high = Infinity;
      let end = start;
      while (end < rail.length) {
        const layer = layers[rail[end].layer];
        const { order, width } = rail[end];
        const before = layer[order - 1];
        const after = layer[order + 1];
        const least = before ? before.x + (before.width + width) / 2 + RAIL_GAP : -Infinity;
        const most = after ? after.x - (after.width + width) / 2 - RAIL_GAP : Infinity;
        if (Math.max(low, least) > Math.min(high, most)) break;
        low = Math.max(low, least);
        high = Math.min(high, most);
        end++;
      }
      const run = rail.slice(start, Math.max(end, start + 1));
      if (end > start) {
        const wanted = wantedX(run, offset);
        for (const place of run) place.x = Math.min(high, Math.max(low, wanted));
      }
      start += run.length;
    }
  }
}

/** Where a straight run would lie best: over what it leads to, or else under where it comes from. */
function wantedX(run: Place[], offset: Offset): number {
  const last = run[run.length - 1];
  const below = last.down.filter((s) => s.b.item >= 0);
  if (below.length === 1 && last.down.length === 1) return below[0].b.x + offset(below[0].b, below[0], false);
  const above = run[0].up[0];
  if (above) return above.a.x + offset(above.a, above, true);
  return run.reduce((sum, place) => sum + place.x, 0) / run.length;
}

/** Give a layer the positions nearest to those wanted that keep order and distances.
 *
 * Least squares under order constraints: neighbours that would overlap are pooled and moved as one.
 */
function settle(layer: Place[], offset: Offset, look: "up" | "down" | "both"): void {
  interface Pool {
    weight: number;
    sum: number;
    first: number;
  }
  const shift: number[] = [];
  const pools: Pool[] = [];
  let distance = 0;
  layer.forEach((place, i) => {
    if (i > 0) {
      const before = layer[i - 1];
      distance += (before.width + place.width) / 2 + GAP_X;
    }
    shift.push(distance);
    let weight = 0;
    let sum = 0;
    const add = (x: number, w: number): void => {
      weight += w;
      sum += x * w;
    };
    if (look !== "down") {
      for (const s of place.up) {
        const w = place.item < 0 && s.a.item < 0 ? 8 : place.item < 0 || s.a.item < 0 ? 2 : 1;
        add(s.a.x + offset(s.a, s, true) - offset(place, s, false), w);
      }
    }
    if (look !== "up") {
      for (const s of place.down) {
        const w = place.item < 0 && s.b.item < 0 ? 8 : place.item < 0 || s.b.item < 0 ? 2 : 1;
        add(s.b.x + offset(s.b, s, false) - offset(place, s, true), w);
      }
    }
    if (!weight) add(place.x, 0.01);
    pools.push({ weight, sum: sum - distance * weight, first: i });
    while (pools.length > 1) {
      const last = pools[pools.length - 1];
      const before = pools[pools.length - 2];
      if (before.sum / before.weight <= last.sum / last.weight) break;
      before.weight += last.weight;
      before.sum += last.sum;
      pools.pop();
    }
  });
  pools.forEach((pool, p) => {
    const end = p + 1 < pools.length ? pools[p + 1].first : layer.length;
    for (let i = pool.first; i < end; i++) layer[i].x = pool.sum / pool.weight + shift[i];
  });
}

function place(
  items: Sized[],
  layers: Place[][],
  segments: Segment[],
  backwards: Segment[],
  offset: Offset,
): LaidOut {
  const x = new Float64Array(items.length);
  const y = new Float64Array(items.length);
  let left = Infinity;
  let right = -Infinity;
  for (const layer of layers) {
    for (const p of layer) {
      left = Math.min(left, p.x - p.width / 2);
      right = Math.max(right, p.x + p.width / 2);
    }
  }
  if (left > right) left = right = 0;
  const tops: number[] = [];
  const bottoms: number[] = [];
  let down = 0;
  layers.forEach((layer, l) => {
    tops.push(down);
    const height = layer.reduce((h, p) => Math.max(h, p.item < 0 ? 0 : items[p.item].height), 0);
    down += height;
    bottoms.push(down);
    const near = isBorder(layer, items) || (l + 1 < layers.length && isBorder(layers[l + 1], items));
    if (l + 1 < layers.length) down += near ? BORDER_GAP : gapBelow(layer, offset);
    for (const p of layer) {
      if (p.item < 0) continue;
      x[p.item] = p.x - p.width / 2 - left;
      y[p.item] = tops[l];
    }
  });
  const pieces = edges(items, segments, backwards, { y, left, tops, bottoms }, offset);
  return { x, y, width: right - left, height: down, pieces };
}

/** Where items and layers lie. */
interface Positions {
  y: Float64Array;
  left: number;
  tops: number[];
  bottoms: number[];
}

function edges(
  items: Sized[],
  segments: Segment[],
  backwards: Segment[],
  { y, left, tops, bottoms }: Positions,
  offset: Offset,
): Piece[] {
  const pieces: Piece[] = [];
  for (const s of segments) {
    const fromX = s.a.x + offset(s.a, s, true) - left;
    const toX = s.b.x + offset(s.b, s, false) - left;
    const start = s.a.item < 0 ? tops[s.a.layer] : y[s.a.item] + items[s.a.item].height;
    if (start < bottoms[s.a.layer]) {
      pieces.push({ link: s.link, from: [fromX, start], to: [fromX, bottoms[s.a.layer]], end: -1 });
    }
    pieces.push({
      link: s.link,
      from: [fromX, bottoms[s.a.layer]],
      to: [toX, tops[s.b.layer]],
      end: s.b.item,
    });
  }
  for (const s of backwards) {
    const { a, b } = s;
    const exit = items[a.item].exit?.(s.link) ?? a.width / 2;
    const entry = items[b.item].entry?.(s.link) ?? b.width / 2;
    pieces.push({
      link: s.link,
      from: [a.x + exit - a.width / 2 - left, y[a.item] + items[a.item].height],
      to: [b.x + entry - b.width / 2 - left, y[b.item]],
      end: b.item,
      upwards: true,
    });
  }
  return pieces;
}

/** Whether a layer has only ports of the border, and links that pass. */
function isBorder(layer: Place[], items: Sized[]): boolean {
  return layer.every((p) => p.item < 0 || items[p.item].height === 0);
}

/** More room where links run far to the side, so that their curves stay apart. */
function gapBelow(layer: Place[], offset: Offset): number {
  let farthest = 0;
  for (const p of layer) {
    for (const s of p.down) {
      farthest = Math.max(farthest, Math.abs(s.a.x + offset(s.a, s, true) - s.b.x - offset(s.b, s, false)));
    }
  }
  return GAP_Y + Math.min(50, farthest / 14);
}
