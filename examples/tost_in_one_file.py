"""Token Statistics Transformers in one file: read this first, then the library. Needs torch only, imports no tost.

Both operators of the paper, the block, the image classifier and the causal language model with its recurrent state.
Parameters have the library's names, so weights load both ways; `tests/test_one_file.py` checks that outputs, states and
gradients agree. The library adds speed, masks, packed batches and training.

Shapes: B batch, N tokens, H heads, D head width, C = H * D model width.

    $ python examples/tost_in_one_file.py    # trains a small language model, then a small classifier, in a minute
"""

import os
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- The operators. Tokens meet in three sums only: w^2, pi w^2 and pi.


def tssa(w: Tensor, temperature: Tensor) -> Tensor:
    """Token statistics self-attention: tokens w [B, N, H, D], temperature [H]; returns [B, N, H, D]."""
    square = w.square()
    energy = (square / square.sum(dim=1, keepdim=True).clamp_min(1e-24)).sum(dim=-1)  # [B, N, H]
    pi = (temperature * energy).softmax(dim=-1).unsqueeze(-1)  # membership of each token in the heads (groups)
    moment = (pi * square).sum(dim=1, keepdim=True) / (pi.sum(dim=1, keepdim=True) + 1e-8)  # [B, 1, H, D]
    return -pi * w / (1 + moment)  # a gradient step on the coding rate: directions that vary most shrink most


class State(NamedTuple):
    """Sums over all tokens so far: squares and weighted [B, H, D], mass [B, H], and their number."""

    squares: Tensor
    weighted: Tensor
    mass: Tensor
    position: int


def causal_tssa(w: Tensor, temperature: Tensor, bias: Tensor, state: State | None = None) -> tuple[Tensor, State]:
    """Causal form: every sum runs up to the token itself; bias [H, L] is added to each feature's share.

    With the state after the tokens before, w [B, N, H, D] continues a sequence, from its prompt or token by token.
    """
    B, N, H, D = w.shape
    if state is None:
        state = State(w.new_zeros(B, H, D), w.new_zeros(B, H, D), w.new_zeros(B, H), 0)
    square = w.square()
    squares = state.squares[:, None] + square.cumsum(dim=1)
    here = bias[:, state.position : state.position + N].t().unsqueeze(-1)  # [N, H, 1]
    energy = (square / squares.clamp_min(1e-12) + here).sum(dim=-1)
    pi = (temperature * energy).softmax(dim=-1)
    weighted = state.weighted[:, None] + (pi.unsqueeze(-1) * square).cumsum(dim=1)
    mass = state.mass[:, None] + pi.cumsum(dim=1)
    y = -pi.unsqueeze(-1) * w / (1 + weighted / (mass + 1e-8).unsqueeze(-1))
    return y, State(squares[:, -1], weighted[:, -1], mass[:, -1], state.position + N)


# --- Attention, feed-forward, block


def mlp(C: int, first: str, second: str, bias: bool = True) -> nn.Sequential:
    """Two linear layers with these names and a GELU between them."""
    layers = {first: nn.Linear(C, 4 * C, bias=bias), "gelu": nn.GELU(), second: nn.Linear(4 * C, C, bias=bias)}
    return nn.Sequential(OrderedDict(layers))


class Attention(nn.Module):
    """Project into heads, operate, project back."""

    def __init__(self, C: int, H: int, bias: bool = True, max_length: int | None = None) -> None:
        super().__init__()
        self.num_heads = H
        self.proj_in = nn.Linear(C, C, bias=bias)
        self.temperature = nn.Parameter(torch.ones(H))
        self.position_bias = None if max_length is None else nn.Parameter(torch.zeros(H, max_length))
        self.proj_out = nn.Linear(C, C, bias=bias)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        w = self.proj_in(x).unflatten(-1, (self.num_heads, -1))
        if self.position_bias is None:
            return self.proj_out(tssa(w, self.temperature).flatten(2)), None
        y, state = causal_tssa(w, self.temperature, self.position_bias, state)
        return self.proj_out(y.flatten(2)), state


class Block(nn.Module):
    """x = x + gamma1 attention(norm1(x)), then x = x + gamma2 mlp(norm2(x))."""

    def __init__(self, C: int, attention: Attention, scale: float, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(C, eps, bias=bias), attention
        self.norm2, self.mlp = nn.LayerNorm(C, eps, bias=bias), mlp(C, "proj_in", "proj_out", bias)
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((C,), scale)) for _ in range(2))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        y, state = self.attention(self.norm1(x), state)
        x = x + self.gamma1 * y
        return x + self.gamma2 * self.mlp(self.norm2(x)), state


# --- Causal language model: `tost_lm_*` of the library


