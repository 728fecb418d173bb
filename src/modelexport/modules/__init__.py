"""What a module is: the tree, its tags, its record, and lookup by what people type."""
