"""Measure ratios to the baseline and to other tools, within one run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
