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


def test_an_option_that_was_removed_is_refused_by_name_where_it_is_used(tmp_path):
    description = json.loads((HERE / "language" / "model.json").read_text())
    assert description["options"]["window_every"] == 0
    description["options"]["window_every"] = 2
    copy = shutil.copytree(HERE / "language", tmp_path / "copy")
    (copy / "model.json").write_text(json.dumps(description))
    write_manifest(copy)
    with pytest.raises(CheckpointError, match=r"window_every=2: this option was removed after revision be43f5d"):
        tost.load_model(copy)
