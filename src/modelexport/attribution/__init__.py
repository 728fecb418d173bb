"""Map nodes to modules by evidence."""
