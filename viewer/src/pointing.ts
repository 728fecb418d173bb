/** What the pointer is over, and which item is next to another. */

import type { Item } from "./content";
import { type Drawing, type Drawn, HEADER } from "./drawing";
import { distanceTo } from "./painters";

export type Hit =
  /** An item; of an open box, `header` says whether it is the line with its name. */
  | { kind: "item"; drawn: Drawn; header: boolean }
  | { kind: "values"; values: number[] }
  | null;

/** Where the window of the canvas lies in the drawing. */
export interface View {
  x: number;
  y: number;
  zoom: number;
}

/** How many pixels of an open box close it at least, however small it is drawn. */
const LEAST_HEADER = 14;

/** What is under a point of the canvas. */
export function hit(drawing: Drawing, view: View, px: number, py: number): Hit {
  const x = view.x + px / view.zoom;
  const y = view.y + py / view.zoom;
  let best: Drawn | null = null;
  for (const d of drawing.drawn) {
    if (d.around < 0 || x < d.x || y < d.y || x > d.x + d.width || y > d.y + d.height) continue;
    if (!best || d.depth >= best.depth) best = d;
  }
  if (best && !best.open) return { kind: "item", drawn: best, header: false };
  const reach = 5 / view.zoom;
  for (const line of drawing.lines) {
    const side = line.upwards ? 90 : reach;
    if (Math.min(line.x1, line.x2) - reach > x || Math.max(line.x1, line.x2) + side < x) continue;
    if (Math.min(line.y1, line.y2) - reach > y || Math.max(line.y1, line.y2) + reach < y) continue;
    if (distanceTo(line, x, y) <= reach) return { kind: "values", values: line.values };
  }
  if (!best) return null;
  const header = Math.max(HEADER, LEAST_HEADER / view.zoom);
  return { kind: "item", drawn: best, header: y < best.y + header };
}

/** The nearest item in a direction, for the arrow keys. */
export function neighbour(drawing: Drawing, key: string | null, dx: number, dy: number): Item | null {
  const from = key === null ? undefined : drawing.byKey.get(key);
  const candidates = drawing.drawn.filter((d) => !d.open);
  if (from === undefined) return candidates[0]?.item ?? null;
  const d = drawing.drawn[from];
  const cx = d.x + d.width / 2;
  const cy = dy ? d.y + (dy > 0 && d.open ? 0 : d.height / 2) : d.y + Math.min(d.height, 30) / 2;
  let best: Drawn | null = null;
  let least = Infinity;
  for (const other of candidates) {
    if (other === d) continue;
    const ox = other.x + other.width / 2 - cx;
    const oy = other.y + (dy ? other.height / 2 : Math.min(other.height, 30) / 2) - cy;
    const along = ox * dx + oy * dy;
    const across = Math.abs(ox * dy) + Math.abs(oy * dx);
    if (along <= 2) continue;
    const cost = along + 2.5 * across;
    if (cost < least) [least, best] = [cost, other];
  }
  return best?.item ?? null;
}
