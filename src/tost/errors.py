"""Errors meant for users. A message says what was given, what is needed and what to do."""

from __future__ import annotations

__all__ = ["BackendError", "ConfigError", "TostError"]


class TostError(Exception):
    """Base class of every error that this package raises on purpose."""


class BackendError(TostError, RuntimeError):
    """No implementation can run a call; the message lists each candidate with its reasons."""


class ConfigError(TostError, ValueError):
    """A configuration or an environment variable is not usable as given."""
