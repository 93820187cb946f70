"""Triton's interpreter, made faster and more watchful. A kernel runs in it program by program, on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from tost.ops.form import Form


def speed_up() -> None:
    """Make the interpreter several times as fast.

    It prepares the language again for every function that a kernel calls: here the launch does for the kernel's own,
    and this function for those of triton, once. And it works out the type and the shape of every result again, which
    takes longer than the result: here those of one kind are worked out once.
    """
    interpreter._patch_lang(tl.zeros.fn)
    InterpretedFunction.__call__ = _call
    tl.tensor.__init__, tl.block_type.__init__ = _init_tensor, _init_block_type
    interpreter._get_np_dtype = _get_np_dtype


@cache
def _size(shape):
    return tl.constexpr(prod(shape)), tl.tuple([tl.constexpr(n) for n in shape])


def _init_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _size(tuple(type.shape) if type.is_block() else ())


def _get_np_dtype(dtype, *, find=interpreter._get_np_dtype, known={}):  # noqa: B006
    if dtype.name not in known:
        known[dtype.name] = find(dtype)
    return known[dtype.name]


def _init_block_type(self, element_ty, shape, *, init=tl.block_type.__init__, known={}):  # noqa: B006
    key = (element_ty.name, *[n.value if isinstance(n, tl.constexpr) else n for n in shape])
    if key not in known:
        init(self, element_ty, shape)
        known[key] = vars(self).copy()
    vars(self).update(known[key])


def _call(self, *args, **kwargs):
    return self.rewrite()(*args, **kwargs)


class Access(NamedTuple):
    """One load or store: who it was, and the addresses of its bytes, one per number."""

    program: int
    addresses: np.ndarray
    itemsize: int


@dataclass
class Launch:
    """What one launch of a kernel did."""

    kernel: str
    programs: int = 0
    loads: list[Access] = field(default_factory=list)
    stores: list[Access] = field(default_factory=list)
    allocations: list[tuple[int, int]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes that programs read and wrote, each time counted."""
        return sum(len(access.addresses) * access.itemsize for access in self.loads + self.stores)

    def check_bounds(self, access: Access) -> None:
        """Fail on access outside the tensors of the launch."""
        inside = np.zeros(len(access.addresses), dtype=bool)
        for begin, end in self.allocations:
            inside |= (access.addresses >= begin) & (access.addresses + access.itemsize <= end)
        assert inside.all(), f"{self.kernel}: program {access.program} reaches outside its tensors"

    def check_writers(self) -> None:
        """Fail on addresses that two programs compete for."""
        written = np.concatenate([access.addresses for access in self.stores])
        assert len(np.unique(written)) == len(written), f"{self.kernel}: an address is written twice"
        if self.loads:
            read = np.concatenate([access.addresses for access in self.loads])
            assert not np.isin(written, read).any(), (
                f"{self.kernel}: what a program reads is written in the same launch"
            )


@contextmanager
def watched(order: np.random.Generator | None = None) -> Iterator[list[Launch]]:
    """Record and check every access of the kernels that run.

    Args:
        order: Programs run in an order that it draws; None for the usual one.
    """
    launches: list[Launch] = []
    builder, program, places = interpreter.interpreter_builder, [0], []
    run, dim, index = InterpretedFunction.run, builder.set_grid_dim, builder.set_grid_idx
    load, store = builder.create_masked_load, builder.create_masked_store

    def watched_run(self, *args, grid, warmup, **kwargs):
        launches.append(Launch(f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}"))
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor):
                launches[-1].allocations.append((x.data_ptr(), x.data_ptr() + x.nbytes))
        run(self, *args, grid=grid, warmup=warmup, **kwargs)
        launches[-1].check_writers()

    def set_dim(x, y, z):
        dim(x, y, z)
        places[:] = np.ndindex(x, y, z)
        launches[-1].programs, program[0] = len(places), -1
        if order is not None:
            order.shuffle(places)

    def set_index(*_):
        program[0] += 1
        index(*places[program[0]])

    def access(pointers, mask):
        kept = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].ravel()
        found = Access(program[0], kept, max(8, pointers.get_element_ty().primitive_bitwidth) // 8)
        launches[-1].check_bounds(found)
        return found

    def watched_load(pointers, mask, *rest):
        launches[-1].loads.append(access(pointers, mask))
        return load(pointers, mask, *rest)

    def watched_store(pointers, value, mask, *rest):
        launches[-1].stores.append(access(pointers, mask))
        return store(pointers, value, mask, *rest)

    with ExitStack() as stack:
        stack.enter_context(patch.object(InterpretedFunction, "run", watched_run))
        replaced = {"set_grid_dim": set_dim, "set_grid_idx": set_index}
        replaced |= {"create_masked_load": watched_load, "create_masked_store": watched_store}
        for name, function in replaced.items():
            stack.enter_context(patch.object(builder, name, function))
        yield launches


def metered_calls(H: int, D: int, tokens: int) -> dict[str, tuple[list[Launch], int]]:
    """Return the launches of every operator on one sequence in bfloat16, and the bytes of the tokens it was given."""
    w, t, ops = torch.randn(1, tokens, H, D).bfloat16(), torch.rand(H), torch.ops.tost
    form = Form().flags()
    found = {}

    def run(name, operator, *arguments):
        with watched() as launches:
            result = operator(*arguments)
        found[name] = launches, arguments[0].nbytes
        return result

    forward = run("tssa forward", ops.tssa_triton, w, t, None, None, form)
    run("tssa backward", ops.tssa_triton_backward, w, w, t, None, *forward[1:], None, form)
    run("short tssa forward", ops.tssa_triton, w[:, :196].contiguous(), t, None, None, form)
    forward = run("causal forward", ops.causal_tssa_triton, w, t, *[None] * 6)
    saved = (w, t, None, None, *forward[1:3], None)
    run("causal backward", ops.causal_tssa_triton_backward, w, None, None, None, *saved)
    run("causal step", ops.causal_tssa_triton_step, w[:, :1].contiguous(), t, None, None, *forward[3:], None)
    return found
