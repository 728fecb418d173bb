/** The canvas: what is open, pan and zoom, animation, and the events of the pointer. */

import type { Model } from "./model";
import { type Emphasis, paint, readTheme, type Theme } from "./paint";
import { CanvasPainter, SvgPainter } from "./painters";
import { type Drawn, type Font, type Rect, type Drawing, DrawingBuilder, topMiddle } from "./drawing";
import { type Hit, hit } from "./pointing";

export interface Listener {
  /** A click on an item or an edge, or on nothing. */
  onClick(hit: Hit): void;
  onHover(hit: Hit, x: number, y: number): void;
  /** Something was drawn. */
  onDraw(): void;
}

const FIRST_BOXES = 26;
const FIRST_DEPTH = 5;
const DURATION = 260;
const LARGEST = 4;
const SMALLEST = 0.02;
/** The zoom at which the first picture shows a part, if the whole width would need a smaller one. */
const READABLE = 0.55;
const SMALLEST_TO_FIT = 0.45;
const MOST_BOXES = 5000;

export class Picture {
  readonly open = new Set<number>([0]);
  readonly unstacked = new Set<number>();
  showEmpty = false;
  allUnstacked = false;
  emphasis: Emphasis = {
    selected: new Set(),
    hovered: null,
    values: null,
    lit: null,
    heat: () => null,
    mark: () => null,
  };
  drawing!: Drawing;
  view = { x: 0, y: 0, zoom: 1 };
  drawnCount = 0;
  layoutMs = 0;
  drawMs = 0;

  readonly builder: DrawingBuilder;
  private readonly painter: CanvasPainter;
  private theme: Theme;
  private previous: Map<string, Rect> | null = null;
  private origin: Rect | null = null;
  private started = 0;
  private pending = false;

  constructor(
    readonly model: Model,
    readonly canvas: HTMLCanvasElement,
    private readonly listener: Listener,
  ) {
    this.painter = new CanvasPainter(canvas.getContext("2d")!);
    this.builder = new DrawingBuilder(model, (text, font) => this.painter.measure(text, font));
    this.theme = readTheme(canvas);
    this.openFirst();
    this.layOut();
    this.listen();
    let hidden = canvas.clientWidth === 0;
    new ResizeObserver(() => {
      // a page that was loaded in a hidden frame has no size until it is shown
      if (hidden && canvas.clientWidth > 0) {
        hidden = false;
        this.fit();
      } else this.draw();
    }).observe(canvas);
  }

  /** Open modules level by level while the picture is easy to read; then one that shows more. */
  private openFirst(): void {
    const { contents } = this.builder;
    const choices = this.choices();
    const size = (box: number): number => contents.build(box, choices).items.length;
    let level = [0];
    let count = 0;
    for (let depth = 0; level.length && depth < FIRST_DEPTH; depth++) {
      const inside = level.flatMap((box) => contents.build(box, choices).items);
      const next = inside.flatMap((item) => (item.canOpen ? item.boxes.slice(0, 1) : []));
      const modules = next.filter((box) => !this.model.isNode(box)).slice(0, FIRST_BOXES);
      count += inside.length;
      const more = modules.reduce((sum, box) => sum + size(box), 0);
      const fits = count + more <= FIRST_BOXES || (next.length === 1 && more <= 2 * FIRST_BOXES);
      if (!fits && count < FIRST_BOXES) {
        const largest = modules.reduce((a, b) => (this.weight(b) > this.weight(a) ? b : a), modules[0]);
        if (largest !== undefined && size(largest) <= FIRST_BOXES) this.open.add(largest);
      }
      if (!fits) break;
      for (const box of modules) this.open.add(box);
      level = modules;
    }
  }

  private weight(box: number): number {
    return this.model.nodesIn(box).length;
  }

  private choices() {
    return {
      isOpen: (box: number) => this.open.has(box),
      isUnstacked: (box: number) => this.allUnstacked || this.unstacked.has(box),
      showEmpty: this.showEmpty,
    };
  }

  layOut(): void {
    const start = performance.now();
    this.drawing = this.builder.build(this.choices());
    this.layoutMs = performance.now() - start;
  }

