"""The image models in timm's registry: after ``import tost.integrations.timm``, ``timm.create_model`` builds them.

Every image model of this package is registered under its own name, but for the vision transformers, which timm has
already. They take what timm passes to a model (``num_classes``, ``in_chans``, ``img_size``, ``global_pool``,
``drop_rate``, ``drop_path_rate``, ``proj_drop_rate``, ``features_only``, ``out_indices``, ``device``, ``dtype``), and
the options of this package. ``timm.create_model("tost_mini", pretrained=True)`` has the weights of ``digits-tiny``,
which come with the package; for the other models timm refuses ``pretrained=True``. The authors' checkpoints are read
by `tost.load_official`.

timm's optimizers ask a model which parameters not to decay, and spare vectors. The temperatures of TSSA are vectors in
this package, so that timm does not decay them; the authors' training does, by an oversight. ``tost train`` leaves the
choice to ``optim.decay_statistics``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn

import tost._torchvision  # noqa: F401  timm imports torchvision, which a CPU build of torch has to be prepared for
from tost._lazy import naming_extras

# isort: split
with naming_extras():
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from tost.errors import ConfigError
from tost.models import CrateOptions, VisionOptions, create_model, model_options, model_spec
from tost.models.options import FixedSizeOptions, ImageOptions
from tost.models.registry import loaded_models
from tost.pretrained import FILE, find_pretrained

__all__ = ["default_cfgs"]

RENAMED = {"drop_rate": "head_dropout", "drop_path_rate": "drop_path", "proj_drop_rate": "dropout"}
"""timm's names of options, and ours. Our dropout acts on positions and attention weights, too."""

PRETRAINED = {"tost_mini": "digits-tiny"}
"""Models whose weights come with the package, by their names in timm's registry and in `tost.load_pretrained`."""

_NAMES = [spec.name for spec in loaded_models() if spec.options in (VisionOptions, CrateOptions)]


def _describe(name: str) -> dict[str, Any]:
    """Return what timm wants to know of a model without building it."""
    options = cast(ImageOptions, model_options(name, {}))
    fixed = isinstance(options, FixedSizeOptions)
    side = 32 if name.endswith("_mini") else 224
    weights = find_pretrained(PRETRAINED[name]).folder / FILE if name in PRETRAINED else None
    return {
        "file": None if weights is None else str(weights),
        "url": "",
        "num_classes": options.num_classes,
        "input_size": (options.in_chans, side, side),
        "min_input_size": None if fixed else (options.in_chans, options.patch_size, options.patch_size),
        "fixed_input_size": fixed,
        "pool_size": None,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.1" if fixed else "patch_embed.proj.0.0",
        "classifier": "head",
        "license": "mit",
    }


default_cfgs = generate_default_cfgs({name: _describe(name) for name in _NAMES})
"""What timm knows of each model: input size, normalization, names of the first and the last layer."""


def _build(name: str, device: Any = None, dtype: torch.dtype | None = None, **given: Any) -> nn.Module:
    """Build a model of this package from what timm passes to a model."""
    overrides = {RENAMED.get(key, key): value for key, value in given.items()}
    size = overrides.pop("img_size", None)
    if size is not None:
        sides = (size, size) if isinstance(size, int) else tuple(size)
        options = cast(ImageOptions, model_options(name, overrides))
        if isinstance(options, FixedSizeOptions):
            overrides["image_size"] = sides
        elif min(sides) < options.patch_size:
            raise ConfigError(
                f"img_size={size} is smaller than a patch of {options.patch_size} x {options.patch_size} pixels; "
                f"use larger images, or a model with smaller patches than those of {name!r}."
            )
    with nullcontext() if device is None else torch.device(device):
        model = create_model(name, **overrides)
    return model if dtype is None else model.to(dtype)


def _register(name: str) -> None:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        # Like timm's other models of one resolution: the last three blocks, unless blocks are chosen.
        if pretrained and name in PRETRAINED:
            find_pretrained(PRETRAINED[name]).verify()
        features = {"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"}
        make = cast(Callable[..., nn.Module], build_model_with_cfg)
        return make(partial(_build, name), name, pretrained, feature_cfg=features, **kwargs)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = f"{model_spec(name).description}; see `tost.create_model`."
    globals()[name] = register_model(entrypoint)


for _name in _NAMES:
    _register(_name)
