"""Decoding: every kind of image becomes RGB as it is meant, and what is no image is named."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tost.data.images import transforms
from tost.data.images.transforms import BadImageError, read_image
from tost.errors import StorageError

from .files import encoded

RAMP = np.linspace(0, 255, 6 * 5, dtype=np.uint8).reshape(6, 5)
COLOURS = np.stack([RAMP, RAMP[::-1], np.full_like(RAMP, 77)], axis=-1)


def saved(image, form="PNG", **settings):
    stream = io.BytesIO()
    image.save(stream, form, **settings)
    return stream.getvalue()


def pixels(data, **settings):
    image = read_image(data, "picture", **settings)
    assert image.mode == ("L" if settings.get("channels") == 1 else "RGB")
    return np.asarray(image).astype(int)


def grey(values):
    return np.repeat(values[..., None], 3, axis=-1).astype(int)


@pytest.mark.parametrize("form", ["PNG", "BMP", "PPM", "TIFF", "WEBP"])
def test_colours_are_kept(form):
    assert (pixels(encoded(COLOURS, form, **({"lossless": True} if form == "WEBP" else {}))) == COLOURS).all()


def test_grey_is_repeated():
    assert (pixels(encoded(RAMP)) == grey(RAMP)).all()
    assert (pixels(encoded(RAMP), channels=1) == RAMP).all()


def test_black_and_white_becomes_black_and_white():
    found = pixels(saved(Image.fromarray(RAMP > 100)))
    assert (found == grey((RAMP > 100) * 255)).all()


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_keep_the_upper_byte(form):
    deep = RAMP.astype(np.uint16) * 257
    assert (pixels(saved(Image.fromarray(deep), form)) == grey(RAMP)).all()


@pytest.mark.parametrize("pixels_at_a_time", [1, 7, 10])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "PA", "P", "L", "1", "I", "I;16", "I;16B", "CMYK", "YCbCr"])
def test_strips_are_those_of_the_whole(mode, pixels_at_a_time, monkeypatch):
    image = Image.fromarray(RAMP.astype(np.uint16) * 257) if mode.startswith("I") else Image.fromarray(COLOURS)
    image = image.convert("I").convert(mode) if mode == "I;16B" else image.convert(mode)
    if "A" in mode:
        image.putalpha(Image.fromarray(RAMP))
    whole = transforms.to_rgb(image)
    monkeypatch.setattr(transforms, "_STRIP", pixels_at_a_time)
    assert transforms.to_rgb(image).tobytes() == whole.tobytes()


def test_transparent_colours_are_kept_by_strips(monkeypatch):
    image = Image.fromarray(RAMP // 16).convert("P")
    image.info["transparency"] = 3
    whole = transforms.to_rgb(image)
    monkeypatch.setattr(transforms, "_STRIP", 5)
    assert transforms.to_rgb(image).tobytes() == whole.tobytes()


def test_endless_sides_are_refused():
    with pytest.raises(BadImageError, match="1 x 1048577 pixels; no image has a side of over 1,048,576"):
        pixels(saved(Image.new("1", (1, 2**20 + 1))))
    assert pixels(saved(Image.new("1", (1, 2**20)))).shape == (2**20, 1, 3)


def test_palettes_are_looked_up():
    image = Image.fromarray(COLOURS).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    assert (pixels(saved(image)) == np.asarray(image.convert("RGB"))).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_become_white(mode):
    opaque = np.zeros((6, 5), dtype=np.uint8)
    opaque[:3] = 255
    if mode == "P":
        image = Image.fromarray((opaque // 255).astype(np.uint8)).convert("P")
        image.putpalette([10, 20, 30, 40, 50, 60])
        data, solid = saved(image, transparency=b"\x00\xff"), (40, 50, 60)
    else:
        base = Image.new("RGB" if mode == "RGBA" else "L", (5, 6), (40, 50, 60) if mode == "RGBA" else 90)
        base.putalpha(Image.fromarray(opaque))
        data, solid = saved(base), (40, 50, 60) if mode == "RGBA" else (90, 90, 90)
    found = pixels(data)
    assert (found[:3] == solid).all()
    assert (found[3:] == 255).all()


def test_half_transparent_parts_are_mixed_with_white():
    image = Image.new("RGBA", (4, 4), (0, 100, 200, 128))
    assert np.abs(pixels(saved(image)) - np.array([127, 177, 227])).max() <= 1


def test_cmyk_is_converted():
    image = Image.fromarray(np.full((16, 16, 3), (200, 100, 50), dtype=np.uint8)).convert("CMYK")
    for form in ("JPEG", "TIFF"):
        assert np.abs(pixels(saved(image, form)) - np.array([200, 100, 50])).max() <= 4


def test_orientation_is_left_alone():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(Image.fromarray(COLOURS), "JPEG", exif=exif)
    assert pixels(data).shape == COLOURS.shape


PHOTO = encoded(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8), "JPEG")
BROKEN = {
    "empty": (b"", "unknown format"),
    "text": (b"<html>not found</html>", "unknown format"),
    "cut JPEG": (PHOTO[: len(PHOTO) // 2], "truncated"),
    "cut PNG": (encoded(COLOURS)[:60], "."),
    "damaged PNG": (encoded(COLOURS).replace(b"IDAT", b"IDAx"), "."),
    "cut WebP": (encoded(COLOURS, "WEBP")[:40], "."),
    "only a header": (PHOTO[:20], "."),
    "floating point": (saved(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), "floating-point numbers"),
}


@pytest.mark.parametrize(("data", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_image_is_named(data, reason):
    with pytest.raises(BadImageError, match=rf"^/data/x\.jpg cannot be read as an image: .*{reason}") as info:
        read_image(data, "/data/x.jpg")
    assert isinstance(info.value, StorageError)
    assert "BytesIO" not in str(info.value)


def test_an_image_that_unpacks_to_more_than_memory_is_refused(monkeypatch):
    data = saved(Image.new("1", (1000, 1000)))
    for limit in (999_999, 400_000):  # Pillow itself warns about the first and refuses the second
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(BadImageError, match=r"huge\.png cannot be read as an image: .*limit of"):
            read_image(data, "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000_000)
    assert read_image(data, "huge.png").size == (1000, 1000)
