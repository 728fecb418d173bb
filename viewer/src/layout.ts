/** A layered layout: items in layers from top to bottom, edges with few crossings and bends.
 *
 * Every link takes at most one place in a layer, however many items it leads to, so the work is
 * linear in the size of the picture.
 */

import { align, type Offset, slots, straighten } from "./align";
import { assignLayers, makePlace, type Place, route, type Segment } from "./layers";
import { orderLayers } from "./order";

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

const GAP_Y = 38;
const BORDER_GAP = 20;

export function layOut(items: Sized[], links: LayoutLink[]): LaidOut {
  const layerOf = assignLayers(items, links);
  const places = items.map((item, i) => makePlace(i, -1, layerOf[i], item.width));
  const layers: Place[][] = [];
  for (const place of places) (layers[place.layer] ??= []).push(place);
  for (let l = 0; l < layers.length; l++) layers[l] ??= [];
  const backwards: Segment[] = [];
  const segments: Segment[] = [];
  const rails = links.map((link, i) => route(link, i, places, layers, segments, backwards));
  orderLayers(layers, items, links);
  const offset = slots(items, places);
  align(layers, offset);
  straighten(layers, rails, offset);
  return place(items, layers, segments, backwards, offset);
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
