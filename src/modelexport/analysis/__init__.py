"""What can be learnt from an exported file: without torch, and without its weights unless their content matters."""
