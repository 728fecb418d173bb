/** The page around the pictures: search, colours, breadcrumbs, links, help. */

import type { PageData } from "./data";
import { button, clear, el, formatCount, visible } from "./dom";
import { Model } from "./model";
import { type Aggregate, formatNumber, Overlay, type ScaleKind } from "./overlay";
import { readTheme } from "./paint";
import { type ChangedBy, Pane } from "./pane";
import type { Picture } from "./picture";
import type { Hit } from "./pointing";
import { type Found, search } from "./search";
import { SearchBox } from "./searchbox";

const HELP: [string, string][] = [
  ["click", "open a box, or close it by its name; select an operator or an edge"],
  ["drag, wheel", "move the picture"],
  ["Ctrl + wheel, + and -", "zoom"],
  ["0", "show everything"],
  ["/", "search"],
  ["arrow keys", "go to the next box; with Shift, move the picture"],
  ["Enter", "open or close the selected box"],
  ["Esc", "go to the box around it"],
  ["Alt + left, Alt + right", "back and forward"],
];

const LONGEST_TIP = 300;
/** After so many milliseconds without an arrow key, the selection becomes an entry in the history. */
const KEY_REST = 400;

export class App {
  private readonly panes: Pane[];
  private active: Pane;
  private readonly status = el("footer", { role: "status", "aria-live": "polite" });
  private readonly crumbs = el("nav", { class: "crumbs", "aria-label": "where the selection is" });
  private readonly tip = el("div", { class: "tip", role: "tooltip", hidden: true });
  private readonly left = el("aside", { class: "left", "aria-label": "module tree" });
  private readonly right = el("aside", { class: "right", "aria-label": "details" });
  private readonly legend = el("div", { class: "legend", hidden: true });
  private readonly search = new SearchBox(
    (query) => search(this.active.model, query),
    (entry) => this.goTo(entry),
    () => this.active.picture.canvas.focus(),
  );
  private overlayIndex = -1;
  private aggregate: Aggregate | null = null;
  private scale: ScaleKind = "linear";
  /** The fragment that the panes show. */
  private applied = "";
  private pendingLink: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly data: PageData,
    root: HTMLElement,
  ) {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    this.setTheme(dark.matches ? "dark" : "light");
    dark.addEventListener("change", () => this.setTheme(dark.matches ? "dark" : "light"));
    const middle = el("main", { class: "panes" });
    const above = el("div", { class: "above" }, this.crumbs, this.legend);
    root.append(
      this.header(),
      this.left,
      el("div", { class: "middle" }, above, middle),
      this.right,
      this.status,
      this.tip,
    );
    this.panes = data.models.map(
      (raw) =>
        new Pane(
          new Model(raw),
          {
            onChange: (pane, by) => this.onChange(pane, by),
            onActivate: (pane) => this.activate(pane),
            onHover: (pane, hit, x, y) => this.showTip(pane, hit, x, y),
            onDraw: (pane) => this.showStatus(pane),
          },
          middle,
          data.models.length > 1,
        ),
    );
    this.active = this.panes[0];
    this.activate(this.panes[0]);
    if (data.overlays.length) this.showOverlay(0);
    else this.showLegend();
    for (const pane of this.panes) pane.picture.fit();
    this.showCrumbs();
    addEventListener("keydown", (event) => this.onKey(event));
    addEventListener("hashchange", () => this.restore());
    addEventListener("beforeprint", () => this.beforePrint());
    addEventListener("afterprint", () => document.querySelector(".print")?.remove());
    if (location.hash.length > 1) this.restore();
    for (const pane of this.panes) pane.picture.finishMove();
  }

  private header(): HTMLElement {
    const depths = el(
      "span",
      { class: "group", role: "group", "aria-label": "depth" },
      el("span", { class: "label" }, "depth"),
    );
    for (const depth of [1, 2, 3, 4]) {
      const title = `open modules to depth ${depth}`;
      depths.append(button(String(depth), () => this.openToDepth(depth), { title }));
    }
    depths.append(button("all", () => this.openToDepth(Infinity), { title: "open everything" }));
    const more = el("details", { class: "menu" }, el("summary", { title: "more" }, "☰ more"));
    const menu = el("div", { class: "menu-items" });
    menu.append(
      this.check("modules without nodes", (picture, on) => (picture.showEmpty = on)),
      this.check("repeated modules one by one", (picture, on) => (picture.allUnstacked = on)),
      button("save as SVG", () => this.saveSvg()),
      button("print", () => print()),
      button("light or dark", () => this.toggleTheme()),
      button("help", () => this.showHelp()),
    );
    more.append(menu);
    more.addEventListener("keydown", (event) => {
      if (event.key === "Escape") more.open = false;
    });
    addEventListener("pointerdown", (event) => {
      if (!more.contains(event.target as Node)) more.open = false;
    });
    const brand = el("strong", { class: "brand" }, "modelexport");
    return el("header", {}, brand, this.search.element, depths, this.colors(), more);
  }

  /** A check box that changes all pictures. */
  private check(text: string, change: (picture: Picture, on: boolean) => void): HTMLElement {
    const box = el("input", { type: "checkbox" });
    box.addEventListener("change", () => {
      for (const pane of this.panes) pane.rebuild(() => change(pane.picture, box.checked));
    });
    return el("label", { class: "check" }, box, text);
  }

  private colors(): HTMLElement {
    const group = el("span", { class: "group colors" });
    if (!this.data.overlays.length) return group;
    const select = el("select", { "aria-label": "colour" }, el("option", { value: -1 }, "no colour"));
    this.data.overlays.forEach((overlay, i) => {
      select.append(el("option", { value: i }, visible(overlay.name)));
    });
    select.value = "0";
    select.addEventListener("change", () => this.showOverlay(Number(select.value)));
    const options = (...texts: string[]): HTMLElement[] => texts.map((text) => el("option", {}, text));
    const scale = el("select", { "aria-label": "scale" }, ...options("linear", "log"));
    scale.addEventListener("change", () => {
      this.scale = scale.value as ScaleKind;
      this.showOverlay(this.overlayIndex, true);
    });
    const attributes = { "aria-label": "over modules", class: "aggregate" };
    const aggregate = el("select", attributes, ...options("sum", "max"));
    aggregate.addEventListener("change", () => {
      this.aggregate = aggregate.value as Aggregate;
      this.showOverlay(this.overlayIndex, true);
    });
    group.append(el("span", { class: "label" }, "colour"), select, scale, aggregate);
    return group;
  }

  private showOverlay(index: number, keep = false): void {
    this.overlayIndex = index;
    if (!keep && index >= 0) this.aggregate = this.data.overlays[index].aggregate;
    const aggregate = document.querySelector<HTMLSelectElement>("select.aggregate");
    if (aggregate && this.aggregate) aggregate.value = this.aggregate;
    const aggregateOf = (i: number): Aggregate =>
      i === index && this.aggregate ? this.aggregate : this.data.overlays[i].aggregate;
    const all = this.panes.map((pane) =>
      this.data.overlays.map((raw, i) => new Overlay(raw, pane.model, aggregateOf(i), this.scale)),
    );
    this.data.overlays.forEach((_, i) => Overlay.align(all.map((overlays) => overlays[i])));
    this.panes.forEach((pane, p) => pane.setOverlay(index < 0 ? null : all[p][index], all[p]));
    this.showLegend();
  }

  private showLegend(): void {
    const overlay = this.active.overlay;
    clear(this.legend);
    const marks = this.panes.some((pane) => Object.keys(pane.model.raw.marks).length);
    this.legend.hidden = !overlay && !marks;
    if (overlay) {
      const combined = overlay.aggregate === "sum" ? "sum over" : "maximum of";
      const low = overlay.scale === "log" ? overlay.text(overlay.least) : formatNumber(0, overlay.raw.unit);
      this.legend.append(
        el("span", {}, visible(overlay.raw.name)),
        el("span", { class: "note" }, low),
        el("span", { class: "ramp" }),
        el("span", { class: "note" }, overlay.text(overlay.most)),
        el("span", { class: "note" }, `${combined} submodules, ${overlay.scale}`),
      );
    }
    if (marks) {
      for (const mark of ["removed", "added", "changed"]) {
        this.legend.append(el("span", { class: `swatch ${mark}` }), el("span", { class: "note" }, mark));
      }
    }
  }

  private goTo(entry: Found): void {
    const pane = this.active;
    if (entry.kind === "module") pane.selectModule(entry.module);
    else if (entry.kind === "node") pane.select({ kind: "box", box: pane.model.boxOfNode(entry.node) });
    else pane.select({ kind: "value", value: entry.value });
  }

  private activate(pane: Pane): void {
    if (this.active === pane && this.left.contains(pane.treeElement)) return;
    this.active = pane;
    this.left.replaceChildren(pane.treeElement);
    this.right.replaceChildren(pane.detailsElement);
    this.panes.forEach((each) => each.element.classList.toggle("active", each === pane));
    this.showCrumbs();
    this.showStatus(pane);
  }

  private onChange(pane: Pane, by: ChangedBy): void {
    this.activate(pane);
    for (const other of this.panes) if (other !== pane) this.follow(pane, other);
    this.showCrumbs();
    this.showStatus(pane);
    clearTimeout(this.pendingLink);
    if (by === "arrow key") this.pendingLink = setTimeout(() => this.writeLink(pane), KEY_REST);
    else this.writeLink(pane);
  }

  private writeLink(pane: Pane): void {
    this.applied = pane.link();
    if (location.hash === this.applied) return;
    try {
      location.hash = this.applied;
    } catch {
      // too many changes for the browser, or a frame that may not navigate: the page works without
    }
  }

  /** Open and select in another model what has the same name there. */
  private follow(pane: Pane, other: Pane): void {
    other.restore(pane.link());
  }

  private restore(): void {
    if (location.hash === this.applied) return;
    clearTimeout(this.pendingLink);
    this.applied = location.hash;
    for (const pane of this.panes) pane.restore(location.hash);
    this.showCrumbs();
  }

  private showCrumbs(): void {
    const { model } = this.active;
    clear(this.crumbs);
    const module = this.active.selectedModule();
    const chain: number[] = [];
    for (let m = module; m >= 0; m = model.raw.modules.parent[m]) chain.push(m);
    const root = model.modulePaths.length ? model.className(0) || model.file : model.file;
    if (!chain.length) this.crumbs.append(el("span", {}, visible(root)));
    chain.reverse().forEach((m, i) => {
      if (i) this.crumbs.append(el("span", { class: "note", "aria-hidden": "true" }, "›"));
      const name = m === 0 ? root : model.text(model.raw.modules.name[m]);
      this.crumbs.append(button(name, () => this.active.selectModule(m), { class: "link" }));
    });
  }

  private showStatus(pane: Pane): void {
    if (pane !== this.active) return;
    const { picture, model } = pane;
    const boxes = picture.drawing.drawn.length - 1;
    const text = `${formatCount(boxes)} boxes for ${formatCount(model.nodeCount)} nodes`;
    const name = pane.selectedName();
    const line = name ? `${text}, selected: ${visible(name)}` : text;
    if (this.status.textContent !== line) this.status.textContent = line;
  }

  private showTip(pane: Pane, hit: Hit, x: number, y: number): void {
    const { model } = pane;
    const lines: string[] = [];
    if (hit?.kind === "values") {
      for (const value of hit.values.slice(0, 6)) {
        lines.push(`${model.valueNames[value]}  ${model.type(value)}`);
      }
      if (hit.values.length > 6) lines.push(`and ${hit.values.length - 6} more`);
    } else if (hit) {
      const { item } = hit.drawn;
      const heat = pane.overlay?.heat(item);
      if (item.kind === "input" || item.kind === "output") {
        lines.push(`${item.kind} ${model.valueNames[item.subject]}`, model.type(item.subject));
      } else if (item.boxes.length && !hit.drawn.open) {
        const box = item.boxes[0];
        const module = model.moduleOf(box);
        lines.push(module >= 0 ? model.modulePaths[module] || "(root)" : item.title);
        lines.push(model.isNode(box) ? model.op(box - model.groupCount) : model.className(module));
        const nodes = item.boxes.reduce((sum, box) => sum + model.nodesIn(box).length, 0);
        if (item.kind !== "operator") lines.push(`${nodes} ${nodes === 1 ? "node" : "nodes"}`);
      }
      if (heat) lines.push(`${pane.overlay!.raw.name}: ${heat.text}`);
    }
    this.tip.hidden = !lines.length;
    if (!lines.length) return;
    const shown = lines.filter(Boolean).map((text) => visible(text.slice(0, LONGEST_TIP)));
    this.tip.replaceChildren(...shown.map((text) => el("div", {}, text)));
    const { innerWidth, innerHeight } = window;
    this.tip.style.left = `${Math.min(x + 14, innerWidth - this.tip.offsetWidth - 8)}px`;
    this.tip.style.top = `${Math.min(y + 16, innerHeight - this.tip.offsetHeight - 8)}px`;
  }

  private openToDepth(depth: number): void {
    let complete = true;
    for (const pane of this.panes) complete = pane.openToDepth(depth) && complete;
    if (complete) return;
    this.status.textContent = "Too many boxes to open all of them: open further ones by a click.";
  }

  private saveSvg(): void {
    const text = new XMLSerializer().serializeToString(this.active.picture.svg());
    const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    const link = el("a", { href: url, download: `${this.active.model.file.replace(/\.onnx$/, "")}.svg` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  /** Print the pictures in light colours, whatever the page has. */
  private beforePrint(): void {
    const { dataset } = document.documentElement;
    const theme = dataset["theme"]!;
    dataset["theme"] = "light";
    const light = readTheme(document.body);
    dataset["theme"] = theme;
    document.body.append(el("div", { class: "print" }, ...this.panes.map((pane) => pane.picture.svg(light))));
  }

  private toggleTheme(): void {
    const theme = document.documentElement.dataset["theme"];
    this.setTheme(theme === "dark" ? "light" : "dark");
  }

  private setTheme(theme: string): void {
    document.documentElement.dataset["theme"] = theme;
    this.panes?.forEach((pane) => pane.picture.refreshTheme());
  }

  private showHelp(): void {
    const dialog = el("dialog", { class: "help", "aria-label": "help" }, el("h2", {}, "Keys and mouse"));
    const list = el("dl");
    for (const [key, text] of HELP) list.append(el("dt", {}, key), el("dd", {}, text));
    dialog.append(list, button("close", () => dialog.close()));
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  }

  private onKey(event: KeyboardEvent): void {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || target.matches("input, select, textarea")) return;
    if (event.key === "/") {
      this.search.input.focus();
      event.preventDefault();
    } else if (event.key === "?") this.showHelp();
  }

  /** What tests read: the pictures as they are drawn. */
  inspect(): { panes: Pane[] } {
    return { panes: this.panes };
  }
}
