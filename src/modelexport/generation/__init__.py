"""Export a language model in parts that generate text, and run them."""
