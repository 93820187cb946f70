"""Measurements of speed and memory behind a correctness gate: `tost bench`."""
