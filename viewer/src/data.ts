/** The data of the page: columns as `modelexport view` writes them. */

export interface RawModel {
  file: string;
  facts: Record<string, string>;
  texts: string[];
  modules: {
    parent: number[];
    name: number[];
    class: number[];
    tag: number[];
    status: number[];
    calls: number[];
    parameters: (number | null)[];
    flops: (number | null)[];
  };
  boxes: {
    parent: number[];
    module: number[];
    call: number[];
    kind: number[];
    node: number[];
    label: number[];
  };
  nodes: {
    op: number[];
    domain: number[];
    name: string[];
    box: number[];
    module: number[];
    evidence: number[];
    call: number[];
    covers: Record<string, number[]>;
    attributed: number[];
    attributes: number[];
    inputCount: number[];
    outputCount: number[];
    inputs: number[];
    outputs: number[];
  };
  graphs: { box: number; inputs: number[]; outputs: number[]; initializers: number[] }[];
  values: { name: string[]; begins: number[]; type: number[] };
  marks: Record<string, Mark>;
}

export type Mark = "added" | "removed" | "changed";

export interface RawOverlay {
  name: string;
  unit: string;
  aggregate: "sum" | "max";
  values: Record<string, number>;
}

export interface PageData {
  format: string;
  version: string;
  models: RawModel[];
  overlays: RawOverlay[];
}

/** Decode the data block of the page: JSON, compressed with gzip, in base64. */
export async function decode(text: string): Promise<PageData> {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return (await new Response(stream).json()) as PageData;
}
