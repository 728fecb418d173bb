"""Where a model and its example inputs come from."""
