"""Tagged models on disk: how tags are written into a file, read back, and taken out again."""
