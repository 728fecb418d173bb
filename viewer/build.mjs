/** Build the page: one script and one style sheet, as package data of modelexport. */

import { build } from "esbuild";
import { fileURLToPath } from "node:url";

const folder = (path) => fileURLToPath(new URL(path, import.meta.url));

await build({
  entryPoints: { page: folder("src/main.ts"), style: folder("src/style.css") },
  outdir: process.argv[2] ?? folder("../src/modelexport/viewing/bundle"),
  bundle: true,
  minify: true,
  charset: "utf8",
  format: "iife",
  target: "es2022",
  legalComments: "none",
  logLevel: "warning",
});
