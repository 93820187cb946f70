"""The page with a small model of each form, and the classifier in the box."""

from __future__ import annotations

import pytest
import torch

from tests.explore.client import PORT, TOKEN
from tests.models.tiny import PLUS, perturb
from tost.explore import build_app, open_models
from tost.models import create_model
from tost.train.checkpoint.model import save_model

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2, "vocab_size": 256, "position": "none"}


@pytest.fixture(scope="package")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, options in (("paper", {}), ("gated", PLUS)):
        save_model(perturb(create_model("tost_lm_base", **SIZES, **options), 0.1), folder / name)
    return open_models([str(folder / "paper"), str(folder / "gated"), "digits-tiny"])


@pytest.fixture(scope="package")
def app(models):
    return build_app(models, token=TOKEN, port=PORT)
