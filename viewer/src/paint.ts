/** Draw a drawing, on a canvas or as SVG. */

import type { Item } from "./content";
import type { Mark } from "./data";
import { type Drawn, type Font, HEADER, type Line, type Port, type Rect, type Drawing } from "./drawing";

export interface Theme {
  background: string;
  surface: string;
  open: string;
  inner: string;
  border: string;
  moduleBorder: string;
  text: string;
  muted: string;
  line: string;
  accent: string;
  heat: string;
  added: string;
  removed: string;
  changed: string;
}

const SIZES: Record<Font, string> = { title: "600 12px", text: "500 12px", small: "400 10.5px" };
const HEIGHTS: Record<Font, number> = { title: 12, text: 12, small: 10.5 };
const FAMILY = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

export function fontOf(font: Font): string {
  return `${SIZES[font]} ${FAMILY}`;
}

export function readTheme(element: HTMLElement): Theme {
  const style = getComputedStyle(element);
  const read = (name: string): string => style.getPropertyValue(`--${name}`).trim();
  return {
    background: read("canvas"),
    surface: read("box"),
    open: read("open"),
    inner: read("inner"),
    border: read("border"),
    moduleBorder: read("module"),
    text: read("text"),
    muted: read("muted"),
    line: read("line"),
    accent: read("accent"),
    heat: read("heat"),
    added: read("added"),
    removed: read("removed"),
    changed: read("changed"),
  };
}

/** What a picture shows beyond the boxes themselves. */
export interface Emphasis {
  selected: ReadonlySet<string>;
  hovered: string | null;
  /** Values drawn in the accent colour; null for none. */
  values: ReadonlySet<number> | null;
  /** Keys of the items that are not dimmed; null if none is. */
  lit: ReadonlySet<string> | null;
  heat(item: Item): { share: number; text: string } | null;
  mark(item: Item): Mark | null;
}

interface Shape {
  fill?: string | undefined;
  stroke?: string | undefined;
  width?: number;
  dash?: boolean;
  alpha?: number;
}

interface TextLook {
  font: Font;
  color: string;
  align: "left" | "center" | "right";
  alpha: number;
  /** The colour around the letters, where lines may lie behind them. */
  halo?: string | undefined;
}

interface LineLook {
  color: string;
  width: number;
  alpha: number;
  arrows: boolean;
  dash?: boolean;
}

/** What both a canvas and an SVG document can draw. */
export interface Painter {
  rect(x: number, y: number, width: number, height: number, radius: number, shape: Shape): void;
  /** Rectangles of one look that do not overlap. */
  rects(rects: readonly Rect[], shape: Shape): void;
  text(text: string, x: number, y: number, look: TextLook): void;
  lines(lines: readonly Line[], look: LineLook): void;
  dots(points: readonly Port[], radius: number, shape: Shape): void;
  measure(text: string, font: Font): number;
}

/** With what a picture is drawn, and how. */
export interface Style {
  painter: Painter;
  /** Pixels per unit; small details are left out. */
  zoom: number;
  theme: Theme;
  emphasis: Emphasis;
}

/** Draw what is in view; return the number of closed boxes. */
export function paint(
  drawing: Drawing,
  view: Rect,
  style: Style,
  at = (drawn: Drawn): Rect => drawn,
  lineAlpha = 1,
): number {
  const { zoom } = style;
  const visible: [Drawn, Rect][] = [];
  for (const drawn of drawing.drawn) {
    if (drawn.around < 0) continue;
    const rect = at(drawn);
    if (rect.x > view.x + view.width || rect.y > view.y + view.height) continue;
    if (rect.x + rect.width < view.x || rect.y + rect.height < view.y) continue;
    if (rect.width * zoom < 2) continue;
    visible.push([drawn, rect]);
  }
  for (const [drawn, rect] of visible) if (drawn.open) paintOpen(drawn, rect, style);
  paintLines(drawing, view, style, lineAlpha);
  const closed = visible.filter(([drawn]) => !drawn.open);
  if (zoom < LEAST_TEXT) paintSmall(closed, style);
  for (const [drawn, rect] of visible) {
    if (drawn.open) paintTitle(drawn, rect, style);
    else if (zoom >= LEAST_TEXT) paintClosed(drawn, rect, style);
  }
  return closed.length;
}

