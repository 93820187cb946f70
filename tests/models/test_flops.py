"""The count of operations against torch's own counter and against a count by hand."""

import pytest

from tests.models.tiny import count_products, example, make_tiny
from tost.models import model_options, token_flops
from tost.models.options import ModelOptions
from tost.ops.flops import tssa_flops


@pytest.mark.parametrize("overrides", [{}, {"tie_head": False}, {"mlp_ratio": 2.5, "bias": True}, {"position": "none"}])
def test_products_of_a_language_model_are_those_that_torch_counts(overrides):
    model = make_tiny("tost_lm_base", **overrides)
    assert count_products(model, example(model, batch=3, length=7)) == 3 * 7 * token_flops(model.options).products


@pytest.mark.parametrize("name", ["lra_listops", "lra_image"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_products_of_a_classifier_are_those_that_torch_counts(name, pooling):
    model = make_tiny(name, pooling=pooling)
    B, N, o = 3, 7, model.options
    head = 2 * (o.embed_dim * o.hidden_dim + o.hidden_dim * o.num_classes)
    # The class token goes through the blocks but not through the embedding.
    extra = token_flops(o).products - 2 * o.embed_dim * (o.in_features or 0) if pooling == "cls" else 0
    assert count_products(model, example(model, batch=B, length=N)) == B * (N * token_flops(o).products + extra + head)


def test_statistics_are_linear_in_the_width_and_counted_once_per_layer():
    options = model_options("tost_lm_base", {})
    assert tssa_flops(12, 64, causal=True, bias=True) == 12 * (64 * 10 + 9)
    assert tssa_flops(12, 64, causal=False) == 12 * (64 * 8 + 7)
    assert token_flops(options).statistics == 12 * tssa_flops(12, 64, causal=True, bias=True)
    free = model_options("tost_lm_base", {"position": "none"})
    assert token_flops(free).statistics == 12 * tssa_flops(12, 64, causal=True)


def test_operator_count_is_that_of_the_equation_written_out():
    """Walk through the equations of one causal token with numbers that count what happens to them."""
    count = 0

    class Number:
        def __init__(self, value=1.0):
            self.value = value

        def _op(self, other):
            nonlocal count
            count += 1
            return Number()

        __add__ = __mul__ = __truediv__ = __sub__ = _op

        def exp(self):
            return self._op(None)

        def max(self, other):
            return self._op(other)

    H, D, one = 3, 5, Number()
    energies = []
    for _h in range(H):
        energy = Number()
        for _d in range(D):
            square = one * one
            energy = energy + square / (one + square)
        energies.append((energy + one * one) * one)  # the bias counts D times; then the temperature
    exponentials = []
    largest = one
    for energy in energies:
        largest = largest.max(energy)
    for energy in energies:
        exponentials.append((energy - largest).exp())
    mass = one
    for value in exponentials:
        mass = mass + value
    for value in exponentials:
        pi = value / mass
        _ = one + pi  # sum of memberships
        for _d in range(D):
            weighted = one + pi * one
            moment = weighted / one
            _ = (pi * one) / (one + moment)
    assert count == tssa_flops(H, D, causal=True, bias=True)
    assert tssa_flops(H, D, causal=True, bias=True) - tssa_flops(H, D, causal=True) == 2 * H


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="cannot count the operations of ModelOptions: it is no model of this package"):
        token_flops(ModelOptions(embed_dim=4, depth=1, num_heads=1))
