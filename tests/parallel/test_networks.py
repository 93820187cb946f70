"""Modules and models of tost inside a context, without a change to them, against one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tost
from tests.parallel.networks import NETWORKS, B, C, H, assemble, differentiate, gradients_of, make_inputs, make_network
from tests.parallel.ranks import run_ranks
from tost.models import create_model
from tost.parallel import ContextParallel
from tost.testing import assert_close, relative_rms

LENGTHS = {2: [(11, 10), (0, 21)], 3: [(7, 7, 7), (20, 0, 1)]}
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-6}


def calls(size: int) -> list[tuple[str, tuple[int, ...], bool, torch.dtype]]:
    return list(itertools.product(NETWORKS, LENGTHS[size], (False, True), BOUNDS))


def run_networks(size: int) -> dict[str, object]:
    context = ContextParallel()
    with context:
        results = [differentiate(*call, context) for call in calls(size)]
        return {
            "calls": results,
            "silent": silent(context),
            "continued": continued(context),
            "pieces": pieces(context),
            "packed": packed(context),
            "rows": packed_rows(context),
            "packed pieces": packed_pieces(context),
            "dropped": dropped(context),
            "half": half_precision(context),
        }


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3], ids=lambda size: f"{size} ranks")
def ranks(request, tmp_path_factory):
    size = request.param
    return run_ranks(size, tmp_path_factory.mktemp(f"networks_{size}"), run_networks, size)


def test_networks_equal_one_process(ranks):
    for index, call in enumerate(calls(len(ranks))):
        actual = assemble(call[0], [rank["calls"][index] for rank in ranks])
        expected, exact = differentiate(*call), differentiate(*call, exact=True)
        assert actual.keys() == expected.keys()
        for name in expected:
            # One process rounds too: in float32 some of its own results are off by more than the bound.
            bound = max(BOUNDS[call[-1]], 5 * relative_rms(expected[name], exact[name]))
            assert_close(f"{name} of {call}", actual[name], expected[name], bound)


def silent(context: ContextParallel) -> dict[str, Tensor]:
    """Results without autograd, when modules alone would work in place."""
    with torch.no_grad():
        x = {name: make_inputs(name, 21, False, torch.float64)[0] for name in ("plain", "causal")}
        return {name: make_network(name, torch.float64)(context.split(x[name])) for name in x}


def test_inference_equals_one_process(ranks):
    for name in ("plain", "causal"):
        expected = make_network(name, torch.float64)(make_inputs(name, 21, False, torch.float64)[0])
        assert_close(name, torch.cat([rank["silent"][name] for rank in ranks], dim=1), expected, 1e-12)


def continued(context: ContextParallel | None) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """A language model on a sequence in two halves, each of them shared, with gradients through the state."""
    model = make_network("language model", torch.float64)
    ids, mask, cotangent = make_inputs("language model", 30, True, torch.float64)
    state, logits, loss = None, [], torch.zeros((), dtype=torch.float64)
    for part in ([x[:, :13] for x in (ids, mask, cotangent)], [x[:, 13:] for x in (ids, mask, cotangent)]):
        here = part if context is None else [context.split(x) for x in part]
        y, state = model.forward_with_state(here[0], state, here[1])
        logits.append((y * here[1].unsqueeze(-1)).detach())
        loss = loss + (y * here[1].unsqueeze(-1) * here[2]).sum()
    loss.backward()
    return logits, [x.detach() for layer in state.layers for x in layer], gradients_of(model)


def test_language_model_continues_a_shared_sequence(ranks):
    logits, state, gradients = continued(None)
    for half in range(2):
        joined = torch.cat([rank["continued"][0][half] for rank in ranks], dim=1)
        assert_close(f"logits of half {half}", joined, logits[half], 1e-10)
    for index, expected in enumerate(state):
        for rank in ranks:
            assert_close("state", rank["continued"][1][index], expected, 1e-12)
    assert_close("gradients", sum(rank["continued"][2] for rank in ranks), gradients, 1e-10)


LANGUAGE_MODELS = [name for name in NETWORKS if name.startswith("language model")]


def pieces(context: ContextParallel | None) -> dict[str, Tensor]:
    """Gradients of a text that is taken in pieces of 12 tokens, each of them shared."""
    found = {}
    for name in LANGUAGE_MODELS:
        model = make_network(name, torch.float64)
        ids, mask, _ = make_inputs(name, 30, True, torch.float64)
        chunk, here = 12, [ids, ids.roll(-1, dims=1), mask]
        if context is not None:
            here = [torch.cat([context.split(piece) for piece in x.split(chunk, dim=1)], dim=1) for x in here]
            chunk //= context.size
        model.loss(*here, reduction="sum", chunk=chunk).backward()
        found[name] = gradients_of(model)
    return found


def test_shared_texts_are_taken_in_pieces(ranks):
    for name, expected in pieces(None).items():
        assert_close(f"{name}: gradients", sum(rank["pieces"][name] for rank in ranks), expected, 1e-10)


PACKED = ("plain, paper", "causal, paper", "gated", "blocks", "language model", "language model, gated", "classifier")
BOUNDS_OF_TEXTS = torch.tensor([0, 2, 13, 13, 14, 30])


def packed(context: ContextParallel | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Results and gradients of texts that are packed into one row, wherever ranks begin."""
    found = {}
    for name in PACKED:
        network, module = NETWORKS[name], make_network(name, torch.float64)
        x, mask, cotangent = (part[:1] for part in make_inputs(name, 30, True, torch.float64))
        packing = tost.Packing.from_cu_seqlens(BOUNDS_OF_TEXTS, 30)
        if network.pooled:
            shape = (packing.num_sequences, cotangent.shape[-1])
            cotangent = torch.arange(shape[0] * shape[1]).reshape(shape).cos().double()
        if context is not None:
            packing, x, mask = context.split_packing(BOUNDS_OF_TEXTS), context.split(x), context.split(mask)
            cotangent = cotangent / context.size if network.pooled else context.split(cotangent)
        y = module(x, mask, **{"packing" if network.takes == "tokens" else "cu_seqlens": packing})
        y = y if network.pooled else y * mask.unsqueeze(-1)
        (y * cotangent).sum().backward()
        found[name] = y.detach(), gradients_of(module)
    return found


