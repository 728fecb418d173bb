"""Where models and example inputs come from."""
