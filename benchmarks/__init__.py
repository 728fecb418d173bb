"""Ratios against the baseline and the peers, measured within one run, on models of the tests too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
