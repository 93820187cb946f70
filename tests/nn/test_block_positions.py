"""Positions of tokens, the vectors that stand for them, and the state of a whole model."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tost.nn import SinusoidalPositions, token_positions


def test_positions_count_from_zero_and_go_on_from_the_start():
    assert token_positions(4).tolist() == [[0, 1, 2, 3]]
    assert token_positions(3, start=torch.tensor([5, 0])).tolist() == [[5, 6, 7], [0, 1, 2]]
    assert token_positions(0, max_length=4).shape == (1, 0)


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3), st.integers(0, 9))
def test_positions_of_real_tokens_are_consecutive_whatever_the_padding(rows, start):
    mask = torch.tensor(rows)
    positions = token_positions(6, mask=mask, start=torch.full((len(rows),), start))
    for row, real in zip(positions, mask, strict=True):
        assert row[real].tolist() == list(range(start, start + int(real.sum())))
        assert (row[~real] == 0).all()


@pytest.mark.parametrize(
    ("call", "reached"),
    [
        (lambda n: token_positions(n, max_length=8), 9),
        (lambda n: token_positions(n - 4, start=torch.tensor([4, 0]), max_length=8), 9),
        (lambda n: token_positions(n + 1, mask=torch.arange(n + 1)[None] > 0, max_length=8), 9),
    ],
    ids=["plain", "continued", "padded"],
)
def test_positions_end_at_max_length(call, reached):
    assert call(8).max() == 7
    with pytest.raises(ValueError, match=rf"reaches position {reached}, but this model has 8 positions.*max_length=9"):
        call(9)


def test_sinusoidal_positions_are_the_waves_they_claim_to_be():
    waves = SinusoidalPositions(max_length=40, embed_dim=6)
    assert not list(waves.state_dict())
    position = 17
    rates = [1.0, 10_000.0**-0.5, 10_000.0**-1]
    expected = [math.sin(position * r) for r in rates] + [math.cos(position * r) for r in rates]
    alike = waves(torch.arange(40)[None])
    torch.testing.assert_close(alike[0, position], torch.tensor(expected))
    rows = torch.tensor([[3, 17, 0], [39, 1, 2]])
    assert torch.equal(waves(rows), alike[0][rows])
