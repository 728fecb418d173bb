"""Puts damaged files by the thousand before every reader: only our own errors may come out."""
