"""From a decoded image to a normalized tensor.

Transforms of other packages draw from the global generators of Python, numpy and torch. `drawing_from` seeds these
for a while and restores them afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tost.data.images.options import ImageOptions

Transform = Callable[[Image.Image], Tensor]
_RATIO = (8, 7)  # 256 for 224


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Let the global generators of Python, numpy and torch (CPU) start from a seed; afterwards they go on as before.

    Args:
        seed: 64 bits.
    """
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


def resized_size(stored: tuple[int, int], options: ImageOptions) -> tuple[int, int]:
    """Return the size to which an image is resized for validation, before its centre is cut out.

    Args:
        stored: Height and width of the image.
        options: `image_size` and `eval_resize`.
    """
    height, width = options.size
    if options.eval_resize == "squash":
        return height, width
    if isinstance(options.eval_resize, int):
        height = width = options.eval_resize
    else:
        height, width = (side * _RATIO[0] // _RATIO[1] for side in (height, width))
    # The smallest size of the image's own shape that covers the box; its longer side is rounded down, as usual.
    if stored[0] * width >= stored[1] * height:
        return max(height, stored[0] * width // stored[1]), width
    return height, max(width, stored[1] * height // stored[0])


class Chain:
    """One step after another. A class, because data sets are sent to worker processes.

    Args:
        *steps: From an image to an image; the last one from an image to a tensor.
    """

    def __init__(self, *steps: Callable[..., object]) -> None:
        self.steps = steps

    def __call__(self, image: object) -> Tensor:
        """Return the tensor of an image."""
        for step in self.steps:
            image = step(image)
        assert isinstance(image, Tensor)
        return image


class Fit:
    """Resizes and cuts out the centre, as validation does.

    Args:
        options: Sizes and interpolation.
    """

    def __init__(self, options: ImageOptions) -> None:
        self.options = options
        self.filter = Image.Resampling[options.interpolation.upper()]

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the image in the size of the options."""
        height, width = self.options.size
        rows, columns = resized_size((image.height, image.width), self.options)
        if (image.height, image.width) != (rows, columns):
            image = image.resize((columns, rows), self.filter)
        top, left = (rows - height) // 2, (columns - width) // 2
        return image if (rows, columns) == (height, width) else image.crop((left, top, left + width, top + height))


class ToTensor:
    """Makes a tensor ``[C, height, width]`` of an image, float32.

    Args:
        options: Channels, mean and standard deviation.
        normalize: False keeps values from 0 to 255.
    """

    def __init__(self, options: ImageOptions, *, normalize: bool = True) -> None:
        self.is_grey = options.channels == 1
        self.normalization = scale_and_shift(options) if normalize else None

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the tensor of an image of mode ``RGB``; colour goes last, because policies want three channels."""
        pixels = torch.from_numpy(np.array(image.convert("L") if self.is_grey else image))
        values = pixels.view(image.height, image.width, -1).permute(2, 0, 1).float()
        if self.normalization is None:
            return values
        scale, shift = self.normalization
        return values.mul_(scale).add_(shift)


def scale_and_shift(options: ImageOptions) -> tuple[Tensor, Tensor]:
    """Return what pixels from 0 to 255 are multiplied by, and what is added then, each float32 ``[1 or C, 1, 1]``."""
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (options.mean, options.std))
    return 1 / (255 * std), -mean / std


def evaluation_transform(options: ImageOptions, *, normalize: bool = True) -> Transform:
    """Return the transform of validation images: resize, cut out the centre, normalize.

    Args:
        options: Sizes, interpolation and normalization.
        normalize: False keeps values from 0 to 255.
    """
    return Chain(Fit(options), ToTensor(options, normalize=normalize))
