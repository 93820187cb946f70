"""Token mixers of the Long Range Arena side by side."""
