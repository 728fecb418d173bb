"""The baseline: the file that torch's own exporter writes, and what the exporter told on the way."""
