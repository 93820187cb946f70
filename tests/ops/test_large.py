"""Tensors of more than 2^31 elements: places in them do not fit into 32 bits.

Nearly all tokens are masked, so what comes out is that of the few others. The memory of the masked ones is one small
piece that is mapped again and again, so that gigabytes of addresses take megabytes of memory; addresses that are not
mapped surround it, and touching one ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch

import tost
from tost.ops import _library
from tost.ops.form import Form

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_library.unavailable()), reason="needs the native library"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="maps one piece of memory many times, as Linux can"),
]

H, D = 8, 64
TOKENS = 2**31 // (H * D) + 3 * 4096
KEPT = 192
PIECE = 1 << 24  # bytes
ENDS = 1 << 20  # bytes at the start and at the end that are not shared
FORM = Form().flags()


class Memory:
    """A tensor ``[1, TOKENS, H, D]`` whose middle is one piece of memory, many times."""

    def __init__(self, dtype):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        size = TOKENS * H * D * dtype.itemsize
        assert size % mmap.PAGESIZE == 0
        self.size = size + 2 * PIECE
        self.start = self._map(None, self.size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        first = self.start + PIECE
        shared = os.memfd_create("piece")
        os.ftruncate(shared, PIECE)
        writable, fixed = mmap.PROT_READ | mmap.PROT_WRITE, 0x10  # MAP_FIXED
        for place in range(first, first + size, PIECE):
            length = min(PIECE, first + size - place)
            self._map(place, length, writable, mmap.MAP_SHARED | fixed, shared)
        for place in (first, first + size - ENDS):
            self._map(place, ENDS, writable, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1)
        os.close(shared)
        content = (ctypes.c_char * size).from_address(first)
        self.tensor = torch.frombuffer(content, dtype=dtype).view(1, TOKENS, H, D)

    def _map(self, place, size, protection, flags, file):
        found = self.libc.mmap(place, size, protection, flags, file, 0)
        assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        return found

    def __enter__(self):
        return self.tensor

    def __exit__(self, *_):
        del self.tensor
        self.libc.munmap(self.start, self.size)


def kept(x):
    """The tokens that are not masked: the first and the last ones."""
    return torch.cat([x[:, :KEPT], x[:, -KEPT:]], dim=1)


def fill(x, values):
    x[:, :KEPT], x[:, -KEPT:] = values[:, :KEPT], values[:, KEPT:]


@pytest.fixture
def mask():
    mask = torch.zeros(1, TOKENS, dtype=torch.bool)
    mask[:, :KEPT] = mask[:, -KEPT:] = True
    return mask


def close(actual, expected, bound):
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True], ids=["tssa", "causal"])
def test_more_than_2_to_the_31_elements(causal, dtype, mask):
    assert TOKENS * H * D > 2**31
    assert (TOKENS - KEPT) * H * D > 2**31, "the last tokens lie beyond it"
    values, gradient = (torch.randn(1, 2 * KEPT, H, D, dtype=dtype) for _ in range(2))
    temperature = torch.linspace(0.5, 2.0, H, requires_grad=True)
    small = values.clone().requires_grad_()
    operator = tost.causal_tssa if causal else tost.tssa
    expected = operator(small, temperature, backend="native")
    expected.backward(gradient)

    chunks = -(-TOKENS // _library.CAUSAL_CHUNK)
    shapes = [(1, TOKENS, H), *([(1, chunks, 2 * H * D + H)] if causal else []), (1, H, D), (1, H, D), (1, H)]
    saved = [torch.empty(shape) for shape in shapes]
    t = temperature.detach()
    with Memory(dtype) as w, Memory(dtype) as y:
        fill(w, values)
        if causal:
            inputs = (w, t, None, mask, None, None, None)
            _library.run("tost_causal_tssa_forward", (), None, inputs, (y, *saved), 0)
        else:
            _library.run("tost_tssa_forward", FORM, None, (w, t, mask), (y, *saved))
        close(kept(y), expected.detach(), 2e-2)
        close(saved[-3], small.detach().float().square().sum(1), 1e-4)  # the squares

        dtemperature = torch.empty(H)
        with Memory(dtype) as dy, Memory(dtype) as dw:
            fill(dy, gradient)
            if causal:
                inputs = (w, t, None, mask, dy, None, None, None, *saved[:2])
                sums = [torch.empty_like(x) for x in saved[2:]]
                outputs = (dw, dtemperature, torch.empty(1, TOKENS, H), *sums)
                _library.run("tost_causal_tssa_backward", (), None, inputs, outputs, 0)
            else:
                _library.run("tost_tssa_backward", FORM, None, (w, t, mask, dy, *saved), (dw, dtemperature))
            close(kept(dw), small.grad, 2e-2)
    close(dtemperature, temperature.grad, 2e-2)