class LanguageModel(nn.Module):
    """Predicts the next token; the output layer is the token embedding."""

    def __init__(self, C: int, depth: int, H: int, vocab_size: int, max_length: int, scale: float = 1e-5) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, C), nn.Embedding(max_length, C)
        attentions = (Attention(C, H, False, max_length) for _ in range(depth))
        self.blocks = nn.ModuleList(Block(C, attention, scale, 1e-5, False) for attention in attentions)
        self.norm = nn.LayerNorm(C, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not name.endswith("position_bias"):
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if "proj_out" in name else 0.02)

    def forward(self, ids: Tensor, state: list[State] | None = None) -> tuple[Tensor, list[State]]:
        """Map ids [B, N] to logits [B, N, V], and return the state from which the next tokens continue."""
        start = state[0].position if state else 0
        x = self.tokens(ids) + self.positions.weight[start : start + ids.shape[1]]
        after = list(state or [None] * len(self.blocks))
        for i, block in enumerate(self.blocks):
            x, after[i] = block(x, after[i])
        return self.norm(x) @ self.tokens.weight.t(), after

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        """Sample `count` more tokens; the cost of each does not depend on how many came before."""
        logits, state = self(ids)
        for _ in range(count):
            new = logits[:, -1].softmax(dim=-1).multinomial(1)
            ids = torch.cat((ids, new), dim=1)
            logits, state = self(new, state)
        return ids


# --- Image classifier: `tost_mini`, `tost_{tiny,small,medium}_patch16_224` of the library


def conv_stem(patch_size: int, C: int) -> nn.Sequential:
    """Convolutions of stride 2 with batch norm, one for each factor of two in the patch size, GELUs between them."""
    steps = patch_size.bit_length() - 1
    widths, layers = [3, *(C >> i for i in reversed(range(steps)))], []
    for a, b in pairwise(widths):
        layers += [nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b)), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def fourier_features(rows: int, columns: int) -> Tensor:
    """Return sines and cosines of the place within the image, [1, 64, rows, columns]; any size will do."""
    rates = 2 * torch.pi / 10_000 ** (torch.arange(0, 32, 2) / 32)
    angles = [torch.arange(1, count + 1)[:, None] / (count + 1e-6) * rates for count in (rows, columns)]
    y, x = (torch.stack((a.sin(), a.cos()), dim=-1).flatten(1) for a in angles)  # [count, 32]
    y, x = y[:, None].expand(-1, columns, -1), x[None].expand(rows, -1, -1)
    return torch.cat((y, x), dim=-1).permute(2, 0, 1)[None]


class ClassAttention(nn.Module):
    """Softmax attention with the class token as the only query."""

    def __init__(self, C: int, H: int) -> None:
        super().__init__()
        self.num_heads = H
        self.q, self.k, self.v, self.proj = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.q(x[:, :1]), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ClassBlock(nn.Module):
    """XCiT's class-attention block, as the authors use it: patches are normed and doubled, the token learns."""

    def __init__(self, C: int, H: int, scale: float) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(C, 1e-6), ClassAttention(C, H), nn.LayerNorm(C, 1e-6)
        self.mlp = mlp(C, "fc1", "fc2")
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((C,), scale)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = self.norm2(x + self.gamma1 * torch.cat((self.attn(normed), normed[:, 1:]), dim=1))
        token, patches = x[:, :1], x[:, 1:]
        token = token + self.gamma2 * self.mlp(token)
        return torch.cat((token, 2 * patches), dim=1)


class ImageClassifier(nn.Module):
    """Patches by convolutions, blocks, then a class token that reads them."""

    def __init__(self, C: int, depth: int, H: int, patch_size: int, num_classes: int, scale: float = 1.0) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": conv_stem(patch_size, C)})
        self.pos_embed = nn.ModuleDict({"token_projection": nn.Conv2d(64, C, 1)})
        self.blocks = nn.ModuleList(Block(C, Attention(C, H), scale, 1e-6) for _ in range(depth))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, C))
        self.cls_attn_blocks = nn.ModuleList(ClassBlock(C, H, scale) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(C, 1e-6), nn.Linear(C, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, height, width] to logits [B, K]."""
        x = self.patch_embed["proj"](images)
        x = x + self.pos_embed["token_projection"](fourier_features(*x.shape[2:]).to(x))
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x, _ = block(x)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1)
        for block in self.cls_attn_blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def train(model: nn.Module, loss: Callable[[], Tensor], steps: int) -> None:
    """Minimize the loss of a new batch in each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        (value := loss()).backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {value.item():.3f}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    steps = int(os.environ.get("STEPS", "200"))
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()  # the Python standard library
    language = LanguageModel(128, 2, 4, 256, 512, scale=1.0)

    def next_byte() -> Tensor:
        ids = torch.stack([data[i : i + 129] for i in torch.randint(len(data) - 129, (16,))])
        return F.cross_entropy(language(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten())

    train(language, next_byte, steps)
    print(bytes(language.generate(torch.tensor([list(b"def ")]), 200)[0].tolist()).decode(errors="replace"))
    classifier = ImageClassifier(64, 2, 4, 4, 4)

    def brighter_quarter() -> Tensor:
        label, images = torch.randint(4, (16,)), torch.randn(16, 3, 2, 16, 2, 16)
        images[torch.arange(16), :, label // 2, :, label % 2] += 0.2
        return F.cross_entropy(classifier(images.reshape(16, 3, 32, 32)), label)

    train(classifier, brighter_quarter, steps)
