"""Synthetic tasks, each of which needs one ability of a causal model."""
