"""The loss of a text taken in pieces: that of the whole, with its gradients, in memory that does not grow."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.tiny import PLUS, make_tiny, perturb
from tost.testing import assert_close

N, V = 20, 13
FORMS = {
    "paper": {},
    "plus": {**PLUS, "position": "none", "conv_width": 3, "conv_at": "both"},
    "softmax": {"mixer": "softmax", "layer_scale": None},
    "gated_delta": {"mixer": "gated_delta", "position": "sinusoidal"},
    "checkpointed": {"gradient_checkpointing": True},
}


def make(form, **overrides):
    torch.manual_seed(0)
    return perturb(make_tiny("tost_lm_base", **{"vocab_size": V, "max_length": N, **FORMS[form], **overrides}).double())


def text():
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(V, (2, 2, N), generator=generator)
    mask = torch.rand(2, N, generator=generator) < 0.8
    targets[0, 3] = -100
    return ids, targets, mask


def differentiate(model, *arguments, **options):
    loss = model.loss(*arguments, **options)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=8)
@given(chunk=st.integers(1, N + 5), padded=st.booleans(), reduction=st.sampled_from(["mean", "sum"]))
def test_pieces_have_the_loss_and_the_gradients_of_the_whole(form, chunk, padded, reduction):
    model, (ids, targets, mask) = make(form), text()
    arguments = (ids, targets, mask if padded else None)
    whole, expected = differentiate(model, *arguments, reduction=reduction)
    loss, gradients = differentiate(model, *arguments, reduction=reduction, chunk=chunk)
    assert_close("loss", loss, whole, 1e-12)
    for (name, _), got, want in zip(model.named_parameters(), gradients, expected, strict=True):
        assert_close(f"gradient of {name}", got, want, 1e-10)
    with torch.no_grad():
        assert_close("loss without gradients", model.loss(*arguments, reduction=reduction, chunk=chunk), whole, 1e-12)


def test_dropout_is_the_same_when_a_piece_is_computed_again():
    model, (ids, targets, _) = make("plus", dropout=0.3).train(), text()

    def loss(seed):
        torch.manual_seed(seed)
        return model.loss(ids, targets, chunk=7)

    weight = model.blocks[0].mlp.proj_in.weight
    (gradient,) = torch.autograd.grad(loss(5), weight)
    direction, step = torch.randn_like(weight), 1e-6
    with torch.no_grad():
        weight += step * direction
        ahead = loss(5)
        weight -= 2 * step * direction
        slope = (ahead - loss(5)) / (2 * step)
        assert loss(6) != loss(5)
    assert_close("slope", (gradient * direction).sum(), slope, 1e-6)


def test_truncated_gradients_stop_at_the_pieces_that_were_asked_for():
    model, (ids, targets, _) = make("plus"), text()
    _, truncated = differentiate(model, ids, targets, chunk=5, truncate=2, reduction="sum")
    state, expected = None, [torch.zeros_like(p) for p in model.parameters()]
    for begin in range(0, N, 10):  # two pieces at a time, each group from a state without a past
        part = slice(begin, begin + 10)
        logits, state = model.forward_with_state(ids[:, part], state)
        state = state.detach()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, part].flatten(), reduction="sum")
        for total, one in zip(expected, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            total += one
    _, whole = differentiate(model, ids, targets, reduction="sum")
    for got, want in zip(truncated, expected, strict=True):
        assert_close("gradient", got, want, 1e-10)
    assert any((got - want).abs().max() > 1e-6 for got, want in zip(truncated, whole, strict=True))


def test_sizes_that_make_no_sense_are_refused():
    model, (ids, targets, _) = make("paper"), text()
    for options in ({"chunk": 0}, {"chunk": 4, "truncate": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            model.loss(ids, targets, **options)
    with pytest.raises(ValueError, match="truncate=2 counts pieces, but there is no chunk"):
        model.loss(ids, targets, truncate=2)


MEASURE = """
import json, resource, sys, torch, tost
from pathlib import Path
torch.set_num_threads(1)
def peak():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
tokens = int(sys.argv[1])
model = tost.create_model(
    "tost_lm_base", embed_dim=96, depth=2, num_heads=4, vocab_size=256, position="none", conv_width=4
)
ids = torch.arange(tokens + 1).mul(7).remainder(251).unsqueeze(0)
before = peak()
model.loss(ids[:, :-1], ids[:, 1:], chunk=2048).backward()
print(json.dumps({"grown": peak() - before}))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_length():
    def grown(tokens):
        line = [sys.executable, "-c", MEASURE, str(tokens)]
        return json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)["grown"]

    assert grown(131_072) < 1.3 * grown(8_192)
