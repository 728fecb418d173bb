/** The module tree with share bars: only the rows in view are in the document. */

import { el, visible } from "./dom";
import type { Model } from "./model";

const ROW = 22;

/** What the bars show: the share of each module, and the text that goes with it. */
export interface Shares {
  share(module: number): number;
  text(module: number): string;
}

export class Tree {
  private readonly expanded = new Set<number>([0]);
  private rows: { module: number; depth: number; position: number; size: number }[] = [];
  private selected = -1;
  private focused = 0;
  private shares: Shares = { share: () => 0, text: () => "" };
  private marked: ReadonlySet<number> = new Set();
  private readonly space = el("div", { class: "tree-space", role: "presentation" });

  constructor(
    private readonly model: Model,
    private readonly root: HTMLElement,
    private readonly onSelect: (module: number) => void,
  ) {
    root.setAttribute("role", "tree");
    root.setAttribute("aria-label", "modules");
    root.tabIndex = 0;
    root.append(this.space);
    this.expandFirst();
    this.collect();
    root.addEventListener("scroll", () => this.render());
    root.addEventListener("keydown", (event) => this.onKey(event));
    root.addEventListener("click", (event) => this.onClick(event));
    new ResizeObserver(() => this.render()).observe(root);
  }

  private expandFirst(): void {
    let level = [0];
    let count = 1;
    while (level.length) {
      const next = level.flatMap((m) => [...this.model.moduleChildren.of(m)]);
      count += next.length;
      if (!next.length || count > 40) break;
      for (const m of level) this.expanded.add(m);
      level = next;
    }
  }

  private collect(): void {
    this.rows = [];
    if (!this.model.modulePaths.length) return;
    const pending: [number, number, number, number][] = [[0, 0, 1, 1]];
    while (pending.length) {
      const [module, depth, position, size] = pending.pop()!;
      this.rows.push({ module, depth, position, size });
      if (!this.expanded.has(module)) continue;
      const children = this.model.moduleChildren.of(module);
      for (let i = children.length - 1; i >= 0; i--) {
        pending.push([children[i], depth + 1, i + 1, children.length]);
      }
    }
    this.space.style.height = `${this.rows.length * ROW}px`;
  }

  setShares(shares: Shares): void {
    this.shares = shares;
    this.render();
  }

  setMarked(marked: ReadonlySet<number>): void {
    this.marked = marked;
    this.render();
  }

  /** Show a module as selected; open the modules around it. */
  select(module: number): void {
    this.selected = module;
    if (module >= 0) {
      const parents = this.model.raw.modules.parent;
      for (let m = parents[module]; m >= 0; m = parents[m]) this.expanded.add(m);
      this.collect();
      const row = this.rows.findIndex((r) => r.module === module);
      this.focused = Math.max(0, row);
      this.scrollTo(this.focused);
    }
    this.render();
  }

  private scrollTo(row: number): void {
    const top = row * ROW;
    const { scrollTop, clientHeight } = this.root;
    if (top < scrollTop) this.root.scrollTop = Math.max(0, top - 2 * ROW);
    else if (top + ROW > scrollTop + clientHeight) this.root.scrollTop = top + 3 * ROW - clientHeight;
  }

  private render(): void {
    const { root } = this;
    const first = Math.max(0, Math.floor(root.scrollTop / ROW) - 4);
    const last = Math.min(this.rows.length, Math.ceil((root.scrollTop + root.clientHeight) / ROW) + 4);
    const rows: HTMLElement[] = [];
    for (let i = first; i < last; i++) rows.push(this.row(i));
    this.space.replaceChildren(...rows);
    const focus = this.rows[this.focused];
    if (focus) root.setAttribute("aria-activedescendant", `module-${focus.module}`);
  }

  private row(index: number): HTMLElement {
    const { model } = this;
    const { module, depth, position, size } = this.rows[index];
    const isParent = model.moduleChildren.of(module).length > 0;
    const isOpen = this.expanded.has(module);
    const status = model.status(module) === "nodes" ? "" : model.status(module);
    const root = model.className(0) || model.file;
    const name = module === 0 ? root : model.text(model.raw.modules.name[module]);
    const title = [model.modulePaths[module], this.shares.text(module)].filter(Boolean).join("  ");
    const bar = el("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${100 * this.shares.share(module)}%`;
    const row = el(
      "div",
      {
        class: "row",
        role: "treeitem",
        id: `module-${module}`,
        "aria-level": depth + 1,
        "aria-posinset": position,
        "aria-setsize": size,
        "aria-selected": module === this.selected ? "true" : "false",
        "aria-expanded": isParent ? String(isOpen) : undefined,
        "data-row": index,
        title: visible(title),
      },
      bar,
      el("span", { class: "twist", "aria-hidden": "true" }, isParent ? (isOpen ? "▾" : "▸") : ""),
      el("span", { class: "name" }, visible(name)),
      module === 0 ? null : el("span", { class: "class" }, visible(model.className(module))),
      status ? el("span", { class: "status" }, status) : null,
    );
    row.classList.toggle("empty", status !== "");
    row.classList.toggle("marked", this.marked.has(module));
    row.classList.toggle("focused", index === this.focused);
    row.style.top = `${index * ROW}px`;
    row.style.setProperty("--indent", `${depth * 13}px`);
    return row;
  }

  private toggle(module: number, open = !this.expanded.has(module)): void {
    if (open) this.expanded.add(module);
    else this.expanded.delete(module);
    this.collect();
    this.render();
  }

  private onClick(event: MouseEvent): void {
    const target = event.target as HTMLElement;
    const row = target.closest<HTMLElement>(".row");
    if (!row) return;
    this.focused = Number(row.dataset["row"]);
    const { module } = this.rows[this.focused];
    if (target.classList.contains("twist")) this.toggle(module);
    else this.onSelect(module);
  }

  private onKey(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const row = this.rows[this.focused];
    if (!row) return;
    const children = this.model.moduleChildren.of(row.module).length;
    const open = this.expanded.has(row.module);
    const move = (to: number): void => {
      this.focused = Math.max(0, Math.min(this.rows.length - 1, to));
      this.scrollTo(this.focused);
      this.render();
    };
    switch (event.key) {
      case "ArrowDown":
        move(this.focused + 1);
        break;
      case "ArrowUp":
        move(this.focused - 1);
        break;
      case "Home":
        move(0);
        break;
      case "End":
        move(this.rows.length - 1);
        break;
      case "ArrowRight":
        if (children && !open) this.toggle(row.module, true);
        else if (children) move(this.focused + 1);
        break;
      case "ArrowLeft": {
        const parent = this.model.raw.modules.parent[row.module];
        if (children && open) this.toggle(row.module, false);
        else if (parent >= 0) move(this.rows.findIndex((r) => r.module === parent));
        break;
      }
      case "Enter":
      case " ":
        this.onSelect(row.module);
        break;
      default:
        return;
    }
    event.preventDefault();
    event.stopPropagation();
  }
}
