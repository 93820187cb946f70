"""Augmentation of single images: random crops, mirroring, policies and erasing, through timm and torchvision."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from PIL import Image

import tost._torchvision  # noqa: F401  timm imports torchvision, which a CPU build of torch has to be prepared for

# isort: split
from timm.data.auto_augment import posterize
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from torchvision import transforms  # type: ignore[import-untyped]

from tost.data.images.options import ImageOptions
from tost.data.images.transform import Chain, Fit, ToTensor, Transform
from tost.errors import ConfigError

Step = Callable[..., Any]
_OF_TORCHVISION = re.compile(r"torchvision-(?:rand-n(?P<count>\d+)-m(?P<magnitude>\d+)|trivial)")


def training_transform(options: ImageOptions) -> Transform:
    """Return the transform of training images; it draws at random, so call it inside `drawing_from`.

    Args:
        options: Crop, mirroring, policy, erasing, size and normalization.

    Returns:
        From a decoded image of mode ``RGB`` to float32 ``[C, height, width]``.

    Raises:
        ConfigError: The policy does not exist.
    """
    crop_and_flip, policy = _stages(options)
    steps: list[Step] = [crop_and_flip]
    if options.crop != "resized":
        steps = [Fit(options)]
        if options.crop == "pad":
            steps.append(transforms.RandomCrop(options.size, padding=options.padding))
        steps.append(transforms.RandomHorizontalFlip(options.flip))
    steps += [policy, ToTensor(options)]
    if options.erasing:
        erase: Any = RandomErasing
        steps.append(erase(options.erasing, mode=options.erasing_mode, max_count=options.erasing_count, device="cpu"))
    return Chain(*steps)


def _stages(options: ImageOptions) -> tuple[Step, Step]:
    """Return the first two stages: random crop with mirroring, then the policy or the change of colours."""
    name = options.auto_augment
    of_torchvision = _OF_TORCHVISION.fullmatch(name or "")
    make: Any = create_transform
    try:
        crop_and_flip, policy, _ = make(
            (3, *options.size),
            is_training=True,
            scale=options.crop_scale,
            ratio=options.crop_ratio,
            hflip=options.flip,
            color_jitter=options.color_jitter or None,
            auto_augment=None if of_torchvision else name,
            interpolation=options.interpolation,
            mean=(options.mean * 3)[:3],
            separate=True,
        )
    except (AssertionError, ValueError, KeyError) as error:
        raise ConfigError(
            f"data.options.auto_augment={name!r} is not a policy of timm ({error or 'a part is unknown'}); "
            "write for example rand-m9-mstd0.5-inc1."
        ) from error
    _keep_no_bits(policy)
    if of_torchvision and of_torchvision["count"]:
        policy = transforms.RandAugment(int(of_torchvision["count"]), int(of_torchvision["magnitude"]))
    elif of_torchvision:
        policy = transforms.TrivialAugmentWide()
    return crop_and_flip, policy


def _keep_no_bits(policy: Any) -> None:
    """Let timm's strongest Posterize, which keeps 0 bits of each pixel, work with every version of Pillow.

    Pillow 13 refuses to keep none; before, the image became black. Training has relied on that.
    """
    for step in policy.transforms:
        for operation in getattr(step, "ops", []):
            if operation.aug_fn is posterize:
                operation.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **settings: Any) -> Image.Image:
    keep: Any = posterize
    return keep(image, bits, **settings) if bits > 0 else Image.new(image.mode, image.size)
