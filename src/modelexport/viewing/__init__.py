"""Show a model by module in viewers: data and files for them."""