def test_packed_texts_are_shared(ranks):
    for name, (expected, gradients) in packed(None).items():
        values = [rank["packed"][name][0] for rank in ranks]
        y = values[0] if NETWORKS[name].pooled else torch.cat(values, dim=1)
        assert_close(f"{name}: result", y, expected, 1e-10)
        assert_close(f"{name}: gradients", sum(rank["packed"][name][1] for rank in ranks), gradients, 1e-10)


def texts_of_rows() -> Tensor:
    """Which text each token of two rows of 30 belongs to; some texts have one or two tokens."""
    cuts = torch.tensor([[[1], [3], [14], [15]], [[6], [12], [13], [25]]])
    return (torch.arange(30) >= cuts).sum(dim=1)


def packed_rows(context: ContextParallel | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Results and gradients of texts that are packed into two rows, each rank knowing the texts of its own tokens."""
    found = {}
    for name in PACKED[:-1]:
        module = make_network(name, torch.float64)
        x, _, cotangent = make_inputs(name, 30, True, torch.float64)
        ids, packing = texts_of_rows(), tost.Packing.from_segment_ids(texts_of_rows())
        if context is not None:
            x, cotangent, ids = context.split(x), context.split(cotangent), context.split(ids)
            packing = context.split_packing(packing)
        y = module(x, **({"packing": packing} if NETWORKS[name].takes == "tokens" else {"segment_ids": ids}))
        (y * cotangent).sum().backward()
        found[name] = y.detach(), gradients_of(module)
    return found


def test_texts_packed_into_rows_are_shared(ranks):
    for name, (expected, gradients) in packed_rows(None).items():
        y = torch.cat([rank["rows"][name][0] for rank in ranks], dim=1)
        assert_close(f"{name}: result", y, expected, 1e-10)
        assert_close(f"{name}: gradients", sum(rank["rows"][name][1] for rank in ranks), gradients, 1e-10)


def packed_pieces(context: ContextParallel | None) -> dict[str, Tensor]:
    """Gradients of packed texts that are taken in pieces of 12 tokens, each of them shared."""
    found = {}
    for name, by_lengths in itertools.product(LANGUAGE_MODELS, (True, False)):
        model = make_network(name, torch.float64)
        ids, _, _ = make_inputs(name, 30, False, torch.float64)
        texts, chunk = texts_of_rows(), 12
        if by_lengths:
            ids, texts = ids[:1], texts[:1]
        here = [ids, ids.roll(-1, dims=1), texts]
        if context is not None:
            here = [torch.cat([context.split(piece) for piece in x.split(chunk, dim=1)], dim=1) for x in here]
            chunk //= context.size
        lengths = tost.Packing.from_segment_ids(texts).cu_seqlens
        given = {"cu_seqlens": lengths} if by_lengths else {"segment_ids": here[2]}
        model.loss(*here[:2], reduction="sum", chunk=chunk, **given).backward()
        found[f"{name}, {len(ids)} rows"] = gradients_of(model)
    return found


def test_shared_packed_texts_are_taken_in_pieces(ranks):
    for name, expected in packed_pieces(None).items():
        assert_close(f"{name}: gradients", sum(rank["packed pieces"][name] for rank in ranks), expected, 1e-10)


def dropped(context: ContextParallel) -> Tensor:
    """Which features a dropout of the gain keeps; every rank draws from its own generator."""
    module = tost.TSSAttention(C, H, gain_drop=0.5)
    module.proj_out = torch.nn.Identity()
    x = torch.randn(B, 12, C, generator=torch.Generator().manual_seed(2))
    module.proj_in.load_state_dict(tost.TSSAttention(C, H).proj_in.state_dict())
    torch.manual_seed(context.rank)
    y = module(context.split(x))
    return (y != 0).all(dim=1)


def test_dropout_of_the_gain_is_the_same_for_all_ranks(ranks):
    kept = [rank["dropped"] for rank in ranks]
    assert all(torch.equal(kept[0], other) for other in kept)
    assert 0.2 < kept[0].float().mean() < 0.8


def half_precision(context: ContextParallel | None) -> Tensor:
    torch.manual_seed(0)
    module = create_model("tost_lm_base", embed_dim=C, depth=1, num_heads=H, vocab_size=8, max_length=64)
    ids = torch.arange(40).remainder(8).view(1, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = module(ids if context is None else context.split(ids))
    F.cross_entropy(logits.float().flatten(0, 1), torch.zeros(logits.shape[1], dtype=torch.int64)).backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    return logits.detach().float()


def test_autocast_works_as_in_one_process(ranks):
    joined = torch.cat([rank["half"] for rank in ranks], dim=1)
    assert_close("logits", joined, half_precision(None), 2e-2)
