"""From evidence to tags: which module made each node of the graph."""
