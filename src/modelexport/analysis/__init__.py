"""Analyze, validate, repair and compare tagged files, without torch."""
