/** A small picture of everything, with a frame around what is in view. */

import type { Picture } from "./picture";

const WIDTH = 124;
const HEIGHT = 156;
/** In a narrower picture the minimap would hide too much. */
const LEAST_WIDTH = 480;

export class Minimap {
  constructor(
    private readonly picture: Picture,
    private readonly canvas: HTMLCanvasElement,
  ) {
    let held = false;
    const move = (event: PointerEvent): void => {
      const { x, y, zoom } = this.frame();
      const view = picture.visible();
      picture.view.x = (event.offsetX - x) / zoom - view.width / 2;
      picture.view.y = (event.offsetY - y) / zoom - view.height / 2;
      picture.draw();
    };
    canvas.addEventListener("pointerdown", (event) => {
      held = true;
      canvas.setPointerCapture(event.pointerId);
      move(event);
    });
    canvas.addEventListener("pointermove", (event) => held && move(event));
    canvas.addEventListener("pointerup", () => (held = false));
  }

  private frame(): { x: number; y: number; zoom: number } {
    const { drawing } = this.picture;
    const zoom = Math.min(WIDTH / drawing.width, HEIGHT / drawing.height);
    return { x: (WIDTH - drawing.width * zoom) / 2, y: (HEIGHT - drawing.height * zoom) / 2, zoom };
  }

  draw(): void {
    const { canvas, picture } = this;
    const { drawing } = picture;
    const view = picture.visible();
    const right = view.x + view.width;
    const bottom = view.y + view.height;
    const all = view.x <= 0 && view.y <= 0 && right >= drawing.width && bottom >= drawing.height;
    canvas.hidden = all || picture.canvas.clientWidth < LEAST_WIDTH;
    if (canvas.hidden) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = WIDTH * ratio;
    canvas.height = HEIGHT * ratio;
    const c = canvas.getContext("2d")!;
    const { x, y, zoom } = this.frame();
    const style = getComputedStyle(canvas);
    c.setTransform(ratio * zoom, 0, 0, ratio * zoom, x * ratio, y * ratio);
    c.fillStyle = style.getPropertyValue("--module");
    for (const d of drawing.drawn) {
      // of a large picture only the outermost boxes can be seen
      if (d.around < 0 || (d.depth > 1 && d.width * zoom < 1.5)) continue;
      c.globalAlpha = d.open ? 0.12 : 0.55;
      c.fillRect(d.x, d.y, Math.max(d.width, 1 / zoom), Math.max(d.height, 1 / zoom));
    }
    c.globalAlpha = 1;
    c.strokeStyle = style.getPropertyValue("--accent");
    c.lineWidth = 1.5 / zoom;
    const left = Math.max(view.x, -x / zoom);
    const top = Math.max(view.y, -y / zoom);
    const width = Math.min(right, (WIDTH - x) / zoom) - left;
    const height = Math.min(bottom, (HEIGHT - y) / zoom) - top;
    c.strokeRect(left, top, Math.max(0, width), Math.max(0, height));
  }
}
