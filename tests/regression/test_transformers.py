"""Folders that an older version wrote for transformers load, and the models compute what they computed then."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import tost.integrations.transformers  # noqa: F401  comes before transformers

# isort: split
from transformers import AutoModel, AutoModelForCausalLM

from tests.regression.make_transformers import HERE, MODELS, example
from tost.errors import ConfigError


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


@pytest.mark.parametrize("option", ["forget", "gate", "count_scaled"])
def test_a_folder_of_a_form_that_was_removed_is_refused_with_the_last_revision_that_reads_it(option, tmp_path):
    folder = shutil.copytree(HERE / "tied", tmp_path / "tied")
    content = json.loads((folder / "config.json").read_text())
    assert content[option] is False
    (folder / "config.json").write_text(json.dumps(content | {option: True}))
    with pytest.raises(ConfigError, match=rf"{option}=True: this option was removed after revision 1ae0fcd"):
        AutoModelForCausalLM.from_pretrained(folder)
