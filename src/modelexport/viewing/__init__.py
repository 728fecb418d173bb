"""Look at a model: a page, ONNX functions for Netron, and graphs for Model Explorer."""
