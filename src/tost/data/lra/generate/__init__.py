"""Generators of Long Range Arena data."""
