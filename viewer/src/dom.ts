/** Create elements. Texts only ever become text nodes. */

type Child = Node | string | null | undefined;

export function el<K extends keyof HTMLElementTagNameMap>(
  name: K,
  attributes: Record<string, string | number | boolean | undefined> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    element.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined) element.append(child);
  return element;
}

/** A button with a text and an action. */
export function button(
  text: string,
  action: () => void,
  attributes: Record<string, string> = {},
): HTMLButtonElement {
  const element = el("button", { type: "button", ...attributes }, visible(text));
  element.addEventListener("click", action);
  return element;
}

/** Replace characters that cannot be seen, or that reorder text, by their code points.
 *
 * Those that XML forbids are among them, so that a saved SVG can be read.
 */
export function visible(text: string): string {
  return text.replace(
    /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\ufffe\uffff]/gu,
    (c) => `\\u${c.codePointAt(0)!.toString(16).padStart(4, "0")}`,
  );
}

export function formatCount(count: number): string {
  return count.toLocaleString("en-US");
}

export function clear(element: Element): void {
  element.replaceChildren();
}
