"""Fuzzing of every parser that reads a file from outside; `python -m fuzz.run --help`."""
