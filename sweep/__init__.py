"""Exports every transformers architecture that can be built small, and writes docs/compatibility.md."""
