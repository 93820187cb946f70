"""Masks of other libraries: each shape and dtype means the same as the mask of real tokens."""

from __future__ import annotations

import pytest
import torch

import tost
from tost.nn.masks import read_attention_mask, read_segments
from tost.testing import assert_close

B, N, C, H = 3, 5, 8, 2
REAL = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 0, 1]]).bool()
ORDER = torch.ones(N, N, dtype=torch.bool).tril()


def added(allowed, low=float("-inf")):
    return torch.zeros(allowed.shape).masked_fill(~allowed, low)


KEYS = {
    "2-D": REAL,
    "integers": REAL.long(),
    "2-D added": added(REAL),
    "4-D": REAL[:, None, None],
    "4-D added": added(REAL[:, None, None], torch.finfo(torch.float32).min),
    "as BERT had it": added(REAL[:, None, None], -10000.0),
    "pairs": REAL[:, None, None].expand(B, 1, N, N),
    "pairs for each head": added(REAL[:, None, None].expand(B, H, N, N)),
    "pairs without an axis for heads": REAL[:, None].expand(B, N, N),
    "pairs that padding sees none of": REAL[:, None, None] & REAL[:, None, :, None],
}
CAUSAL = {
    "causal": ORDER & REAL[:, None, None],
    "causal added": added(ORDER & REAL[:, None, None]),
    "causal for each head": (ORDER & REAL[:, None, None]).expand(B, H, N, N),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_form_of_a_padding_mask(kind, causal):
    torch.manual_seed(0)
    x = torch.randn(B, N, C, dtype=torch.float64)
    module = tost.CausalTSSAttention(C, H, N, dtype=x.dtype) if causal else tost.TSSAttention(C, H, dtype=x.dtype)
    assert_close("y", module(x, attn_mask=KEYS[kind]), module(x, REAL), 0)


@pytest.mark.parametrize("kind", CAUSAL)
def test_causal_masks_are_known_in_causal_modules(kind):
    x = torch.randn(B, N, C)
    module = tost.CausalTSSAttention(C, H, N)
    assert_close("y", module(x, attn_mask=CAUSAL[kind], is_causal=False), module(x, REAL), 0)
    with pytest.raises(ValueError, match=r"it is causal\. Use CausalTSSAttention"):
        tost.TSSAttention(C, H)(x, attn_mask=CAUSAL[kind])


def test_both_masks_count():
    x = torch.randn(B, N, C)
    other = torch.tensor([1, 0, 1, 1, 1]).bool().expand(B, N)
    module = tost.TSSAttention(C, H)
    assert_close("y", module(x, other, attn_mask=REAL), module(x, REAL & other), 0)


def test_a_mask_with_the_tokens_of_a_cache():
    seen = torch.tensor([[0, 1], [1, 1], [1, 1]]).bool()
    keys = torch.cat((seen, REAL), dim=1)
    pairs = torch.ones(N, N + 2, dtype=torch.bool).tril(2) & keys[:, None, None]
    for mask in (keys, pairs, added(pairs), pairs[:, :, -1:]):
        torch.testing.assert_close(read_attention_mask(mask, B, N, causal=True), REAL)


def test_a_window_is_read_as_if_it_were_not_there():
    near = ORDER & ~torch.ones(N, N, dtype=torch.bool).tril(-2)
    mask = near & REAL[:, None, None]
    torch.testing.assert_close(read_attention_mask(mask, B, N, causal=True, windowed=True), REAL)
    with pytest.raises(ValueError, match="neither causal nor a mask of padding"):
        read_attention_mask(mask, B, N, causal=True)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(B, 1, N, N).bool() & (torch.arange(N) != torch.arange(N)[:, None] + 1), "cannot leave out single"),
        (torch.linspace(-2, 0, N).expand(B, 1, 1, N), "position biases"),
        (REAL.float(), r"mask\.bool\(\)"),
        (torch.stack((REAL, ~REAL), 1)[:, :, None], "differs between heads"),
        (torch.ones(B, 1, N, N - 1).bool(), r"attn_mask has shape \(3, 1, 5, 4\).*it needs \[3, 5\]"),
        (torch.ones(B + 1, N).bool(), r"attn_mask has shape \(4, 5\)"),
    ],
    ids=["pairs", "biases", "ones and zeros", "heads", "tokens", "batch"],
)
def test_other_masks_are_refused_by_name(mask, message):
    with pytest.raises(ValueError, match=message):
        tost.TSSAttention(C, H)(torch.randn(B, N, C), attn_mask=mask)


def test_as_many_sequences_as_tokens_are_not_guessed():
    square = torch.ones(N, N).bool()
    square[0, 0] = False
    with pytest.raises(ValueError, match=r"attn_mask=\[B, 1, 1, N\]"):
        tost.TSSAttention(C, H)(torch.randn(N, N, C), attn_mask=square)


def test_segments():
    label = torch.tensor([[0, 0, 0, 0, 0], [0, 1, 1, 0, 2]])
    mask = added(label[:, :, None] == label[:, None], -100.0)
    assert read_segments(mask).tolist() == [[0, 0, 0, 0, 0], [0, 1, 1, 0, 4]]
    assert read_segments(ORDER[None]) is None


def test_compiled_with_a_mask_over_pairs():
    x, module = torch.randn(B, N, C), tost.TSSAttention(C, H)
    for dynamic in (False, True):
        compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=dynamic)
        assert_close("y", compiled(x, attn_mask=KEYS["pairs"]), module(x, REAL), 1e-6)
