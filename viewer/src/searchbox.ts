/** The search box with its list of matches. */

import { clear, el, formatCount, visible } from "./dom";
import type { Found } from "./search";

export class SearchBox {
  readonly element: HTMLElement;
  readonly input = el("input", {
    type: "search",
    placeholder: "Search modules, operators, values, shapes ( / )",
    "aria-label": "search",
    role: "combobox",
    "aria-expanded": "false",
    "aria-controls": "results",
    autocomplete: "off",
    spellcheck: "false",
  });
  private readonly list = el("ul", {
    id: "results",
    role: "listbox",
    class: "results",
    "aria-label": "matches",
    hidden: true,
  });
  private found: Found[] = [];
  private at = 0;

  constructor(
    private readonly find: (query: string) => { found: Found[]; total: number },
    private readonly onChoose: (entry: Found) => void,
    private readonly onLeave: () => void,
  ) {
    const { input } = this;
    this.element = el("span", { class: "search" }, input, this.list);
    input.addEventListener("input", () => this.update());
    input.addEventListener("focus", () => this.update());
    input.addEventListener("blur", () => this.hide());
    input.addEventListener("keydown", (event) => this.onKey(event));
  }

  private hide(): void {
    this.list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
  }

  private choose(index: number): void {
    const entry = this.found[index];
    if (!entry) return;
    this.hide();
    this.onChoose(entry);
    this.onLeave();
  }

  private update(): void {
    const { input, list } = this;
    const { found, total } = this.find(input.value);
    this.found = found;
    this.at = 0;
    clear(list);
    found.forEach((entry, i) => list.append(this.row(entry, i)));
    const rest = total > found.length ? `${formatCount(total)} found, the best are shown` : "";
    const text = found.length ? rest : "nothing found";
    if (text) list.append(el("li", { class: "note" }, text));
    list.hidden = !input.value.trim();
    input.setAttribute("aria-expanded", String(!list.hidden));
    this.mark();
  }

  private row(entry: Found, index: number): HTMLElement {
    const row = el(
      "li",
      { role: "option", id: `result-${index}` },
      el("span", { class: "kind" }, entry.kind),
      el("span", { class: "name" }, visible(entry.text)),
      el("span", { class: "note" }, visible(entry.note)),
    );
    row.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      this.choose(index);
    });
    return row;
  }

  /** Show which match Enter chooses. */
  private mark(): void {
    this.input.removeAttribute("aria-activedescendant");
    this.list.querySelectorAll<HTMLElement>("[role=option]").forEach((row, i) => {
      row.setAttribute("aria-selected", String(i === this.at));
      if (i !== this.at) return;
      row.scrollIntoView({ block: "nearest" });
      this.input.setAttribute("aria-activedescendant", row.id);
    });
  }

  private onKey(event: KeyboardEvent): void {
    event.stopPropagation();
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const { length } = this.found;
      const step = event.key === "ArrowDown" ? 1 : length - 1;
      this.at = length ? (this.at + step) % length : 0;
      this.mark();
      event.preventDefault();
    } else if (event.key === "Enter") this.choose(this.at);
    else if (event.key === "Escape") {
      this.input.value = "";
      this.hide();
      this.onLeave();
    }
  }
}
