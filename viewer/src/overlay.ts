/** Results by module as colours: their aggregate over the modules, and the scale. */

import type { Item } from "./content";
import type { RawOverlay } from "./data";
import type { Model } from "./model";

export interface Heat {
  share: number;
  text: string;
}

export type Aggregate = "sum" | "max";
export type ScaleKind = "linear" | "log";

/** One overlay on one model. */
export class Overlay {
  readonly values: Float64Array;
  readonly known: Uint8Array;
  /** The ends of the scale. */
  least: number;
  most: number;

  constructor(
    readonly raw: RawOverlay,
    private readonly model: Model,
    readonly aggregate: Aggregate,
    readonly scale: ScaleKind,
  ) {
    const count = model.modulePaths.length;
    this.values = new Float64Array(count);
    this.known = new Uint8Array(count);
    for (const [path, value] of Object.entries(raw.values)) {
      const m = model.moduleIndex.get(path);
      if (m === undefined) continue;
      this.values[m] = value;
      this.known[m] = 1;
    }
    model.addUp(this.values, aggregate === "sum" ? (a, b) => a + b : Math.max);
    const flags = Float64Array.from(this.known);
    model.addUp(flags, Math.max);
    this.known.set(flags);
    const positive = [...this.values].filter((v, m) => this.known[m] && v > 0 && Number.isFinite(v));
    this.most = positive.reduce((a, b) => Math.max(a, b), 0);
    this.least = positive.reduce((a, b) => Math.min(a, b), this.most);
  }

  /** Give the overlays of two models one scale, so that equal colours are equal numbers. */
  static align(overlays: readonly Overlay[]): void {
    const known = overlays.filter((overlay) => overlay.most > 0);
    const most = known.reduce((a, b) => Math.max(a, b.most), 0);
    const least = known.reduce((a, b) => Math.min(a, b.least), most);
    for (const overlay of overlays) [overlay.least, overlay.most] = [least, most];
  }

  share(value: number): number {
    if (value <= 0 || this.most <= 0) return 0;
    if (!Number.isFinite(value)) return 1;
    if (this.scale === "linear") return value / this.most;
    const low = Math.max(this.least, this.most * 1e-6);
    return low >= this.most ? 1 : Math.max(0, Math.log(value / low) / Math.log(this.most / low));
  }

  text(value: number): string {
    return formatNumber(value, this.raw.unit);
  }

  /** The number of a module as text; empty if it has none. */
  textOf(module: number): string {
    return this.known[module] ? this.text(this.values[module]) : "";
  }

  /** The colour and the text of an item; a stack has the colour of its greatest member. */
  heat(item: Item): Heat | null {
    const values: number[] = [];
    for (const box of item.boxes) {
      const module = this.model.isNode(box) ? -1 : this.model.moduleOf(box);
      if (module >= 0 && this.known[module]) values.push(this.values[module]);
    }
    if (!values.length) return null;
    const most = values.reduce((a, b) => Math.max(a, b));
    if (values.length === 1) return { share: this.share(most), text: this.text(most) };
    const total = values.reduce((a, b) => a + b);
    const text = this.aggregate === "sum" ? `${this.text(total)} in all` : `up to ${this.text(most)}`;
    return { share: this.share(most), text };
  }

  /** The modules with the greatest values of their own. */
  top(count: number): { module: number; value: number }[] {
    return Object.entries(this.raw.values)
      .map(([path, value]) => ({ module: this.model.moduleIndex.get(path) ?? -1, value }))
      .filter(({ module, value }) => module >= 0 && value > 0)
      .sort((a, b) => b.value - a.value)
      .slice(0, count);
  }
}

const PREFIXES: [number, string][] = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "K"],
];

export function formatNumber(value: number, unit = ""): string {
  if (!Number.isFinite(value)) return "∞";
  if (unit === "ms") return formatTime(value);
  const [size, prefix] = PREFIXES.find(([least]) => Math.abs(value) >= least) ?? [1, ""];
  const number = trim(value / size);
  return unit ? `${number} ${prefix}${unit}` : `${number}${prefix}`;
}

function formatTime(ms: number): string {
  if (ms >= 1000) return `${trim(ms / 1000)} s`;
  return ms > 0 && ms < 1 ? `${trim(ms * 1000)} µs` : `${trim(ms)} ms`;
}

function trim(value: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 0.001 && size < 1000) return String(Number(value.toPrecision(3)));
  return size >= 1000 ? String(Math.round(value)) : value.toExponential(1);
}
