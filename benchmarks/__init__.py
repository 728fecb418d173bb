"""Ratios against the baseline, measured within one run."""
