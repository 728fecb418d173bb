/** The entry point: decode the data of the page and show it. */

import { App } from "./app";
import { decode } from "./data";
import { el } from "./dom";

const root = document.getElementById("app")!;

async function start(): Promise<void> {
  const block = document.getElementById("data")!;
  const data = await decode(block.textContent!.trim());
  block.remove();
  root.replaceChildren();
  const app = new App(data, root);
  Object.assign(globalThis, { modelexportPage: app });
  root.dataset["ready"] = String(Math.round(performance.now()));
}

start().catch((error: unknown) => {
  const reason = error instanceof Error ? error.message : String(error);
  const text = `This page cannot be shown: ${reason}. It needs a browser of 2023 or later.`;
  root.replaceChildren(el("p", { class: "failure", role: "alert" }, text));
});
