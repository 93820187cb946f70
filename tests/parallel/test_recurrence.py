"""Recurrent mixers whose sequence several processes share."""

import pytest
import torch

from tests.parallel.ranks import run_ranks
from tost import nn
from tost.errors import BackendError
from tost.nn.state import RecurrentState
from tost.parallel import ContextParallel
from tost.testing import assert_close

B, C = 2, 8
MIXERS = {"MinGRU": nn.MinGRU}
# Pieces of three ranks: some have no tokens, the first included.
LENGTHS = [(3, 4, 2), (9, 0, 0), (0, 5, 4), (0, 0, 9), (1, 0, 8)]


def build(kind):
    torch.manual_seed(0)
    mixer = MIXERS[kind](C, 2).double()
    x = torch.randn(B, 9, C, dtype=torch.float64, requires_grad=True)
    memory = torch.rand(B, *mixer.memory_shape(), dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 9, [True, False, True, True, False, False, True, True, False]])
    return mixer, x, RecurrentState(memory, torch.tensor([5, 7])), mask


def loss_of(y, after):
    return y.square().sum() + (after.memory * torch.arange(after.memory.shape[1])).sum()


def gradients_of(mixer, x, state):
    return {"x": x.grad, "memory": state.memory.grad} | {name: p.grad for name, p in mixer.named_parameters()}


def whole(kind):
    mixer, x, state, mask = build(kind)
    y, after = mixer.forward_with_state(x, state, mask)
    loss_of(y, after).backward()
    return y.detach(), after, gradients_of(mixer, x, state)


def piece(kind, lengths):
    mixer, x, state, mask = build(kind)
    with ContextParallel() as context:
        here = context.split(x, lengths=lengths)
        y, after = mixer.forward_with_state(here, state, context.split(mask, lengths=lengths))
        # The state is the same on every rank, and counts once.
        (y.square().sum() + (loss_of(y, after) - y.square().sum()) / context.size).backward()
        return context.unsplit(y.detach()), tuple(after), gradients_of(mixer, x, state)


def exchanged(kind, length):
    mixer = MIXERS[kind](C, 2)
    with ContextParallel() as context:
        mixer(context.split(torch.randn(B, length, C))).sum().backward()
        return context.num_collectives, context.bytes_exchanged


def refused():
    messages = []
    for other in (nn.CausalLinearAttention, nn.GatedDeltaNet):
        with ContextParallel(), pytest.raises(BackendError, match="needs whole sequences") as caught:
            other(C, 2)(torch.randn(B, 4, C))
        messages.append(str(caught.value))
    return messages


def job():
    pieces = {(kind, lengths): piece(kind, lengths) for kind in MIXERS for lengths in LENGTHS}
    traffic = {kind: [exchanged(kind, length) for length in (30, 900)] for kind in MIXERS}
    return pieces, traffic, refused()


def test_ranks_compute_what_one_process_does(tmp_path):
    ranks = run_ranks(3, tmp_path, job)
    for kind, lengths in ranks[0][0]:
        y, after, gradients = whole(kind)
        mask = build(kind)[-1]
        for pieces, *_ in ranks:
            shared, (memory, position), _ = pieces[kind, lengths]
            assert_close(f"{kind} {lengths} y", shared[mask], y[mask], 1e-12)
            assert_close(f"{kind} {lengths} memory", memory.detach(), after.memory.detach(), 1e-12)
            assert position.tolist() == after.position.tolist() == [14, 12]
        for name, expected in gradients.items():
            parts = [pieces[kind, lengths][2][name] for pieces, *_ in ranks]
            assert_close(f"{kind} {lengths} {name}", sum(p for p in parts if p is not None), expected, 1e-10)
    for _, traffic, messages in ranks:
        for few, many in traffic.values():
            assert few == many, "the traffic grows with the sequence"
        assert ["CausalLinearAttention" in messages[0], "GatedDeltaNet" in messages[1]] == [True, True]
