"""Packed sequences against padded ones, and against a single one."""
