"""Show a tagged model: Model Explorer's formats, and results to colour modules by."""
