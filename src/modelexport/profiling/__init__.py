"""Measure the latency of a model in ONNX Runtime, module by module."""
