"""The vision transformer is timm's, with the options of this package."""

import pytest
import torch

import tost._torchvision  # before timm, which imports torchvision

# isort: split
import timm

import tost
from tests.models.tiny import make_tiny, perturb


@pytest.mark.parametrize("name", tost.list_models("vit_*_224"))
def test_network_is_the_one_that_timm_builds(name):
    with torch.device("meta"):
        ours, theirs = tost.create_model(name), timm.create_model(name)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert str(ours.blocks[0]) == str(theirs.blocks[0])
    assert ours.num_parameters() - ours.num_parameters(positions=False) == ours.pos_embed.numel()


def test_logits_are_those_of_timm():
    ours = perturb(make_tiny("vit_mini")).eval()
    theirs = timm.create_model(
        "vit_small_patch16_224",
        img_size=32,
        patch_size=4,
        num_classes=3,
        embed_dim=16,
        depth=2,
        num_heads=4,
        mlp_ratio=4.25,
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(images), theirs(images))


def test_options_follow_the_classifier():
    model = make_tiny("vit_mini")
    model.reset_classifier(7, "avg")
    assert (model.options.num_classes, model.options.global_pool) == (7, "avg")
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7)
