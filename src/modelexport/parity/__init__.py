"""Whether an ONNX file computes what the PyTorch model does, module by module."""
