"""The models in the box: listed, verified, loaded by every door, and as good as their cards say."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

import tost
from tost import pretrained as box
from tost.errors import CheckpointError, ConfigError
from tost.generation import context_limit
from tost.pretrained import find_pretrained, list_pretrained, load_pretrained
from tost.recipes import list_configs

NAMES = ["bytes-gpt-tiny", "bytes-tiny", "digits-tiny"]
MAX_BYTES = 6_000_000


def test_models_of_less_than_six_megabytes():
    assert list_pretrained() == NAMES
    assert list_pretrained("digits*") == ["digits-tiny"]
    size = sum(file.stat().st_size for file in box.WEIGHTS.rglob("*") if file.is_file())
    assert size < MAX_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_recipe_and_a_card_that_agrees_with_the_index(name):
    about = find_pretrained(name)
    assert about.config in list_configs()
    card = (about.folder / "README.md").read_text()
    assert f"`{about.sha256}`" in card
    assert f"{about.parameters:,}" in card
    assert all(f"{metric} {value}" in card for metric, value in about.results.items())
    assert f"tost train {about.config}" in card


def test_listing_loads_no_torch():
    probe = "import sys, tost.pretrained as p; p.list_pretrained(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_loaded_in_float32_for_evaluation(name):
    model = load_pretrained(name)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) == find_pretrained(name).parameters


def test_the_language_model_has_learned_and_runs_without_end():
    model = tost.load_pretrained("bytes-tiny")
    ids = torch.tensor([list(b"import os\nimport sys\n\n\ndef main():\n    return None\n")])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
    assert loss < 3.0, "bytes at random cost 5.5 nats"
    assert context_limit(model) is None


def test_the_classifier_knows_its_samples():
    from PIL import Image

    from tost.data.images.options import ImageFolderOptions
    from tost.data.images.transforms import EvaluationTransform

    about, model = find_pretrained("digits-tiny"), load_pretrained("digits-tiny")
    sizes = {key: about.image[key] for key in ("image_size", "mean", "std")}
    transform = EvaluationTransform(ImageFolderOptions(num_classes=10, **sizes))
    files = sorted((about.folder / "samples").glob("*.png"))
    images = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
    with torch.no_grad():
        found = model(images).argmax(dim=1).tolist()
    right = sum(about.image["classes"][guess] == file.stem for guess, file in zip(found, files, strict=True))
    assert right >= 8


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'bytes-tiny'"):
        load_pretrained("byte-tiny")


def test_a_changed_file_is_refused(tmp_path, monkeypatch):
    copy = tmp_path / "weights"
    shutil.copytree(box.WEIGHTS, copy)
    file = copy / "digits-tiny" / box.FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    monkeypatch.setattr(box, "WEIGHTS", copy)
    with pytest.raises(CheckpointError, match=r"was changed since tost was released; install the package again"):
        load_pretrained("digits-tiny")
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_pretrained("digits-tiny")


def test_timm_loads_the_image_model():
    import tost.integrations.timm  # noqa: F401  before timm, which imports torchvision

    # isort: split
    import timm

    assert timm.is_model_pretrained("tost_mini")
    theirs, ours = timm.create_model("tost_mini", pretrained=True).eval(), load_pretrained("digits-tiny")
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(theirs(image), ours(image))
    assert timm.create_model("tost_mini", pretrained=True, num_classes=3)(image).shape == (1, 3)


def test_every_loader_returns_evaluation_mode(tmp_path):
    from tost.integrations.official import to_official
    from tost.train.checkpoint.model import save_model

    model = tost.create_model("tost_lm_base", embed_dim=64, depth=1, num_heads=4, vocab_size=256, position="learned")
    assert model.training
    save_model(model, tmp_path / "mine")
    official = tost.load_official(to_official(model))
    loaded = (tost.load_model(tmp_path / "mine"), official, tost.load_pretrained("digits-tiny"))
    assert not any(module.training for each in loaded for module in each.modules())
