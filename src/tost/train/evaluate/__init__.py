"""Evaluation: metrics on a validation set, perplexity protocols and last-word prediction."""
