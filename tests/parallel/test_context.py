"""The context itself: pieces, positions, sums with gradients, which context is in force, and what is refused."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tost
from tests.parallel.ranks import run_ranks
from tost.ops.packing import count_tokens
from tost.parallel import ContextParallel, active, make_mesh
from tost.testing import assert_close

SIZE, LENGTHS = 3, [4, 0, 3]
N = sum(LENGTHS)


@pytest.fixture
def alone():
    """A group of one, in the test's own process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ContextParallel()
    dist.destroy_process_group()


def whole(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def refusal(call) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def pieces_and_gradients() -> dict[str, object]:
    context = ContextParallel()
    x, ids = whole(0, 2, N, 5), torch.arange(2 * N).view(2, N)
    mask = ids % 3 > 0
    piece = context.split(x, lengths=LENGTHS).clone().requires_grad_()
    joined = context.unsplit(piece)
    (joined * whole(1 + context.rank, 2, N, 5)).sum().backward()
    number = whole(10 + context.rank, 4).requires_grad_()
    total = context.sum(number)
    (total * whole(20 + context.rank, 4)).sum().backward()
    here = context.split(mask, lengths=LENGTHS)
    counts = (count_tokens(LENGTHS[context.rank]), count_tokens(here.shape[1], here))
    return {
        "rank": (context.rank, context.size, repr(context)),
        "lengths": [context.split_lengths(n) for n in range(8)],
        "joined": joined.detach(),
        "dpiece": piece.grad,
        "last": context.unsplit(context.split(x.mT, dim=-1, lengths=LENGTHS), dim=-1),
        "ids": context.unsplit(context.split(ids)),
        "mask": context.unsplit(here),
        "half": context.sum(torch.ones(1, dtype=torch.bfloat16) * 2.0**context.rank),
        "sum": total.detach(),
        "dsum": number.grad,
        "count": context.sum(torch.tensor(context.rank)),
        "share": context.share(torch.tensor([float(context.rank + 5)])),
        "offset": tuple(map(context.offset, counts)),
        "total": tuple(map(context.sum, counts)),
        "loss": mean_loss(context),
        "second": second_derivative(context),
        "refused": refused_on_every_rank(context),
    }


def mean_loss(context: ContextParallel) -> tuple[Tensor, Tensor]:
    """The mean of squares of w * tokens, by ranks of which one has no tokens."""
    w = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    tokens = context.split(whole(0, 1, N), lengths=LENGTHS)
    loss = context.mean_loss((w * tokens).square().sum(), tokens.numel())
    loss.backward()
    return loss.detach(), w.grad


def second_derivative(context: ContextParallel | None) -> Tensor:
    """The gradient of a squared gradient, through the reference implementation."""
    w, t = whole(3, 1, N, 2, 3), torch.tensor([0.7, -1.2], dtype=torch.float64)
    w = (w if context is None else context.split(w, lengths=LENGTHS)).clone().requires_grad_()
    with context or nullcontext():
        y = tost.causal_tssa(w, t, backend="reference")
    (first,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
    return torch.autograd.grad(first.square().sum(), w)[0]


def refused_on_every_rank(context: ContextParallel) -> dict[str, str]:
    w, t = torch.zeros(1, LENGTHS[context.rank], 2, 3), torch.ones(2)
    others = dist.new_group([0, 1])
    outsider = dist.get_rank() == 2
    with context:
        bias = refusal(lambda: tost.causal_tssa(w, t, torch.zeros(2, N - 1)))
    return {
        "bias": bias,
        "group": refusal(lambda: ContextParallel(others)) if outsider else "member",
        "mesh": refusal(lambda: make_mesh(data=2, context=2)),
        "name": refusal(lambda: ContextParallel.from_mesh(make_mesh(context=3), "sequence")),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(SIZE, tmp_path_factory.mktemp("context"), pieces_and_gradients)


def test_pieces_are_as_equal_as_can_be_and_join_again(ranks):
    x, ids = whole(0, 2, N, 5), torch.arange(2 * N).view(2, N)
    for rank, result in enumerate(ranks):
        assert result["rank"] == (rank, SIZE, f"ContextParallel(rank={rank}, size=3)")
        assert result["lengths"] == [
            [0, 0, 0],
            [1, 0, 0],
            [1, 1, 0],
            [1, 1, 1],
            [2, 1, 1],
            [2, 2, 1],
            [2, 2, 2],
            [3, 2, 2],
        ]
        assert torch.equal(result["joined"], x)
        assert torch.equal(result["last"], x.mT)
        assert torch.equal(result["ids"], ids)
        assert torch.equal(result["mask"], ids % 3 > 0)


def test_joined_pieces_and_sums_collect_the_gradients_of_every_rank(ranks):
    cotangent = sum(whole(1 + rank, 2, N, 5) for rank in range(SIZE))
    assert_close("dpiece", torch.cat([result["dpiece"] for result in ranks], dim=1), cotangent, 1e-14)
    for result in ranks:
        assert_close("sum", result["sum"], sum(whole(10 + rank, 4) for rank in range(SIZE)), 1e-14)
        assert_close("dsum", result["dsum"], sum(whole(20 + rank, 4) for rank in range(SIZE)), 1e-14)
        assert (result["count"].item(), result["share"].item(), result["half"].item()) == (3, 5.0, 7.0)
        assert result["half"].dtype == torch.bfloat16


def test_positions_count_real_tokens_on_the_ranks_before(ranks):
    mask = torch.arange(2 * N).view(2, N) % 3 > 0
    for rank, result in enumerate(ranks):
        start = sum(LENGTHS[:rank])
        assert [x.tolist() for x in result["offset"]] == [[start], mask[:, :start].sum(dim=1).tolist()]
        assert [x.tolist() for x in result["total"]] == [[N], mask.sum(dim=1).tolist()]


def test_mean_loss_averages_to_the_mean_over_all_tokens(ranks):
    w = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    expected = (w * whole(0, 1, N)).square().mean()
    expected.backward()
    losses, gradients = (torch.stack([result["loss"][i] for result in ranks]).mean() for i in range(2))
    assert_close("loss", losses, expected, 1e-14)
    assert_close("gradient", gradients, w.grad, 1e-14)


def test_the_reference_has_second_derivatives_across_ranks(ranks):
    joined = torch.cat([result["second"] for result in ranks], dim=1)
    assert_close("second derivative", joined, second_derivative(None), 1e-10)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("bias", "ValueError: bias covers 6 positions, but the sequence that the ranks share reaches position 7. Use"),
        ("mesh", "ValueError: data=2 times context=2 is 4, but there are 3 processes; both must be at least 1"),
        ("name", "ValueError: the device mesh has no dimension 'sequence'; it has 'data', 'context'. Name one of them"),
    ],
)
def test_every_rank_refuses_together(ranks, what, message):
    assert [result["refused"][what].startswith(message) for result in ranks] == [True] * SIZE


def test_a_process_outside_of_the_group_is_refused(ranks):
    assert [result["refused"]["group"] for result in ranks[:2]] == ["member", "member"]
    assert ranks[2]["refused"]["group"].startswith("ValueError: process 2 is not a member of the group")


def test_the_innermost_context_is_in_force_in_every_thread(alone):
    other, seen = ContextParallel(), []
    assert active() is None
    with alone as entered, other:
        assert entered is alone
        thread = threading.Thread(target=lambda: seen.append(active()))
        thread.start()
        thread.join()
        assert seen == [other]
        assert active() is other
    with pytest.raises(KeyError), alone:
        raise KeyError
    assert active() is None


def test_a_group_of_one_equals_no_group(alone):
    w, t = whole(0, 2, 9, 3, 4), torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    gates = t[:, None].sigmoid().expand(2, 9, 3, 1)
    for run in (tost.tssa, tost.causal_tssa, lambda w, _: tost.gated_tssa(w, gates)):
        with alone:
            shared = run(w, t)
        assert_close("y", shared, run(w, t), 1e-14)


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_second_derivatives_of_gated_statistics_are_refused_not_wrong(alone, backend):
    w, write = whole(0, 1, 4, 2, 4).requires_grad_(), whole(1, 1, 4, 2, 2).sigmoid()
    with alone:
        y = tost.gated_tssa(w, write, backend=backend)
    with pytest.raises(
        RuntimeError, match=r"second derivatives through a recurrence .* shared by ranks\. Compute them"
    ):
        torch.autograd.grad(y.square().sum(), w, create_graph=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
def test_compiled_modules_break_the_graph_at_the_exchange_only(alone):
    for module in (
        tost.TSSAttention(8, 2),
        tost.CausalTSSAttention(8, 2, 16),
        tost.GatedTSSAttention(8, 2, block_size=4),
    ):
        x = torch.randn(1, 16, 8)
        with alone:
            explanation = torch._dynamo.explain(module)(x)
            assert explanation.graph_break_count == 1
            assert_close("y", torch.compile(module, backend="aot_eager")(x), module(x), 1e-6)


@pytest.mark.parametrize("lengths", [[3], [1, 1], [2, -1]])
def test_lengths_that_do_not_cut_are_refused(alone, lengths):
    with pytest.raises(ValueError, match=r"cannot cut 2 tokens into 1 pieces; give one length per rank, 1 numbers"):
        alone.split(torch.zeros(1, 2), lengths=lengths)


def test_bad_tokens_are_refused_before_any_exchange(alone):
    w, t = torch.zeros(1, 4, 2, 3), torch.ones(2)
    for call, message in (
        (lambda: tost.tssa(w[0], t), r"w has shape \(4, 2, 3\); TSSA needs"),
        (lambda: tost.tssa(w, t[:1]), r"temperature has shape \(1,\)"),
        (lambda: tost.tssa(w, t, mask=torch.ones(1, 3, dtype=torch.bool)), r"mask has shape \(1, 3\)"),
        (lambda: tost.causal_tssa(w, t, torch.zeros(3, 9)), r"bias has shape \(3, 9\)"),
        (lambda: tost.gated_tssa(w, w + 2), r"write lies in \[2, 2\]"),
        (lambda: tost.gated_tssa(w, w[:, :3]), r"write has shape \(1, 3, 2, 3\)"),
        (
            lambda: tost.causal_tssa_with_state(w, t, state=tost.TSSAState.empty(2, 2, 3)),
            r"state.squares has shape \(2, 2, 3\)",
        ),
        (
            lambda: tost.gated_tssa_with_state(w, w, state=tost.GatedState.empty(2, 2, 3)),
            r"state.mean has shape \(2, 2, 3\)",
        ),
    ):
        with alone, pytest.raises(ValueError, match=message):
            call()
    assert alone.num_collectives == 0


def test_a_context_needs_torch_distributed():
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialized\. Start the processes with torchrun"):
        ContextParallel()
