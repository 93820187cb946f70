"""Sequence classifiers, the models of the Long Range Arena tasks."""
