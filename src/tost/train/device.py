"""Which device a command uses."""

from __future__ import annotations

from typing import Literal

import torch

from tost.errors import ConfigError

DeviceChoice = Literal["auto", "cpu", "cuda"]
"""A device by name; ``auto`` is a GPU if there is one, or else the CPU."""


def choose_device(wanted: str) -> torch.device:
    """Return the device to use.

    Args:
        wanted: A `DeviceChoice`.

    Raises:
        ConfigError: ``cuda`` was requested, but there is no GPU.
    """
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError("--device cuda was given, but torch finds no CUDA device here; use --device cpu or auto.")
    return torch.device("cuda" if present and wanted != "cpu" else "cpu")
