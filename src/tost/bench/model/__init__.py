"""Whole image models side by side."""
