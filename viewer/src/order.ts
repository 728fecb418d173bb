/** The order of the places in each layer, so that few links cross. */

import type { Place } from "./layers";
import type { LayoutLink, Sized } from "./layout";

const SWEEPS = 6;
const MOST_COUNTED = 20000;

/** Order the places of each layer so that few links cross. */
export function orderLayers(layers: Place[][], items: Sized[], links: LayoutLink[]): void {
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
