"""Checkpoints and saved models."""