/** Draw closed boxes that are too small for text, those that look the same at once. */
function paintSmall(closed: [Drawn, Rect][], style: Style): void {
  const looks = new Map<string, { rects: Rect[]; shape: Shape }>();
  for (const [{ item }, rect] of closed) {
    const shape = closedShape(item, style);
    const key = `${shape.fill} ${shape.stroke} ${shape.width} ${shape.alpha} ${shape.dash}`;
    const known = looks.get(key);
    if (known) known.rects.push(rect);
    else looks.set(key, { rects: [rect], shape });
  }
  for (const { rects, shape } of looks.values()) style.painter.rects(rects, shape);
}

function closedShape(item: Item, { zoom, theme, emphasis }: Style): Shape {
  const { stroke, width } = frameColor(item, theme, emphasis);
  const heat = emphasis.heat(item);
  const fill = heat ? mix(theme.surface, theme.heat, 0.06 + 0.75 * heat.share) : theme.surface;
  return {
    fill: item.kind === "empty" ? theme.open : fill,
    stroke,
    width: Math.max(width, 0.6 / zoom),
    alpha: alphaOf(item, emphasis),
    dash: item.kind === "empty",
  };
}

function alphaOf(item: Item, emphasis: Emphasis): number {
  return emphasis.lit && !emphasis.lit.has(item.key) ? 0.25 : 1;
}

function frameColor(item: Item, theme: Theme, emphasis: Emphasis): { stroke: string; width: number } {
  const mark = emphasis.mark(item);
  if (emphasis.selected.has(item.key)) return { stroke: theme.accent, width: 2.5 };
  if (mark) return { stroke: theme[mark], width: 2 };
  const isModule = item.kind === "module" || item.kind === "stack" || item.kind === "subgraph";
  if (emphasis.hovered === item.key) return { stroke: theme.accent, width: 1.5 };
  return { stroke: isModule ? theme.moduleBorder : theme.border, width: 1 };
}

function paintOpen(drawn: Drawn, rect: Rect, { painter, zoom, theme, emphasis }: Style): void {
  const { stroke, width } = frameColor(drawn.item, theme, emphasis);
  painter.rect(rect.x, rect.y, rect.width, rect.height, 8, {
    fill: drawn.depth % 2 ? theme.open : theme.inner,
    stroke,
    width: Math.max(width, 0.6 / zoom),
    dash: drawn.item.kind === "subgraph",
    alpha: alphaOf(drawn.item, emphasis),
  });
}

function paintTitle(drawn: Drawn, rect: Rect, { painter, zoom, theme, emphasis }: Style): void {
  if (12 * zoom < 4) return;
  const { item } = drawn;
  const alpha = alphaOf(item, emphasis);
  const heat = emphasis.heat(item);
  const y = rect.y + HEADER / 2 + 1;
  const halo = theme.background;
  const title: TextLook = { font: "title", color: theme.text, align: "left", alpha, halo };
  painter.text(`▾ ${item.title}`, rect.x + 10, y, title);
  const right = [item.subtitle, heat?.text].filter(Boolean).join(" · ");
  if (!right) return;
  const end = rect.x + rect.width;
  const look: TextLook = { font: "small", color: theme.muted, align: "right", alpha, halo };
  if (heat) {
    const width = painter.measure(right, "small");
    const fill = mix(theme.surface, theme.heat, 0.1 + 0.75 * heat.share);
    painter.rect(end - width - 18, y - 9, width + 12, 17, 5, { fill, alpha });
    Object.assign(look, { color: theme.text, halo: undefined });
  }
  painter.text(right, end - 12, y, look);
}

