"""Keys and values that grow: what comes out is what `torch.cat` gives, whoever goes on from where."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tost.nn.mixers.softmax import append_tokens

SHAPE = (2, 3, 5)  # batch, heads, width


def tokens(count, seed, dtype=torch.float32):
    B, H, D = SHAPE
    return torch.randn(B, H, count, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=25), st.integers(0, 3))
@settings(max_examples=50)
def test_every_text_is_its_own_however_texts_branch(moves, first):
    """A tree of texts: each move goes on from any of those before, by a few tokens."""
    made = [tokens(first, 0)]
    expected = [made[0].clone()]
    for seed, (parent, count) in enumerate(moves, 1):
        parent %= len(made)
        new = tokens(count, seed)
        made.append(append_tokens(made[parent], new))
        expected.append(torch.cat((expected[parent], new), dim=2))
    for found, wanted in zip(made, expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_token_at_a_time_copies_little():
    text, moved = tokens(1, 0), 0
    for seed in range(1000):
        longer = append_tokens(text, tokens(1, seed))
        if longer.data_ptr() != text.data_ptr():
            moved += text.shape[2]
        text = longer
    assert text.shape[2] == 1001
    assert moved < 2 * 1001  # torch.cat moves half a million


def test_gradients_reach_every_token():
    one, two = tokens(2, 0).requires_grad_(), tokens(3, 1).requires_grad_()
    append_tokens(append_tokens(one, two), tokens(1, 2)).square().sum().backward()
    assert torch.equal(one.grad, 2 * one)
    assert torch.equal(two.grad, 2 * two)


def test_inference_mode_and_dtypes_do_not_mix():
    with torch.inference_mode():
        text = append_tokens(tokens(2, 0), tokens(1, 1))
    outside = append_tokens(text, tokens(1, 2))
    assert not outside.is_inference()
    other = append_tokens(outside, tokens(1, 3, torch.float64))
    assert other.dtype == torch.float64
    assert torch.equal(other[:, :, :4], outside.double())
