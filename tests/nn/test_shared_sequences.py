"""Blocks on sequences that two processes share: what works as in one process, and what is refused."""

import pytest
import torch

import tost
from tests.parallel.ranks import run_ranks
from tost.errors import BackendError
from tost.nn import (
    MLP,
    Block,
    CrossCovarianceAttention,
    GridConvolution,
    SequenceConvolution,
    SoftmaxAttention,
    SubspaceAttention,
)
from tost.parallel import ContextParallel
from tost.testing import assert_close

B, N, C, H = 32, 6, 8, 2


def plus_block(**options):
    torch.manual_seed(0)
    attention = tost.BlockTSSAttention(C, H, block_size=2)
    return Block(attention, MLP(C, C), C, layer_scale=0.5, **options), torch.randn(B, N, C)


def gated_attention():
    torch.manual_seed(1)
    return tost.GatedTSSAttention(C, H, block_size=2).eval()


def refusals():
    """Everything that would quietly give the result of a piece."""
    x = torch.zeros(1, N, C)
    return {
        "softmax": lambda: SoftmaxAttention(C, H)(x),
        "xca": lambda: CrossCovarianceAttention(C, H)(x),
        "mssa": lambda: SubspaceAttention(C, H)(x),
        "conv": lambda: GridConvolution(C)(x, (2, 3)),
        "line": lambda: SequenceConvolution(C)(x),
    }


def run():
    found = {}
    with ContextParallel() as context:
        block, x = plus_block(drop_path=0.5)
        torch.manual_seed(10 + context.rank)  # each rank draws from its own generator
        piece = context.split(x)
        found["kept"] = block(piece) - piece
        found["evaluated"] = block.eval()(piece)
        found["causal"] = gated_attention()(piece)
        for name, call in refusals().items():
            try:
                call()
            except BackendError as error:
                found[name] = str(error)
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(2, tmp_path_factory.mktemp("shared"), run)


def test_ranks_drop_the_branches_of_the_same_sequences(ranks):
    # A branch is dropped in about half of the sequences, both in about a quarter: then nothing was added at all.
    untouched = [(rank["kept"] == 0).flatten(1).all(dim=1) for rank in ranks]
    assert torch.equal(*untouched)
    assert 0 < untouched[0].sum() < B / 2


def test_attention_equals_one_process(ranks):
    block, x = plus_block()
    assert_close("y", torch.cat([rank["evaluated"] for rank in ranks], dim=1), block.eval()(x), 1e-6)
    assert_close("causal y", torch.cat([rank["causal"] for rank in ranks], dim=1), gated_attention()(x), 1e-6)


@pytest.mark.parametrize("name", ["softmax", "xca", "mssa", "conv", "line"])
def test_what_needs_whole_sequences_is_refused(ranks, name):
    assert all("needs whole sequences" in rank[name] and "context parallelism" in rank[name] for rank in ranks)
