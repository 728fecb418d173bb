/** Draw what is laid out: boxes, titles, edges and ports, with any painter. */

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

export interface Shape {
  fill?: string | undefined;
  stroke?: string | undefined;
  width?: number;
  dash?: boolean;
  alpha?: number;
}

export interface TextLook {
  font: Font;
  color: string;
  align: "left" | "center" | "right";
  alpha: number;
  /** The colour around the letters, where lines may lie behind them. */
  halo?: string | undefined;
}

export interface LineLook {
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
function mix(a: string, b: string, share: number): string {
  const parse = (color: string): number[] => [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  const [from, to] = [parse(a), parse(b)];
  const parts = from.map((v, i) => Math.round(v + (to[i] - v) * Math.max(0, Math.min(1, share))));
  return `#${parts.map((v) => v.toString(16).padStart(2, "0")).join("")}`;
}

/** The zoom below which boxes are drawn without text. */
const LEAST_TEXT = 0.36;
