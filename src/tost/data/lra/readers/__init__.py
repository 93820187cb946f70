"""Readers for the files of the official Long Range Arena release."""