  /** Open or close boxes, keep one item in place, and move the rest smoothly. */
  change(edit: () => void, changed: Iterable<number>, anchor?: string): void {
    const before = this.drawing;
    const rects = new Map(before.drawn.map((d) => [d.item.key, this.rectNow(d)]));
    const kept = anchor === undefined ? undefined : before.byKey.get(anchor);
    edit();
    for (const box of changed) this.builder.invalidate(box);
    this.layOut();
    let origin: Rect | null = null;
    if (kept !== undefined) {
      const old = before.drawn[kept];
      const index = this.drawing.byKey.get(anchor!) ?? this.drawing.byKey.get(`b${old.item.boxes[0]}`);
      if (index !== undefined) {
        const now = this.drawing.drawn[index];
        const dx = now.x - old.x;
        const dy = now.y - old.y;
        this.view.x += dx;
        this.view.y += dy;
        for (const rect of rects.values()) {
          rect.x += dx;
          rect.y += dy;
        }
        origin = rects.get(old.item.key) ?? null;
      }
    }
    this.origin = origin;
    this.previous = matchMedia("(prefers-reduced-motion: reduce)").matches ? null : rects;
    this.started = performance.now();
    this.draw();
  }

  /** End the movement of the last change at once. */
  finishMove(): void {
    this.previous = this.origin = null;
    this.draw();
  }

  setOpen(box: number, open: boolean, anchor = `b${box}`): void {
    if (this.open.has(box) === open || box === 0) return;
    this.change(() => void (open ? this.open.add(box) : this.open.delete(box)), [box], anchor);
  }

  /** Open a box so far that the given box can be seen. */
  reveal(box: number): void {
    const missing: number[] = [];
    for (let b = this.model.parent[box]; b > 0; b = this.model.parent[b]) {
      if (!this.open.has(b) && this.builder.contents.onlyNode(b) < 0) missing.push(b);
    }
    if (missing.length) {
      this.change(() => missing.forEach((b) => this.open.add(b)), missing);
    }
    if (!this.drawing.byKey.has(`b${box}`) && !this.model.isNode(box)) this.setOpen(box, true);
  }

  /** The key of the drawn item that is or holds a box. */
  keyOf(box: number): string | null {
    for (let b = box; b >= 0; b = this.model.parent[b]) {
      if (this.drawing.byKey.has(`b${b}`)) return `b${b}`;
      const stack = this.drawing.stackOf.get(b);
      if (stack !== undefined) return stack;
    }
    return null;
  }

  /** Open all modules down to a depth, as far as the number of boxes allows. */
  openToDepth(depth: number): boolean {
    const { contents } = this.builder;
    this.builder.clear();
    this.open.clear();
    this.open.add(0);
    let level = [0];
    let count = 0;
    let complete = true;
    for (let d = 1; d <= depth && level.length; d++) {
      const next: number[] = [];
      for (const box of level) {
        const items = contents.build(box, this.choices()).items;
        count += items.length;
        for (const item of items) if (item.canOpen) next.push(...item.boxes);
      }
      if (d === depth) break;
      level = [];
      for (const box of next) {
        if (count + level.length >= MOST_BOXES) {
          complete = false;
          break;
        }
        this.open.add(box);
        level.push(box);
      }
    }
    this.builder.clear();
    this.change(() => undefined, []);
    this.fit();
    return complete;
  }

  /** Show the whole picture, or as much of its top as can be read. */
  fit(whole = false): void {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const zoom = Math.min(width / this.drawing.width, height / this.drawing.height, 1.25);
    const fitting = width / this.drawing.width;
    const readable = fitting < SMALLEST_TO_FIT ? READABLE : Math.min(fitting, 1);
    this.view.zoom = whole ? Math.max(zoom, SMALLEST) : Math.max(zoom, readable);
    const beyond = this.drawing.width - width / this.view.zoom;
    const left = topMiddle(this.drawing) - width / 2 / this.view.zoom;
    this.view.x = beyond <= 0 ? beyond / 2 : Math.min(Math.max(left, 0), beyond);
    this.view.y =
      this.drawing.height * this.view.zoom <= height
        ? this.drawing.height / 2 - height / 2 / this.view.zoom
        : -8;
    this.draw();
  }

  /** Move so that an item is in view; zoom in if it is too small to read. */
  showItem(key: string): void {
    const index = this.drawing.byKey.get(key);
    if (index === undefined) return;
    const d = this.drawing.drawn[index];
    const { clientWidth: width, clientHeight: height } = this.canvas;
    this.view.zoom = Math.max(this.view.zoom, 0.6);
    const { x, y, zoom } = this.view;
    const inside =
      d.x >= x &&
      d.y >= y &&
      d.x + d.width <= x + width / zoom &&
      d.y + Math.min(d.height, 60) <= y + height / zoom;
    if (!inside) {
      this.view.x = d.x + d.width / 2 - width / 2 / zoom;
      this.view.y = d.height * zoom > height * 0.8 ? d.y - 20 / zoom : d.y + d.height / 2 - height / 2 / zoom;
    }
    this.draw();
  }

