"""The page with the models in the box."""

from __future__ import annotations

import pytest

from tests.explore.client import PORT, TOKEN
from tost.explore import build_app, open_models


@pytest.fixture(scope="package")
def models():
    return open_models([])


@pytest.fixture(scope="package")
def app(models):
    return build_app(models, token=TOKEN, port=PORT)
