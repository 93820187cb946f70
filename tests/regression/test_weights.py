"""Weights that an older version wrote load, and the models compute what they computed then."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import tost
from tests.regression.make_weights import HERE, MODELS, example
from tost.errors import CheckpointError
from tost.train.checkpoint.files import write_manifest


@pytest.mark.parametrize("kind", MODELS)
def test_old_weights_load_and_give_the_same_outputs(kind):
    model = tost.load_model(HERE / kind).eval()
    with torch.no_grad():
        outputs = model(example(kind))
    expected = load_file(HERE / f"{kind}.safetensors")["outputs"]
    assert torch.allclose(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "used",
    [
        {"forget": True},
        {"gate": True, "block_size": 2},
        {"after_last_position": "repeat"},
        {"centered": True},
        {"mixer": "gated_tssa"},
    ],
)
def test_options_that_were_removed_are_refused_by_name_where_they_are_used(tmp_path, used):
    description = json.loads((HERE / "language" / "model.json").read_text())
    assert used.keys() < description["options"].keys(), "the file has it at its default, and loads"
    description["options"] |= used
    copy = shutil.copytree(HERE / "language", tmp_path / "copy")
    (copy / "model.json").write_text(json.dumps(description))
    write_manifest(copy)
    name, value = sorted(used.items())[0]
    with pytest.raises(CheckpointError, match=rf"{name}={value}.*removed after revision 1ae0fcd of tost; use that"):
        tost.load_model(copy)
