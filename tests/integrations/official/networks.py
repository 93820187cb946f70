"""The authors' networks once more, from their description alone: tensors by name, and what is done to them.

Nothing here uses the models or the tables of the package, so that a mix-up of names, orders or axes cannot cancel out.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]
Make = Callable[..., Tensor]


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * 0.3


def vision_state(
    *,
    width: int = 16,
    depth: int = 2,
    heads: int = 2,
    patch: int = 8,
    classes: int = 5,
    channels: int = 3,
    hidden: int | None = None,
    class_depth: int = 2,
    mixer: str = "tssa",
    gammas: bool = True,
    qkv_bias: bool = True,
    make: Make = random_tensor,
) -> State:
    hidden = hidden or 4 * width
    state = {"cls_token": make(1, 1, width)}

    def affine(name: str, out: int, *rest: int, bias: bool = True) -> None:
        state[f"{name}.weight"] = make(out, *rest)
        if bias:
            state[f"{name}.bias"] = make(out)

    steps = patch.bit_length() - 1
    widths = [channels, *(width // 2**i for i in reversed(range(steps)))]
    for i in range(steps):
        affine(f"patch_embed.proj.{2 * i}.0", widths[i + 1], widths[i], 3, 3, bias=False)
        affine(f"patch_embed.proj.{2 * i}.1", widths[i + 1])
        state[f"patch_embed.proj.{2 * i}.1.running_mean"] = make(widths[i + 1])
        state[f"patch_embed.proj.{2 * i}.1.running_var"] = make(widths[i + 1]).square() + 0.5
        state[f"patch_embed.proj.{2 * i}.1.num_batches_tracked"] = torch.tensor(7 + i)
    affine("pos_embeder.token_projection", width, 64, 1, 1)
    for i, block in [(i, f"blocks.{i}") for i in range(depth)] + [
        (0, f"cls_attn_blocks.{i}") for i in range(class_depth)
    ]:
        is_class = block.startswith("cls")
        affine(f"{block}.norm1", width)
        affine(f"{block}.attn.qkv", width if mixer == "tssa" and not is_class else 3 * width, width, bias=qkv_bias)
        if mixer == "tssa" and not is_class:
            state[f"{block}.attn.temp"] = make(heads, 1) + i
        if mixer == "xca" and not is_class:
            state[f"{block}.attn.temperature"] = make(heads, 1, 1) + i
        affine(f"{block}.attn.{'to_out.0' if mixer == 'tssa' and not is_class else 'proj'}", width, width)
        affine(f"{block}.norm2", width)
        affine(f"{block}.mlp.fc1", hidden, width)
        affine(f"{block}.mlp.fc2", width, hidden)
        if gammas:
            state |= {f"{block}.gamma1": make(width), f"{block}.gamma2": make(width)}
    affine("norm", width)
    if classes:
        affine("head", classes, width)
    return state


def vision_logits(state: State, images: Tensor, *, heads: int, mixer: str, tokens_norm: bool) -> Tensor:
    """Follow an image through the network of the authors, evaluation mode."""

    def layer(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def gamma(block: str, number: int) -> Tensor | float:
        return state.get(f"{block}.gamma{number}", 1.0)

    def mlp(block: str, x: Tensor) -> Tensor:
        return layer(f"{block}.mlp.fc2", F.gelu(layer(f"{block}.mlp.fc1", x)))

    x, step = images, 0
    while (name := f"patch_embed.proj.{step}") + ".0.weight" in state:
        x = F.conv2d(F.gelu(x) if step else x, state[f"{name}.0.weight"], stride=2, padding=1)
        mean, var = state[f"{name}.1.running_mean"], state[f"{name}.1.running_var"]
        x = F.batch_norm(x, mean, var, state[f"{name}.1.weight"], state[f"{name}.1.bias"])
        step += 2
    x = x + F.conv2d(
        _waves(*x.shape[2:]), *(state[f"pos_embeder.token_projection.{kind}"] for kind in ("weight", "bias"))
    )
    x = x.flatten(2).transpose(1, 2)
    for block in _blocks(state, "blocks."):
        projected = layer(f"{block}.attn.qkv", norm(f"{block}.norm1", x))
        mixed = _mix(state, block, projected, heads, mixer)
        x = x + gamma(block, 1) * layer(f"{block}.attn.{'to_out.0' if mixer == 'tssa' else 'proj'}", mixed)
        x = x + gamma(block, 2) * mlp(block, norm(f"{block}.norm2", x))
    x = torch.cat((state["cls_token"].expand(len(x), -1, -1), x), dim=1)
    for block in _blocks(state, "cls_attn_blocks."):
        normed = norm(f"{block}.norm1", x)
        q, k, v = (_split(part, heads) for part in layer(f"{block}.attn.qkv", normed).chunk(3, dim=-1))
        weights = (q[:, :, :1] @ k.transpose(-2, -1) / sqrt(q.shape[-1])).softmax(dim=-1)
        token = layer(f"{block}.attn.proj", _join(weights @ v))
        x = x + gamma(block, 1) * torch.cat((token, normed[:, 1:]), dim=1)
        renormed = norm(f"{block}.norm2", x)
        x = renormed if tokens_norm else torch.cat((renormed[:, :1], x[:, 1:]), dim=1)
        x = x + torch.cat((gamma(block, 2) * mlp(block, x[:, :1]), x[:, 1:]), dim=1)
    token = norm("norm", x)[:, 0]
    return layer("head", token) if "head.weight" in state else token


def language_state(
    *,
    width: int = 16,
    depth: int = 2,
    heads: int = 2,
    vocabulary: int = 11,
    length: int = 9,
    bias: bool = False,
    gammas: bool = True,
    tied: bool = True,
    mixer: str = "tssa",
    make: Make = random_tensor,
) -> State:
    state = {"transformer.wte.weight": make(vocabulary, width), "transformer.wpe.weight": make(length, width)}

    def affine(name: str, out: int, *rest: int) -> None:
        state[f"{name}.weight"] = make(out, *rest)
        if bias:
            state[f"{name}.bias"] = make(out)

    for i in range(depth):
        block = f"transformer.h.{i}"
        affine(f"{block}.ln_1", width)
        affine(f"{block}.attn.c_attn", width if mixer == "tssa" else 3 * width, width)
        affine(f"{block}.attn.c_proj", width, width)
        if mixer == "tssa":
            state[f"{block}.attn.temp"] = make(heads, 1) + 1
            state[f"{block}.attn.denom_bias"] = make(heads, length, 1)
        affine(f"{block}.ln_2", width)
        affine(f"{block}.mlp.c_fc", 4 * width, width)
        affine(f"{block}.mlp.c_proj", width, 4 * width)
        if gammas:
            state |= {f"{block}.gamma1": make(width), f"{block}.gamma2": make(width)}
    affine("transformer.ln_f", width)
    state["lm_head.weight"] = state["transformer.wte.weight"] if tied else make(vocabulary, width)
    return state


def language_logits(state: State, ids: Tensor, *, heads: int, mixer: str = "tssa") -> Tensor:
    """Follow tokens through the language model of the authors."""

    def layer(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state.get(f"{name}.bias"))

    def mix(block: str, projected: Tensor) -> Tensor:
        if mixer == "softmax":
            q, k, v = (_split(part, heads) for part in projected.chunk(3, dim=-1))
            scores = q @ k.transpose(-2, -1) / sqrt(q.shape[-1])
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            return _join(scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ v)
        w = _split(projected, heads)
        share = w**2 / (w**2).cumsum(dim=-2).clamp_min(1e-12) + state[f"{block}.attn.denom_bias"][:, :length]
        belongs = (share.sum(dim=-1) * state[f"{block}.attn.temp"]).softmax(dim=1).unsqueeze(-1)
        moment = (belongs * w**2).cumsum(dim=-2) / (belongs.cumsum(dim=-2) + 1e-8)
        return _join(-belongs * w / (1 + moment))

    length = ids.shape[1]
    x = state["transformer.wte.weight"][ids] + state["transformer.wpe.weight"][:length]
    for block in _blocks(state, "transformer.h."):
        projected = layer(f"{block}.attn.c_attn", norm(f"{block}.ln_1", x))
        x = x + state.get(f"{block}.gamma1", 1.0) * layer(f"{block}.attn.c_proj", mix(block, projected))
        hidden = F.gelu(layer(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", x)))
        x = x + state.get(f"{block}.gamma2", 1.0) * layer(f"{block}.mlp.c_proj", hidden)
    return F.linear(norm("transformer.ln_f", x), state["lm_head.weight"])


def _blocks(state: State, prefix: str) -> list[str]:
    numbers = {int(name.removeprefix(prefix).split(".")[0]) for name in state if name.startswith(prefix)}
    return [f"{prefix}{number}" for number in sorted(numbers)]


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _mix(state: State, block: str, projected: Tensor, heads: int, mixer: str) -> Tensor:
    if mixer == "tssa":
        w = _split(projected, heads)
        share = F.normalize(w, dim=-2) ** 2
        belongs = (share.sum(dim=-1) * state[f"{block}.attn.temp"]).softmax(dim=1).unsqueeze(-1)
        moment = (belongs * w**2).sum(dim=-2, keepdim=True) / (belongs.sum(dim=-2, keepdim=True) + 1e-8)
        return _join(-belongs * w / (1 + moment))
    q, k, v = (_split(part, heads) for part in projected.chunk(3, dim=-1))
    if mixer == "softmax":
        return _join((q @ k.transpose(-2, -1) / sqrt(q.shape[-1])).softmax(dim=-1) @ v)
    scores = F.normalize(q, dim=-2).transpose(-2, -1) @ F.normalize(k, dim=-2) * state[f"{block}.attn.temperature"]
    return _join((scores.softmax(dim=-1) @ v.transpose(-2, -1)).transpose(-2, -1))


def _waves(height: int, width: int) -> Tensor:
    """Fourier features of rows, then of columns, [1, 64, height, width], in float32 as there."""
    rates = 10_000 ** (2 * torch.arange(32).div(2, rounding_mode="floor").float() / 32)
    maps = []
    for size, view in ((height, (-1, 1, 1)), (width, (1, -1, 1))):
        place = torch.arange(1, size + 1).float() / (size + 1e-6) * 2 * pi
        angles = place.view(view) / rates
        wave = torch.stack((angles[..., 0::2].sin(), angles[..., 1::2].cos()), dim=-1).flatten(-2)
        maps.append(wave.expand(height, width, 32))
    return torch.cat(maps, dim=-1).permute(2, 0, 1)[None].double()