  zoomAt(factor: number, px = this.canvas.clientWidth / 2, py = this.canvas.clientHeight / 2): void {
    const zoom = Math.min(LARGEST, Math.max(SMALLEST, this.view.zoom * factor));
    this.view.x += px / this.view.zoom - px / zoom;
    this.view.y += py / this.view.zoom - py / zoom;
    this.view.zoom = zoom;
    this.draw();
  }

  pan(dx: number, dy: number): void {
    this.view.x += dx / this.view.zoom;
    this.view.y += dy / this.view.zoom;
    this.draw();
  }

  refreshTheme(): void {
    this.theme = readTheme(this.canvas);
    this.draw();
  }

  draw(): void {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.drawNow();
    });
  }

  private progress(): number {
    if (!this.previous) return 1;
    const t = Math.min(1, (performance.now() - this.started) / DURATION);
    if (t >= 1) this.previous = this.origin = null;
    return t * t * (3 - 2 * t);
  }

  private rectNow(drawn: Drawn): Rect {
    const t = this.progress();
    const from = this.previous && (this.previous.get(drawn.item.key) ?? this.origin);
    if (!from || t >= 1) return { x: drawn.x, y: drawn.y, width: drawn.width, height: drawn.height };
    const between = (a: number, b: number): number => a + (b - a) * t;
    return {
      x: between(from.x, drawn.x),
      y: between(from.y, drawn.y),
      width: between(from.width, drawn.width),
      height: between(from.height, drawn.height),
    };
  }

  drawNow(): void {
    const start = performance.now();
    const { canvas, view, theme } = this;
    const ratio = devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * ratio);
    const height = Math.round(canvas.clientHeight * ratio);
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
    }
    const c = this.painter.context;
    c.setTransform(1, 0, 0, 1, 0, 0);
    c.globalAlpha = 1;
    c.fillStyle = theme.background;
    c.fillRect(0, 0, width, height);
    const zoom = view.zoom * ratio;
    c.setTransform(zoom, 0, 0, zoom, -view.x * zoom, -view.y * zoom);
    const t = this.progress();
    const moving = this.previous !== null;
    this.drawnCount = paint(
      this.drawing,
      this.visible(),
      { painter: this.painter, zoom: view.zoom, theme, emphasis: this.emphasis },
      moving ? (d) => this.rectNow(d) : undefined,
      moving ? t : 1,
    );
    this.drawMs = performance.now() - start;
    if (moving) this.draw();
    this.listener.onDraw();
  }

  visible(): Rect {
    const { x, y, zoom } = this.view;
    const { clientWidth, clientHeight } = this.canvas;
    return { x, y, width: clientWidth / zoom, height: clientHeight / zoom };
  }

  svg(theme = this.theme): SVGSVGElement {
    const { drawing } = this;
    const measure = (text: string, font: Font): number => this.painter.measure(text, font);
    const painter = new SvgPainter(drawing, theme.background, measure);
    paint(drawing, drawing, { painter, zoom: 1, theme, emphasis: this.emphasis });
    return painter.svg;
  }

  private hit(event: PointerEvent): Hit {
    return hit(this.drawing, this.view, event.offsetX, event.offsetY);
  }

  private listen(): void {
    const { canvas } = this;
    let down: { x: number; y: number; moved: boolean } | null = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      down = { x: event.offsetX, y: event.offsetY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!down) {
        this.hover(this.hit(event), event.clientX, event.clientY);
        return;
      }
      const dx = event.offsetX - down.x;
      const dy = event.offsetY - down.y;
      if (!down.moved && Math.hypot(dx, dy) < 4) return;
      this.pan(-dx, -dy);
      down = { x: event.offsetX, y: event.offsetY, moved: true };
    });
    canvas.addEventListener("pointerup", (event) => {
      if (down && !down.moved) this.listener.onClick(this.hit(event));
      down = null;
    });
    canvas.addEventListener("pointercancel", () => (down = null));
    canvas.addEventListener("pointerleave", () => this.hover(null, 0, 0));
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const unit = event.deltaMode === 1 ? 16 : 1;
        if (event.ctrlKey || event.metaKey) {
          this.zoomAt(Math.exp((-event.deltaY * unit) / 200), event.offsetX, event.offsetY);
        } else if (event.shiftKey) this.pan(event.deltaY * unit, event.deltaX * unit);
        else this.pan(event.deltaX * unit, event.deltaY * unit);
      },
      { passive: false },
    );
  }

  private hover(hit: Hit, x: number, y: number): void {
    const key = hit?.kind === "item" ? hit.drawn.item.key : null;
    const active = hit && (hit.kind === "values" || !hit.drawn.open || hit.header);
    this.canvas.style.cursor = active ? "pointer" : "grab";
    if (key !== this.emphasis.hovered) {
      this.emphasis.hovered = key;
      this.draw();
    }
    this.listener.onHover(hit, x, y);
  }
}
