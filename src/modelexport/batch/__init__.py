"""Many exports, each in a process of its own."""
