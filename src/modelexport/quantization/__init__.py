"""Select nodes by module, and quantize a model by module."""
