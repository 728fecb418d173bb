/** The two ways to draw: on a canvas, and as an SVG document. */

import type { Font, Line, Port, Rect } from "./drawing";
import type { LineLook, Painter, Shape, TextLook } from "./paint";

const SIZES: Record<Font, string> = { title: "600 12px", text: "500 12px", small: "400 10.5px" };
const HEIGHTS: Record<Font, number> = { title: 12, text: 12, small: 10.5 };
const FAMILY = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

function fontOf(font: Font): string {
  return `${SIZES[font]} ${FAMILY}`;
}

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
