"""Folders that an older version wrote for transformers load, and the models compute what they computed then."""

import pytest
import torch
from safetensors.torch import load_file

import tost.integrations.transformers  # noqa: F401  comes before transformers

# isort: split
from transformers import AutoModel, AutoModelForCausalLM

from tests.regression.make_transformers import HERE, MODELS, example


@pytest.mark.parametrize("kind", MODELS)
def test_old_folders_load_and_give_the_same_logits(kind, tmp_path):
    model, report = AutoModelForCausalLM.from_pretrained(HERE / kind, output_loading_info=True)
    assert not any(report.values())
    expected = load_file(HERE / f"{kind}.safetensors")["logits"]
    with torch.no_grad():
        assert torch.allclose(model(example()).logits, expected, rtol=1e-4, atol=1e-5)
        base, report = AutoModel.from_pretrained(HERE / kind, output_loading_info=True)
        assert not any(report.values())
        assert torch.allclose(model.lm_head(base(example()).last_hidden_state), expected, rtol=1e-4, atol=1e-5)
    # The names of the weights are still the same.
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(load_file(HERE / kind / "model.safetensors"))
