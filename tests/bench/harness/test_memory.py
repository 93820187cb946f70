from __future__ import annotations

from mmap import mmap

import numpy as np
import torch

from tost.bench.harness.memory import keep_freed_memory, kept_bytes, watch_peak


def test_kept_bytes_of_known_functions():
    x = torch.ones(1000, requires_grad=True)
    assert kept_bytes(lambda: x.exp()) == 4000  # its result
    assert kept_bytes(lambda: x.square()) == 4000  # its input
    assert kept_bytes(lambda: x + 1) == 0
    assert kept_bytes(lambda: x.exp().exp()) == 8000  # both results


def test_kept_bytes_counts_a_storage_once_and_as_a_whole():
    x = torch.ones(10, 100, requires_grad=True)
    assert kept_bytes(lambda: x.square() + x.sin()) == 4000
    assert kept_bytes(lambda: x[:, :1].square()) == 4000  # a view keeps all of x alive


def test_kept_bytes_leaves_parameters_out():
    layer, x = torch.nn.Linear(8, 16), torch.ones(5, 8, requires_grad=True)
    assert kept_bytes(lambda: layer(x), excluding=layer.parameters()) == x.nbytes
    assert kept_bytes(lambda: layer(x)) == x.nbytes + layer.weight.nbytes


def test_kept_bytes_without_gradients_is_zero():
    x = torch.ones(1000)
    assert kept_bytes(lambda: x.exp()) == 0


def test_freed_memory_is_kept_where_the_library_can():
    keep_freed_memory()  # whatever the C library is
    assert torch.ones(10).sum() == 10


def test_the_peak_of_a_block_is_at_least_what_it_holds():
    size = 100 << 20
    # Pages of their own: the C library may hand out freed memory, by which a process does not grow.
    with watch_peak() as peak, mmap(-1, size) as held:
        np.frombuffer(held, np.uint8)[...] = 1
    assert size * 0.9 < peak.growth < peak.process
