"""Sequences of different lengths in one row, told apart by the table that the kernels take."""

import pytest
import torch

pytest.importorskip("triton", reason="triton has no packages for this platform")

from tests.ops.triton.packed import compare_packed
from tost.ops.triton import launch

LENGTHS = [1, 70, 0, 64, 3]


@pytest.mark.parametrize("chunk", [16, 64])
def test_the_table_has_every_row_once_and_no_chunk_of_two_sequences(chunk):
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    layout = launch.packed_layout(ends, sum(LENGTHS), chunk)
    assert layout.sequences == len(LENGTHS)
    assert len(layout.table) == layout.programs >= layout.bounds[-1]
    seen = []
    for number, (sequence, first, begin, end) in enumerate(layout.table.tolist()):
        if number >= layout.bounds[-1]:
            assert begin >= end
            continue
        assert layout.bounds[sequence] <= number < layout.bounds[sequence + 1]
        assert first == ends[sequence] <= begin < end <= ends[sequence + 1]
        assert end - begin <= chunk
        seen += range(begin, end)
    assert seen == list(range(sum(LENGTHS)))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_do_not_see_each_other(causal):
    compare_packed(LENGTHS, causal=causal)
