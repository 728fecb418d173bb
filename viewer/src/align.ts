/** The position of the places across: under and over each other, in the order of their layer. */

import type { Place, Segment } from "./layers";
import type { Sized } from "./layout";

const GAP_X = 22;
const RAIL_GAP = 10;
const ALIGNMENTS = 12;
const MORE_ALIGNMENTS = 36;
const MOST_ALIGNED = 3000;

/** Where each link enters and leaves an item, as offsets from its middle. */
export type Offset = (place: Place, segment: Segment, below: boolean) => number;

export function slots(items: Sized[], places: Place[]): Offset {
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
export function align(layers: Place[][], offset: Offset): void {
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
export function straighten(layers: Place[][], rails: Place[][], offset: Offset): void {
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
