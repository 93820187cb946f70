"""From a configuration to data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tost.data.dataset import DataBundle
from tost.data.images.options import ImageOptions
from tost.data.lra.options import LraOptions
from tost.data.options import DataOptions
from tost.data.tokens.dataset import build_tokens
from tost.data.tokens.options import TokensOptions
from tost.data.toy.digits import build_digits
from tost.data.toy.listops import build_listops
from tost.data.toy.stdlib_bytes import build_stdlib_bytes

__all__ = ["build_data"]

_BUILDERS: dict[str, Callable[[Any, int], DataBundle]] = {
    "digits": build_digits,
    "listops": build_listops,
    "stdlib_bytes": build_stdlib_bytes,
}


def build_data(options: DataOptions, seed: int) -> DataBundle:
    """Return the training and the validation set of a configuration.

    Args:
        options: The ``data`` part of a configuration.
        seed: Decides everything that is drawn at random when the data is made. The order of training is decided by
            the seed of the loader.

    Returns:
        Both splits, and what is known about them.

    Raises:
        ConfigError: The options ask for data that cannot be made here.
    """
    settings = options.data_set_options()
    if isinstance(settings, ImageOptions):
        from tost.data.images.build import build_images  # its packages are loaded by those who need them

        return build_images(options.name, settings, Path(options.path or ""), seed)
    if isinstance(settings, LraOptions):
        from tost.data.lra.build import build_lra  # loads the readers of images

        return build_lra(options.name, settings, options.path or "")
    if isinstance(settings, TokensOptions):
        return build_tokens(settings, Path(options.path or ""), seed)
    return _BUILDERS[options.name](settings, seed)
