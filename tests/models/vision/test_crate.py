"""CRATE against its description, written out; and images of other sizes."""

import pytest
import torch
import torch.nn.functional as F

import tost
from tests.models.tiny import make_tiny, perturb
from tost.models.vision.baselines import _positions


def norm(p, name, x):
    centred = x - x.mean(dim=-1, keepdim=True)
    return (
        centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]
    )


def described(p, images, patch, heads):
    """Patches as rows of columns of channels; one projection for query, key and value; a sparse step."""
    batch, _, height, width = images.shape
    tokens = []
    for y in range(0, height, patch):
        for x in range(0, width, patch):
            tokens.append(images[:, :, y : y + patch, x : x + patch].permute(0, 2, 3, 1).reshape(batch, -1))
    x = norm(p, "patch_embed.0", torch.stack(tokens, dim=1)) @ p["patch_embed.1.weight"].t() + p["patch_embed.1.bias"]
    x = torch.cat([p["cls_token"].expand(batch, 1, -1), norm(p, "patch_embed.2", x)], dim=1) + p["pos_embed"]
    for i in range(2):
        w = norm(p, f"blocks.{i}.norm1", x) @ p[f"blocks.{i}.attention.proj_in.weight"].t()
        parts = []
        for u in w.chunk(heads, dim=-1):
            scores = u @ u.transpose(1, 2) / u.shape[-1] ** 0.5
            parts.append(scores.softmax(dim=-1) @ u)
        mixed = torch.cat(parts, dim=-1) @ p[f"blocks.{i}.attention.proj_out.weight"].t()
        x = x + mixed + p[f"blocks.{i}.attention.proj_out.bias"]
        u, dictionary = norm(p, f"blocks.{i}.norm2", x), p[f"blocks.{i}.mlp.dictionary"]
        pull, push = u @ dictionary, u @ dictionary.t() @ dictionary  # of row vectors: D^T u and D^T D u
        x = torch.relu(u + 0.1 * (pull - push) - 0.1 * 0.1)
    return norm(p, "norm", x[:, 0]) @ p["head.weight"].t() + p["head.bias"]


def make(**overrides):
    torch.manual_seed(0)
    return perturb(make_tiny("crate_mini", **overrides)).double().eval()


def test_logits_and_gradients_are_those_of_the_description():
    model = make(image_size=(8, 12))
    images = torch.randn(2, 3, 8, 12).double()
    p = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    expected = described(p, images, 4, 4)
    logits = model(images)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    target = torch.randn_like(logits)
    (logits * target).sum().backward()
    (expected * target).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, p[name].grad, rtol=1e-8, atol=1e-10)


def test_class_token_and_positions_start_standard_normal():
    torch.manual_seed(0)
    model = tost.create_model("crate_tiny_patch16_224", depth=1)
    assert model.pos_embed.std().item() == pytest.approx(1, abs=0.02)
    assert model.cls_token.std().item() == pytest.approx(1, abs=0.15)
    assert model.norm.eps == 1e-5
    assert model.no_weight_decay() == {"cls_token", "pos_embed"}


def test_positions_of_another_size_are_interpolated():
    model = make(image_size=16)
    assert model(torch.randn(1, 3, 24, 8).double()).shape == (1, 3)
    with torch.no_grad():  # a plane stays a plane wherever the edge is far
        rows = torch.linspace(0, 1, 4).double()[:, None].expand(4, 4).reshape(1, 16, 1)
        model.pos_embed[:, 1:] = rows
    resized = _positions(model.pos_embed, model.grid, (8, 8))
    assert torch.equal(resized[:, 0], model.pos_embed[:, 0])
    picture = resized[0, 1:, 0].reshape(8, 8)
    torch.testing.assert_close(picture, picture[:, :1].expand(8, 8))
    expected = F.interpolate(rows.reshape(1, 1, 4, 4), size=(8, 8), mode="bicubic", antialias=True)[0, 0]
    torch.testing.assert_close(picture, expected)
    assert _positions(model.pos_embed, model.grid, (4, 4)) is model.pos_embed
    assert model.half()(torch.randn(1, 3, 24, 8).half()).dtype == torch.half


def test_images_of_partial_patches_are_refused():
    with pytest.raises(ValueError, match=r"images of 33 x 32 pixels are not made of whole patches of 4 x 4\. Resize"):
        make()(torch.randn(1, 3, 33, 32).double())


def test_intermediates_leave_the_class_token_out():
    model = make(image_size=(8, 12))
    images = torch.randn(2, 3, 8, 12).double()
    last, maps = model.forward_intermediates(images, 1)
    assert last.shape == (2, 1 + 6, 16)
    assert [tuple(image.shape) for image in maps] == [(2, 16, 2, 3)]
    torch.testing.assert_close(model.norm(maps[0][1, :, 1, 2]), last[1, 1 + 5])
