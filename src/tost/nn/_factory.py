"""What every module with parameters takes."""

from __future__ import annotations

from typing import TypedDict

import torch


class Factory(TypedDict, total=False):
    """Where the parameters of a module live and what type they have, as torch's own modules take them."""

    device: torch.device | str | None
    dtype: torch.dtype | None
