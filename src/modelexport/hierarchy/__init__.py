"""The module tree of a model, its tags, and the record of its calls."""
