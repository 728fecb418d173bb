"""Extract modules as models of their own, and partition a model."""
