"""The digits as a folder of images: the same images and the same split as the data set of sequences."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from PIL import Image

from tost.data import build_data
from tost.data.prepare import prepare
from tost.data.registry import DataOptions
from tost.errors import ConfigError


def test_images_and_split_are_those_of_the_sequences(tmp_path):
    facts = prepare("digits", {}, tmp_path / "digits")
    assert facts == {"train_images": 1437, "validation_images": 360}
    bundle = build_data(DataOptions(name="digits"), seed=0)
    for split, rows in (("train", bundle.train.rows), ("val", bundle.validation.rows)):
        files = sorted((tmp_path / "digits" / split).glob("*/*.png"), key=lambda file: int(file.stem))
        assert [int(file.parent.name) for file in files] == rows["targets"].tolist()
        pixels = np.stack([np.asarray(Image.open(file)) for file in files[::50]])
        assert pixels.shape[1:] == (8, 8)
        known = rows["inputs"].view(-1, 8, 8)[::50].numpy()
        np.testing.assert_allclose(pixels / 255, known, atol=0.5 / 255 + 1e-6)


def test_a_second_call_changes_nothing(tmp_path):
    prepare("digits", {}, tmp_path / "digits")
    before = {file: file.read_bytes() for file in (tmp_path / "digits").rglob("*.png")}
    prepare("digits", {}, tmp_path / "digits")
    assert {file: file.read_bytes() for file in (tmp_path / "digits").rglob("*.png")} == before


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match="pip install"):
        prepare("digits", {}, tmp_path / "digits")