function paintClosed(drawn: Drawn, rect: Rect, style: Style): void {
  const { painter, theme, emphasis } = style;
  const { item } = drawn;
  const shape = closedShape(item, style);
  const alpha = shape.alpha ?? 1;
  const heat = emphasis.heat(item);
  const pill = item.kind === "input" || item.kind === "output";
  const { x, y } = rect;
  let { height } = rect;
  const radius = pill ? 12 : item.kind === "operator" ? 4 : 7;
  if (item.kind === "stack") {
    height -= 8;
    painter.rect(x + 8, y + 8, rect.width - 8, height, radius, shape);
    painter.rect(x + 4, y + 4, rect.width - 8, height, radius, shape);
    painter.rect(x, y, rect.width - 8, height, radius, shape);
  } else painter.rect(x, y, rect.width, height, radius, shape);
  const isModule = item.kind !== "operator" && !pill;
  const middle = x + (item.kind === "stack" ? rect.width - 8 : rect.width) / 2;
  const color = item.kind === "empty" ? theme.muted : theme.text;
  const title = item.canOpen ? `▸ ${item.title}` : item.title;
  const small: TextLook = { font: "small", color: theme.muted, align: "center", alpha };
  painter.text(title, middle, y + 13, { ...small, font: isModule ? "title" : "text", color });
  let line = y + 28;
  const details = [item.subtitle, heat?.text].filter(Boolean).join(" · ");
  if (details) {
    painter.text(details, middle, line, heat ? { ...small, color: theme.text } : small);
    line += 14;
  }
  for (const chip of item.chips) {
    painter.text(chip, middle, line - 1, small);
    line += 13;
  }
}

function paintLines(drawing: Drawing, view: Rect, style: Style, alpha: number): void {
  const { painter, zoom, theme, emphasis } = style;
  const inView = (line: Line): boolean =>
    Math.min(line.x1, line.x2) - (line.upwards ? 0 : 4) <= view.x + view.width &&
    Math.max(line.x1, line.x2) + (line.upwards ? 90 : 4) >= view.x &&
    Math.min(line.y1, line.y2) - 4 <= view.y + view.height &&
    Math.max(line.y1, line.y2) + 4 >= view.y;
  const normal: Line[] = [];
  const upwards: Line[] = [];
  const strong: Line[] = [];
  for (const line of drawing.lines) {
    if (!inView(line)) continue;
    if (emphasis.values && line.values.some((v) => emphasis.values!.has(v))) strong.push(line);
    else (line.upwards ? upwards : normal).push(line);
  }
  const faint = emphasis.lit ? 0.3 : 1;
  const width = Math.max(1.1, 0.7 / zoom);
  const arrows = zoom >= LEAST_TEXT;
  const plain: LineLook = { color: theme.line, width, alpha: alpha * faint, arrows };
  painter.lines(normal, plain);
  painter.lines(upwards, { ...plain, dash: true });
  painter.lines(strong, { color: theme.accent, width: Math.max(2, 1.2 / zoom), alpha, arrows });
  paintPorts(drawing, view, style, alpha, faint);
  if (10.5 * zoom < 5) return;
  for (const { x, y, text, align, values } of drawing.labels) {
    if (y < view.y - 10 || y > view.y + view.height + 10) continue;
    if (x < view.x - 100 || x > view.x + view.width + 100) continue;
    const isStrong = emphasis.values && values.some((v) => emphasis.values!.has(v));
    painter.text(text, x, y, {
      font: "small",
      color: isStrong ? theme.accent : theme.muted,
      align,
      alpha: isStrong ? alpha : alpha * faint,
      halo: theme.background,
    });
  }
}

function paintPorts(drawing: Drawing, view: Rect, style: Style, alpha: number, faint: number): void {
  const { painter, zoom, theme, emphasis } = style;
  if (4 * zoom <= 1.5) return;
  const normal: Port[] = [];
  const strong: Port[] = [];
  for (const port of drawing.ports) {
    if (port.x < view.x || port.x > view.x + view.width) continue;
    if (port.y < view.y || port.y > view.y + view.height) continue;
    (emphasis.values?.has(port.value) ? strong : normal).push(port);
  }
  painter.dots(normal, 2.8, { fill: theme.surface, stroke: theme.line, alpha: alpha * faint });
  painter.dots(strong, 3.4, { fill: theme.surface, stroke: theme.accent, alpha });
}

