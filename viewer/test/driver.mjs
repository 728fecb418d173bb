/** Drive Chromium for tests: read one JSON command a line, write one JSON answer a line. */

import { chromium } from "playwright-core";
import { createInterface } from "node:readline";

const browser = await chromium.launch({
  executablePath: process.argv[2],
  args: [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
  ],
});
let page;
let problems;

const commands = {
  async open({ url, dark = false, motion = false, width = 1500, height = 950, ready = "#app[data-ready]" }) {
    await page?.context().close();
    const context = await browser.newContext({
      viewport: { width, height },
      colorScheme: dark ? "dark" : "light",
      acceptDownloads: true,
      reducedMotion: motion ? "no-preference" : "reduce",
    });
    page = await context.newPage();
    problems = [];
    page.on("console", (message) => problems.push(`console: ${message.text()}`));
    page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
    page.on("dialog", (dialog) => {
      problems.push(`dialog: ${dialog.message()}`);
      dialog.dismiss();
    });
    page.on("request", (request) => {
      if (request.url().split("#")[0] !== url.split("#")[0]) problems.push(`request: ${request.url()}`);
    });
    await page.goto(url);
    await page.waitForSelector(ready, { timeout: 60000 });
    return Number(await page.getAttribute(ready, "data-ready"));
  },
  problems: async () => problems,
  evaluate: async ({ code }) => (await page.evaluate(code)) ?? null,
  async evaluate_in_frame({ code }) {
    const frame = page.frames()[1];
    await frame.waitForSelector("#app[data-ready]", { state: "attached", timeout: 60000 });
    return (await frame.evaluate(code)) ?? null;
  },
  click: async ({ x, y }) => page.mouse.click(x, y),
  press: async ({ key }) => page.keyboard.press(key),
  type: async ({ text }) => page.keyboard.type(text),
  press_button: async ({ selector }) => page.click(selector),
  choose: async ({ selector, value }) => page.selectOption(selector, value),
  screenshot: async ({ path }) => (await page.screenshot({ path })) && null,
  back: async () => (await page.goBack()) && null,
  async download({ selector, path }) {
    const [file] = await Promise.all([page.waitForEvent("download"), page.click(selector)]);
    await file.saveAs(path);
    return file.suggestedFilename();
  },
  pdf: async ({ path }) => (await page.pdf({ path })) && null,
};

for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...rest } = JSON.parse(line);
  let answer;
  try {
    answer = { value: (await commands[command](rest)) ?? null };
  } catch (error) {
    answer = { error: String(error) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await browser.close();
