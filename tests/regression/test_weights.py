"""Weights that an older version wrote load, and the models compute what they computed then."""

import pytest
import torch
from safetensors.torch import load_file

import tost
from tests.regression.make_weights import HERE, MODELS, example


@pytest.mark.parametrize("kind", MODELS)
def test_old_weights_load_and_give_the_same_outputs(kind):
    model = tost.load_model(HERE / kind).eval()
    with torch.no_grad():
        outputs = model(example(kind))
    expected = load_file(HERE / f"{kind}.safetensors")["outputs"]
    assert torch.allclose(outputs, expected, rtol=1e-4, atol=1e-5)


def test_old_names_and_values_of_options_have_their_new_ones():
    assert '"beyond": "hold"' in (HERE / "hold" / "model.json").read_text()
    assert tost.load_model(HERE / "hold").options.after_last_position == "repeat"
    assert tost.load_model(HERE / "language").options.after_last_position == "error"
