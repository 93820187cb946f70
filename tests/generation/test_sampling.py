"""Choosing a token: each rule against its definition, the draw against the distribution."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tost.errors import ConfigError
from tost.generation import Sampling
from tost.generation.sampling import choose, draw_noise, keep_top_k, keep_top_p, penalize, prepare

# Halves have many ties and are exact in floating point.
LOGITS = st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=1, max_size=12)
NEW = torch.zeros(1, 1, dtype=torch.bool)


def row(values):
    return torch.tensor([values], dtype=torch.float64)


def kept(logits):
    return [index for index, value in enumerate(logits[0].tolist()) if value > -math.inf]


@given(LOGITS, st.integers(1, 15))
def test_top_k_keeps_what_is_as_likely_as_the_kth(values, k):
    least = sorted(values, reverse=True)[min(k, len(values)) - 1]
    result = keep_top_k(row(values), k)
    assert kept(result) == [index for index, value in enumerate(values) if value >= least]
    assert all(result[0, index] == values[index] for index in kept(result))


@given(LOGITS, st.floats(0.01, 0.99))
def test_top_p_keeps_what_has_less_than_p_above_it(values, p):
    chances = row(values).softmax(-1)[0].tolist()
    above = [math.fsum(c for c, other in zip(chances, values, strict=True) if other > value) for value in values]
    if any(abs(mass - p) < 1e-9 for mass in above):
        return  # rounding decides
    result = keep_top_p(row(values), p)
    assert kept(result) == [index for index, mass in enumerate(above) if mass < p]
    assert all(result[0, index] == values[index] for index in kept(result))


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_takes_the_short_way_to_the_same_result(p):
    # One row finds its mass among the first candidates, the other is flat and needs all of them.
    logits = torch.stack((8 * torch.randn(5000), torch.rand(5000) / 10)).double()
    together = keep_top_p(logits, p)
    for index in range(2):
        chances, order = logits[index].softmax(-1).sort(descending=True)
        count = int((chances.cumsum(-1) < p).sum()) + 1
        assert torch.equal((together[index] > -math.inf).nonzero()[:, 0], order[:count].sort().values)


@given(LOGITS, st.sets(st.integers(0, 11)), st.floats(0.5, 2))
def test_penalty_divides_what_is_positive_and_multiplies_what_is_not(values, seen, penalty):
    flags = torch.tensor([[index in seen for index in range(len(values))]])
    expected = [
        value if index not in seen else value / penalty if value > 0 else value * penalty
        for index, value in enumerate(values)
    ]
    assert torch.equal(penalize(row(values), flags, penalty), row(expected))


def test_rules_apply_in_their_order():
    logits, seen = row([2.0, 1.9, 1.0, 0.0]), torch.tensor([[True, False, False, False]])
    result = prepare(logits, seen, Sampling(repetition_penalty=2, temperature=0.5, top_k=2, top_p=0.99))
    # The penalty makes the second the likeliest and ties the first with the third, so that top-k keeps three.
    assert torch.allclose(result, row([-1.8, 0.0, -1.8, -math.inf]))
    # Temperature comes before top-p: at 0.5 the second has more than 0.7 of the mass, at 1 less.
    assert kept(prepare(logits, seen, Sampling(repetition_penalty=2, temperature=0.5, top_p=0.7))) == [1]
    assert len(kept(prepare(logits, seen, Sampling(repetition_penalty=2, top_p=0.7)))) == 3


def frequencies(logits, sampling, draws):
    rows, generator = row(logits).expand(draws, -1), torch.Generator().manual_seed(0)
    tokens = choose(rows, NEW.expand(draws, len(logits)), sampling, draw_noise(draws, len(logits), generator))
    return torch.bincount(tokens, minlength=len(logits)).double() / draws


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.8, "temperature": 1.5}],
    ids=str,
)
def test_draws_follow_the_distribution(options):
    logits, draws, sampling = [2.0, 1.0, 0.5, -1.0, -8.0], 200_000, Sampling(**options)
    expected = prepare(row(logits), NEW.expand(1, 5), sampling).softmax(-1)[0]
    found = frequencies(logits, sampling, draws)
    spread = (expected * (1 - expected) / draws).sqrt()
    assert bool(((found - expected).abs() <= 4.5 * spread + 1e-12).all()), (found, expected)


def test_noise_reaches_the_tail_and_no_further():
    """The draws are a lattice of 2^24 steps: the rarest tokens must neither be impossible nor favoured."""
    noise = draw_noise(100, 50_000, torch.Generator().manual_seed(0))
    assert bool(noise.isfinite().all())
    assert 14 < noise.max() <= 25 * math.log(2) + 1e-4
    # A token of one part in a hundred million does not turn up in a million draws.
    logits = torch.tensor([0.0, -18.4]).expand(1_000_000, 2)
    assert choose(logits, NEW.expand(1_000_000, 2), Sampling(), draw_noise(1_000_000, 2, None)).sum() <= 2


@given(LOGITS)
def test_greedy_is_the_first_of_the_likeliest(values):
    token = choose(row(values), NEW.expand(1, len(values)), Sampling(temperature=0), None)
    assert token.tolist() == [values.index(max(values))]


def test_rows_with_their_own_generators_do_not_depend_on_each_other():
    def generators(*seeds):
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    noise = draw_noise(3, 7, generators(5, 6, 7))
    assert torch.equal(noise[1:2], draw_noise(1, 7, generators(6)))
    assert torch.equal(noise[2:], draw_noise(1, 7, torch.Generator().manual_seed(7)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_numbers_are_refused(bad, temperature):
    logits = torch.tensor([[1.0, bad, 2.0]])
    with pytest.raises(ConfigError, match=r"logits reach.*no token can be chosen.*check the checkpoint"):
        choose(
            logits, NEW.expand(1, 3), Sampling(temperature=temperature), draw_noise(1, 3, None) if temperature else None
        )


def test_every_bad_option_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        Sampling(temperature=-1, top_k=0, top_p=1.5, repetition_penalty=0, stop_tokens="ab")
    text = str(caught.value)
    for words in ("temperature=-1", "top_k=0", "top_p=1.5", "repetition_penalty=0", "stop_tokens='ab'"):
        assert words in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(["temperature"], [-0.1, math.nan, math.inf, True, "1", None]),
        *itertools.product(["top_k"], [0, -3, 2.0, True, "4"]),
        *itertools.product(["top_p"], [0, 0.0, -1, 1.1, math.nan, False]),
        *itertools.product(["repetition_penalty"], [0, -1, math.inf, math.nan]),
        *itertools.product(["stop_tokens"], [5, [1.0], [True], "12", None]),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name}="):
        Sampling(**{name: value})
