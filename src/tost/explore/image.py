"""Views of an image: membership maps, class attention, the likeliest classes."""

from __future__ import annotations

import base64
import io
import warnings
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tost.analysis import class_attention_maps, membership_maps, unsupported_reason
from tost.analysis.records import at_rest
from tost.analysis.result import plain, rounded
from tost.data.images.transforms import FORMATS, EvaluationTransform, read_image, scale_and_shift
from tost.errors import ConfigError
from tost.explore.models import ExploredModel
from tost.models.options import FixedSizeOptions

MAX_BYTES = 8 * 2**20
"""Size of an image file."""
MAX_PIXELS = 24_000_000
"""Pixels of an image file."""
MAX_PATCHES = 4096
"""Patches that a model is shown."""
BEST = 5


def read(source: ExploredModel, data: bytes, side: int | None) -> Tensor:
    """Return an image as a model takes it, ``[1, channels, height, width]``, in its own proportions where that goes.

    Args:
        source: The model.
        data: Content of an image file.
        side: Pixels of the longer side; None for the size that the model was trained with.

    Raises:
        ConfigError: The model reads text, or the image is broken, too large, or too small for a patch.
    """
    if source.kind != "image":
        raise ConfigError(f"{source.name} reads text; choose an image classifier.")
    _check_pixels(data)
    options = source.images
    picture = read_image(data, "the file", channels=options.channels)
    if not isinstance(source.model.options, FixedSizeOptions):
        patch = int(source.saved.options["patch_size"])
        longest = max(options.size) if side is None else side
        scale = longest / max(picture.size)
        width, height = (max(patch, round(pixels * scale / patch) * patch) for pixels in picture.size)
        if (width // patch) * (height // patch) > MAX_PATCHES:
            raise ConfigError(f"{width} x {height} pixels are more than {MAX_PATCHES} patches; choose a smaller size.")
        options = options.model_copy(update={"image_size": [height, width], "eval_resize": "squash"})
    return EvaluationTransform(options)(picture).unsqueeze(0)


def _check_pixels(data: bytes) -> None:
    """Refuse what would unpack to more than the page needs, before it is unpacked."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                width, height = picture.size
    except Exception as error:  # decoders of broken files raise about anything
        raise ConfigError("this file cannot be read as an image; use PNG, JPEG, WebP or GIF.") from error
    if width * height > MAX_PIXELS:
        raise ConfigError(f"{width} x {height} pixels are more than {MAX_PIXELS:,}; make the picture smaller.")


def look(source: ExploredModel, inputs: Tensor) -> dict[str, Any]:
    """Return the maps of an image by layer and head, and what the model takes it for."""
    with source.lock:
        model = source.model
        with at_rest(model):
            probability = model(inputs).softmax(dim=-1)[0]
        top = probability.topk(min(BEST, len(probability)))
        names = source.classes or [f"class {i}" for i in range(len(probability))]
        result: dict[str, Any] = {
            "top": [{"label": names[i], "p": p} for p, i in zip(plain(top.values), top.indices.tolist(), strict=True)],
            "picture": _data_url(source, inputs),
            "height": inputs.shape[2],
            "width": inputs.shape[3],
        }
        if source.has_groups():
            maps = membership_maps(model, [inputs])
            result |= {"maps": rounded(maps.maps[0]), "entropy": rounded(maps.entropy)}
        if unsupported_reason(model, "class-attention") is None:
            attention = class_attention_maps(model, [inputs], layers=[-1])
            result |= {"class_attention": rounded(attention.maps[0, 0], 6)}
    return result


def _data_url(source: ExploredModel, inputs: Tensor) -> str:
    """Return the model's input as a PNG in a data URL."""
    scale, shift = scale_and_shift(source.images)
    pixels = ((inputs[0] - shift) / scale).clamp(0, 255).round().to(torch.uint8).expand(3, -1, -1)
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
