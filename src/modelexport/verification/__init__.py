"""Compare ONNX Runtime with PyTorch, module by module."""
