"""Carry the map over to a file that another tool made from a tagged one."""
