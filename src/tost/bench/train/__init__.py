"""The cost of the training engine."""
