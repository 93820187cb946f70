"""Errors meant for users. A message says what was given, what is needed and what to do."""

from __future__ import annotations

__all__ = [
    "INTERRUPTED",
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "MissingPackageError",
    "StorageError",
    "TostError",
    "TrainingError",
]

INTERRUPTED = 130
"""Exit code of commands that were interrupted by Ctrl-C or SIGTERM."""


class TostError(Exception):
    """Base class of every error that this package raises on purpose."""


class BackendError(TostError, RuntimeError):
    """No implementation can run a call; the message lists each candidate with its reasons."""


class ConfigError(TostError, ValueError):
    """A configuration or an environment variable is not usable as given."""


class CheckpointError(TostError, ValueError):
    """A given checkpoint cannot be read, or does not fit."""


class MissingPackageError(TostError, ModuleNotFoundError):
    """An optional package is not installed; the message names the extra that installs it."""


class StorageError(TostError, RuntimeError):
    """Something cannot be read or written: the disk is full or refuses, or a file is damaged."""


class TrainingError(TostError, RuntimeError):
    """Training cannot continue, for example because the loss is not finite."""
