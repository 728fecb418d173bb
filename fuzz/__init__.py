"""Give thousands of damaged files to every reader: only errors of modelexport may be raised."""
