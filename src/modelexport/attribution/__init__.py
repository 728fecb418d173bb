"""From evidence to modules."""
