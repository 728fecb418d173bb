"""Tests of select, quantize and the sensitivity of modules."""
