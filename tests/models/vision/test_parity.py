"""The vision model against a restatement of the authors' network, in plain functions of its parameters.

The restatement follows their code step by step, with its order of operations and its quirks, and shares nothing with
this package or timm: every mean, norm, sine and softmax is written out.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import tost
from tests.models.tiny import perturb

MOMENTUM = 0.1


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def layer_norm(p, name, x):
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-6) * p[f"{name}.weight"] + p[f"{name}.bias"]


def linear(p, name, x):
    y = (x.unsqueeze(-2) * p[f"{name}.weight"]).sum(dim=-1)
    return y + p[f"{name}.bias"]


def batch_norm(p, name, x, training, running):
    mean, variance = p[f"{name}.running_mean"], p[f"{name}.running_var"]
    if training:
        count = x.shape[0] * x.shape[2] * x.shape[3]
        mean = x.mean(dim=(0, 2, 3))
        variance = ((x - mean[:, None, None]) ** 2).mean(dim=(0, 2, 3))
        for key, new in (("running_mean", mean), ("running_var", variance * count / (count - 1))):
            running[f"{name}.{key}"] = (1 - MOMENTUM) * p[f"{name}.{key}"] + MOMENTUM * new.detach()
        running[f"{name}.num_batches_tracked"] = p[f"{name}.num_batches_tracked"] + 1
    y = (x - mean[:, None, None]) / torch.sqrt(variance[:, None, None] + 1e-5)
    return y * p[f"{name}.weight"][:, None, None] + p[f"{name}.bias"][:, None, None]


def stem(p, x, training, running):
    layers = sorted({int(key.split(".")[2]) for key in p if key.startswith("patch_embed.proj.")})
    for i in layers:
        x = gelu(x) if i else x
        x = F.conv2d(x, p[f"patch_embed.proj.{i}.0.weight"], stride=2, padding=1)
        x = batch_norm(p, f"patch_embed.proj.{i}.1", x, training, running)
    return x


def positions(p, rows, columns, dtype):
    """The authors compute them in float32; row by row, 32 waves of the height and then 32 of the width."""
    waves = torch.empty(rows, columns, 64)
    rate = torch.tensor([10000 ** (2 * (i // 2) / 32) for i in range(32)])
    for y in range(rows):
        for x in range(columns):
            for start, place, last in ((0, y + 1, rows), (32, x + 1, columns)):
                angle = torch.tensor(float(place)) / (torch.tensor(float(last)) + 1e-6) * (2 * math.pi) / rate
                waves[y, x, start : start + 32 : 2] = angle[0::2].sin()
                waves[y, x, start + 1 : start + 32 : 2] = angle[1::2].cos()
    weight, bias = p["pos_embed.token_projection.weight"][:, :, 0, 0], p["pos_embed.token_projection.bias"]
    return waves.reshape(rows * columns, 64).to(dtype) @ weight.t() + bias


def tssa(p, name, x):
    batch, count, width = x.shape
    heads = p[f"{name}.temperature"].shape[0]
    w = linear(p, f"{name}.proj_in", x).reshape(batch, count, heads, width // heads).transpose(1, 2)  # b h n d
    length = (w * w).sum(dim=2, keepdim=True).sqrt().clamp_min(1e-12)
    energy = ((w / length) ** 2).sum(dim=-1) * p[f"{name}.temperature"][:, None]
    exponential = torch.exp(energy - energy.amax(dim=1, keepdim=True))
    pi = exponential / exponential.sum(dim=1, keepdim=True)
    share = pi / (pi.sum(dim=-1, keepdim=True) + 1e-8)
    moment = (share.unsqueeze(-1) * w * w).sum(dim=2, keepdim=True)
    y = -(w * pi.unsqueeze(-1)) * (1 / (1 + moment))
    return linear(p, f"{name}.proj_out", y.transpose(1, 2).reshape(batch, count, width))


def block(p, name, x):
    x = x + p[f"{name}.gamma1"] * tssa(p, f"{name}.attention", layer_norm(p, f"{name}.norm1", x))
    hidden = gelu(linear(p, f"{name}.mlp.proj_in", layer_norm(p, f"{name}.norm2", x)))
    return x + p[f"{name}.gamma2"] * linear(p, f"{name}.mlp.proj_out", hidden)


def class_attention(p, name, x, heads):
    """Queries, keys and values of all tokens; the first token gets the result, the others stay as they are."""
    batch, count, width = x.shape
    q, k, v = (linear(p, f"{name}.{part}", x).reshape(batch, count, heads, width // heads) for part in "qkv")
    scores = (q[:, :1] * k).sum(dim=-1) * (width // heads) ** -0.5  # b n h
    exponential = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    weights = exponential / exponential.sum(dim=1, keepdim=True)
    seen = (weights.unsqueeze(-1) * v).sum(dim=1).reshape(batch, 1, width)
    return torch.cat([linear(p, f"{name}.proj", seen), x[:, 1:]], dim=1)


def class_block(p, name, x, heads, tokens_norm):
    x = x + p[f"{name}.gamma1"] * class_attention(p, f"{name}.attn", layer_norm(p, f"{name}.norm1", x), heads)
    if tokens_norm:
        x = layer_norm(p, f"{name}.norm2", x)
    else:
        x = torch.cat([layer_norm(p, f"{name}.norm2", x[:, :1]), x[:, 1:]], dim=1)
    hidden = gelu(linear(p, f"{name}.mlp.fc1", x[:, :1]))
    fed = p[f"{name}.gamma2"] * linear(p, f"{name}.mlp.fc2", hidden)
    return x + torch.cat([fed, x[:, 1:]], dim=1)


def authors_network(p, images, heads, tokens_norm=True, training=False):
    """Return all tokens behind the last norm, the logits, and the running statistics after this batch."""
    running = {}
    x = stem(p, images, training, running)
    rows, columns = x.shape[2:]
    x = x.reshape(x.shape[0], x.shape[1], -1).transpose(1, 2) + positions(p, rows, columns, x.dtype)
    for i in range(1 + max(int(key.split(".")[1]) for key in p if key.startswith("blocks."))):
        x = block(p, f"blocks.{i}", x)
    x = torch.cat([p["cls_token"].expand(x.shape[0], 1, -1), x], dim=1)
    for i in range(2):
        x = class_block(p, f"cls_attn_blocks.{i}", x, heads, tokens_norm)
    x = layer_norm(p, "norm", x)
    return x, linear(p, "head", x[:, 0]), running


def make(dtype, by=0.3, name="tost_tiny_patch16_224", **overrides):
    torch.manual_seed(3)
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 5, **overrides}
    model = perturb(tost.create_model(name, **sizes), by).to(dtype)
    for norm in model.patch_embed.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return model


def leaves_of(model):
    """The state of a model as leaves of their own graph."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    trained = dict(model.named_parameters())
    return {name: tensor.requires_grad_(name in trained) for name, tensor in state.items()}


TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
forms = pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tokens_norm": False},
        {"name": "tost_tiny_24_patch16_224"},
        {"name": "tost_tiny_24_patch8_224", "tokens_norm": False},
        {"name": "tost_tiny_patch8_224", "in_chans": 1},
        {"patch_size": 4},
        {"patch_size": 2},
    ],
    ids=["paper", "class norm", "24 layers", "24 layers, patch 8", "patch 8, grey", "patch 4", "patch 2"],
)


@forms
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_logits_gradients_and_statistics_are_those_of_the_authors(overrides, dtype, training):
    model = make(dtype, **overrides).train(training)
    if "_24_" in overrides.get("name", ""):
        assert model.options.layer_scale == 1e-5
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "gamma" in key:
                    parameter.fill_(1e-5)  # where the deep models start
    p = leaves_of(model)
    size = 3 * model.options.patch_size + 1
    images = torch.randn(3, model.options.in_chans, size, 2 * size, dtype=dtype)
    _, expected, running = authors_network(p, images, 4, model.options.tokens_norm, training)
    logits = model(images)
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE[dtype])
    target = torch.randn_like(logits)
    (logits * target).sum().backward()
    (expected * target).sum().backward()
    for name, parameter in model.named_parameters():
        wanted = p[name].grad
        close = TOLERANCE[dtype] * (wanted.abs().max().item() + 0.1)
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=close, msg=lambda m, name=name: f"{name}: {m}")
    state = model.state_dict()
    assert bool(running) is training
    for name, value in running.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("tokens_norm", [True, False])
def test_every_token_is_that_of_the_authors(tokens_norm):
    model = make(torch.float64, tokens_norm=tokens_norm).eval()
    images = torch.randn(2, 3, 33, 50, dtype=torch.float64)
    expected, logits, _ = authors_network(model.state_dict(), images, 4, tokens_norm)
    tokens = model.forward_features(images)
    torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(model.forward_head(tokens), logits, rtol=0, atol=1e-9)
    torch.testing.assert_close(model(images), logits, rtol=0, atol=1e-9)
