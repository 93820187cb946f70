"""Bridges to other libraries. Each is a module of its own, and nothing is loaded until it is imported."""
