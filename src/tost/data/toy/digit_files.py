"""The handwritten digits of scikit-learn as a folder of images, for the models of images. Loads no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from tost.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["DigitImagesOptions", "write_digits"]

# As in `digits.py`: every fifth image of each class, in scikit-learn's order, is for validation.
_EVERY = 5
_BRIGHTEST = 16


class DigitImagesOptions(BaseModel):
    """There is nothing to choose."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def write_digits(
    options: DigitImagesOptions, out: Path, *, workers: int, report: Callable[[int, int, str], None]
) -> dict[str, object]:
    """Write ``train/<digit>/<number>.png`` and ``val/<digit>/<number>.png``, 8 x 8 grey pixels each.

    The images and the split are those of the data set ``digits``.

    Args:
        options: No option exists.
        out: Folder to write to; what is there already is written again, with the same bytes.
        workers: Not used: it takes a second.
        report: Told about progress.

    Returns:
        The numbers of images.

    Raises:
        ConfigError: scikit-learn or Pillow is not installed.
    """
    try:
        import numpy as np
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            f"the digits come with scikit-learn and are written by Pillow, but {error.name} is not installed; "
            "run `pip install 'tost[train,vision]'`."
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    grey = np.rint(pixels.reshape(-1, 8, 8) * (255 / _BRIGHTEST)).astype(np.uint8)
    written: Counter[str] = Counter()
    order = np.argsort(labels, kind="stable")
    for place, index in enumerate(order):
        split = "val" if place % _EVERY == 0 else "train"
        folder = out / split / str(labels[index])
        folder.mkdir(parents=True, exist_ok=True)
        _save(Image.fromarray(grey[index]), folder / f"{index:04d}.png")
        written[split] += 1
    report(len(order), len(order), "images")
    return {"train_images": written["train"], "validation_images": written["val"]}


def _save(image: Image, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    image.save(temporary, format="PNG")
    temporary.replace(path)
