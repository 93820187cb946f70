"""Commands that look at trained models and at runs."""
