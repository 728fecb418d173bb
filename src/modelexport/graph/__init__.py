"""ONNX structure: a flat view, nested subgraphs, order and type inference."""