/** Mix two colours given as #rrggbb. */
export function mix(a: string, b: string, share: number): string {
  const parse = (color: string): number[] => [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  const [from, to] = [parse(a), parse(b)];
  const parts = from.map((v, i) => Math.round(v + (to[i] - v) * Math.max(0, Math.min(1, share))));
  return `#${parts.map((v) => v.toString(16).padStart(2, "0")).join("")}`;
}

/** The zoom below which boxes are drawn without text. */
const LEAST_TEXT = 0.36;

export class CanvasPainter implements Painter {
  private readonly widths = new Map<string, number>();

  constructor(readonly context: CanvasRenderingContext2D) {}

  rect(x: number, y: number, width: number, height: number, radius: number, shape: Shape): void {
    const c = this.context;
    c.globalAlpha = shape.alpha ?? 1;
    c.beginPath();
    c.roundRect(x, y, width, height, radius);
    if (shape.fill) {
      c.fillStyle = shape.fill;
      c.fill();
    }
    if (shape.stroke) {
      c.setLineDash(shape.dash ? [5, 4] : []);
      c.strokeStyle = shape.stroke;
      c.lineWidth = shape.width ?? 1;
      c.stroke();
    }
  }

  rects(rects: readonly Rect[], shape: Shape): void {
    const c = this.context;
    c.globalAlpha = shape.alpha ?? 1;
    c.setLineDash(shape.dash ? [5, 4] : []);
    c.beginPath();
    for (const { x, y, width, height } of rects) c.rect(x, y, width, height);
    c.fillStyle = shape.fill ?? "transparent";
    c.fill();
    c.strokeStyle = shape.stroke ?? "transparent";
    c.lineWidth = shape.width ?? 1;
    c.stroke();
  }

  text(text: string, x: number, y: number, { font, color, align, alpha, halo }: TextLook): void {
    const c = this.context;
    c.font = fontOf(font);
    c.textAlign = align;
    c.textBaseline = "middle";
    c.globalAlpha = alpha;
    if (halo) {
      c.setLineDash([]);
      c.lineJoin = "round";
      c.lineWidth = 3.5;
      c.strokeStyle = halo;
      c.strokeText(text, x, y);
    }
    c.fillStyle = color;
    c.fillText(text, x, y);
  }

  lines(lines: readonly Line[], { color, width, alpha, arrows, dash }: LineLook): void {
    if (!lines.length) return;
    const c = this.context;
    c.globalAlpha = alpha;
    c.strokeStyle = color;
    c.lineWidth = width;
    c.setLineDash(dash ? [5, 4] : []);
    c.beginPath();
    for (const line of lines) {
      if (Math.abs(line.x1 - line.x2) < 0.5 && !line.upwards) {
        c.moveTo(line.x1, line.y1);
        c.lineTo(line.x2, line.y2);
        continue;
      }
      const points = curve(line);
      c.moveTo(points[0], points[1]);
      for (let i = 2; i < points.length; i += 6) {
        c.bezierCurveTo(points[i], points[i + 1], points[i + 2], points[i + 3], points[i + 4], points[i + 5]);
      }
    }
    c.stroke();
    if (!arrows) return;
    c.fillStyle = color;
    c.beginPath();
    for (const { arrow, x2, y2 } of lines) {
      if (!arrow) continue;
      c.moveTo(x2, y2);
      c.lineTo(x2 - 3.4, y2 - 6.5);
      c.lineTo(x2 + 3.4, y2 - 6.5);
      c.closePath();
    }
    c.fill();
  }

  dots(points: readonly Port[], radius: number, { fill, stroke, alpha }: Shape): void {
    const c = this.context;
    c.globalAlpha = alpha ?? 1;
    c.setLineDash([]);
    c.lineWidth = 1.1;
    c.fillStyle = fill ?? "transparent";
    c.strokeStyle = stroke ?? "transparent";
    c.beginPath();
    for (const { x, y } of points) {
      c.moveTo(x + radius, y);
      c.arc(x, y, radius, 0, 2 * Math.PI);
    }
    c.fill();
    c.stroke();
  }

  measure(text: string, font: Font): number {
    const key = `${font[1]}${text}`;
    let width = this.widths.get(key);
    if (width === undefined) {
      this.context.font = fontOf(font);
      width = this.context.measureText(text).width;
      this.widths.set(key, width);
    }
    return width;
  }
}

/** The points of Bezier curves: a start, then two control points and an end for each. */
function curve({ x1, y1, x2, y2, upwards }: Line): number[] {
  if (upwards) {
    const side = Math.max(x1, x2) + 70;
    const middle = (y1 + y2) / 2;
    return [x1, y1, x1, y1 + 26, side, y1 + 26, side, middle, side, y2 - 26, x2, y2 - 26, x2, y2];
  }
  const middle = (y1 + y2) / 2;
  return [x1, y1, x1, middle, x2, middle, x2, y2];
}

/** A coordinate of a curve whose first control point is at an index; its start lies before that. */
function bezier(points: readonly number[], index: number, t: number): number {
  const u = 1 - t;
  const [start, first] = [points[index - 2], points[index]];
  const [second, end] = [points[index + 2], points[index + 4]];
  return u * u * u * start + 3 * u * u * t * first + 3 * u * t * t * second + t * t * t * end;
}

/** How far a point is from a line, at least approximately. */
export function distanceTo(line: Line, x: number, y: number): number {
  const points = curve(line);
  let best = Infinity;
  for (let i = 2; i < points.length; i += 6) {
    for (let k = 0; k <= 12; k++) {
      const px = bezier(points, i, k / 12);
      const py = bezier(points, i + 1, k / 12);
      best = Math.min(best, Math.hypot(px - x, py - y));
    }
  }
  return best;
}

/** Builds an SVG document with the methods of the DOM, so that texts stay texts. */
export class SvgPainter implements Painter {
  readonly svg: SVGSVGElement;

  constructor(
    view: Rect,
    background: string,
    readonly measure: (text: string, font: Font) => number,
  ) {
    this.svg = this.create("svg", {
      width: Math.ceil(view.width),
      height: Math.ceil(view.height),
      viewBox: `${view.x} ${view.y} ${view.width} ${view.height}`,
      "font-family": FAMILY,
    }) as SVGSVGElement;
    this.add("rect", { x: view.x, y: view.y, width: view.width, height: view.height, fill: background });
  }

  private create(name: string, attributes: Record<string, string | number>): SVGElement {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
    return element;
  }

  private add(name: string, attributes: Record<string, string | number>): SVGElement {
    const element = this.create(name, attributes);
    this.svg.append(element);
    return element;
  }

  rect(x: number, y: number, width: number, height: number, radius: number, shape: Shape): void {
    this.add("rect", {
      x,
      y,
      width,
      height,
      rx: radius,
      fill: shape.fill ?? "none",
      stroke: shape.stroke ?? "none",
      "stroke-width": shape.width ?? 1,
      opacity: shape.alpha ?? 1,
      ...(shape.dash ? { "stroke-dasharray": "5 4" } : {}),
    });
  }

  rects(rects: readonly Rect[], shape: Shape): void {
    for (const { x, y, width, height } of rects) this.rect(x, y, width, height, 0, shape);
  }

  text(text: string, x: number, y: number, { font, color, align, alpha, halo }: TextLook): void {
    const outline = { stroke: halo ?? "", "stroke-width": 3.5, "paint-order": "stroke" };
    const anchor = align === "center" ? "middle" : align === "right" ? "end" : "start";
    const element = this.add("text", {
      x,
      // many programs do not know dominant-baseline
      y: y + 0.35 * HEIGHTS[font],
      fill: color,
      opacity: alpha,
      "text-anchor": anchor,
      "font-size": HEIGHTS[font],
      "font-weight": SIZES[font].slice(0, 3),
      ...(halo ? { ...outline, "stroke-linejoin": "round" } : {}),
    });
    element.textContent = text;
  }

  lines(lines: readonly Line[], { color, width, alpha, arrows, dash }: LineLook): void {
    const look = { fill: "none", stroke: color, "stroke-width": width, opacity: alpha };
    for (const line of lines) {
      const p = curve(line);
      let d = `M${p[0]} ${p[1]}`;
      for (let i = 2; i < p.length; i += 6) d += `C${p.slice(i, i + 6).join(" ")}`;
      this.add("path", { d, ...look, ...(dash ? { "stroke-dasharray": "5 4" } : {}) });
      if (line.arrow && arrows) {
        this.add("path", { d: `M${line.x2} ${line.y2}l-3.4 -6.5h6.8z`, fill: color, opacity: alpha });
      }
    }
  }

  dots(points: readonly Port[], radius: number, { fill, stroke, alpha }: Shape): void {
    const look = { fill: fill ?? "none", stroke: stroke ?? "none", opacity: alpha ?? 1 };
    for (const { x, y } of points) this.add("circle", { cx: x, cy: y, r: radius, ...look });
  }
}
