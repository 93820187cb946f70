"""Bridges to other libraries, a module each, which is loaded when it is imported."""
