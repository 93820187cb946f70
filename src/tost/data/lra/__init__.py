"""Data sets of the Long Range Arena."""
