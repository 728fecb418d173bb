"""Export every transformers architecture that can be built small; write docs/compatibility.md."""
