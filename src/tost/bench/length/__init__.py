"""Training steps on very long sequences: memory and time by length."""
