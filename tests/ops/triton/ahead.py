"""Compiles the kernels for devices that are not here, and reads what they need: registers, memory, spills.

    python -m tests.ops.triton.ahead sm90 12x64 bfloat16

prints one JSON object per launch, of all `calls` or of those that are named. The kernels and their arguments are those
that `launch` runs, recorded from calls on tensors without data. Does not work in a process that interprets kernels
(``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
import triton.backends.nvidia
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tost.ops._inputs import Inputs, Sums
from tost.ops._numerics import statistics_dtype
from tost.ops.triton import launch
from tost.ops.triton.tiles import TARGET_NAMES, choose_tiles

_ARCHITECTURES = (("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64))
TARGETS = {name: GPUTarget(*each) for name, each in zip(TARGET_NAMES, _ARCHITECTURES, strict=True)}
_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
}


class Launch(NamedTuple):
    """A kernel with the arguments of one launch, by name."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """Where the kernel is, and its name: ``causal.output``."""
        return f"{self.kernel.__module__.rpartition('.')[2]}.{self.kernel.__name__}"


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect the launches of kernels in place of running them."""
    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        programs = torch.Size(grid).numel()
        launches.append(Launch(self, programs, {name: arguments[name] for name in self.arg_names}))

    with patch.object(JITFunction, "run", record):
        yield launches


def calls(H: int, D: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Return calls that between them run every kernel, in its plainest and in its fullest form.

    Args:
        H: Heads.
        D: Head width.
        dtype: Of the tokens.
    """
    S, N, statistics = 2, 4096, statistics_dtype(dtype)

    def empty(*shape: int, dtype: torch.dtype = statistics) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def starts(layout: launch.Layout) -> Sums:
        C = layout.programs
        return Sums(empty(C, H, D), empty(C, H, D), empty(C, H))

    w, short, one = (empty(S, n, H, D, dtype=dtype) for n in (N, 196, 1))
    t, sums, chunk = empty(H), Sums(empty(S, H, D), empty(S, H, D), empty(S, H)), choose_tiles(H, D).CHUNK
    plain, layout = Inputs(w, t, None, bias=empty(1, N, H)), launch.padded_layout(w, chunk)
    # Options that a sequence of one token or a short one has too, and all sequences in one row.
    row, mask, pi = w[:1], empty(1, N, dtype=torch.bool), empty(1, N, H)
    packed = launch.packed_layout(empty(S + 1, dtype=torch.int32), N, chunk)
    full = Inputs(row, t, mask, empty(1, N, H), sums)
    step = Inputs(one, t, empty(S, 1, dtype=torch.bool), empty(S, 1, H), sums)
    short_mask = empty(S, 196, dtype=torch.bool)
    return {
        "tssa forward": lambda: launch.tssa_forward(w, t, None, normalize=True),
        "tssa backward": lambda: launch.tssa_backward(w, w, t, None, empty(S, N, H), *sums),
        "short tssa forward": lambda: launch.tssa_forward(short, t, None, normalize=True),
        "causal forward": lambda: launch.causal_forward(plain),
        "causal backward": lambda: launch.causal_backward(w, launch.NO_SUMS, plain, empty(S, N, H), starts(layout)),
        "causal step": lambda: launch.causal_step(Inputs(one, t, None, bias=empty(1, 1, H), before=sums)),
        "tssa forward, all options": lambda: launch.tssa_forward(row, t, mask, normalize=True, layout=packed),
        "tssa backward, all options": lambda: launch.tssa_backward(row, row, t, mask, pi, *sums, layout=packed),
        "short tssa forward, all options": lambda: launch.tssa_forward(short, t, short_mask, normalize=True),
        "causal forward, all options": lambda: launch.causal_forward(full, packed),
        "causal backward, all options": lambda: launch.causal_backward(row, sums, full, pi, starts(packed), packed),
        "causal step, all options": lambda: launch.causal_step(step),
    }


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """Return the launches of a call on tensors without data."""
    with recorded() as found:
        call()
    return found


class Resources(NamedTuple):
    """What a compiled kernel needs, per thread but for the shared memory, which is per program.

    Attributes:
        kernel: Its name.
        registers: Registers.
        stack: Bytes of local memory; on AMD the registers that were spilled.
        shared: Bytes of shared memory.
        widest_load: Bits of the widest load from global memory; 0 on AMD, where it is not read.
    """

    kernel: str
    registers: int
    stack: int
    shared: int
    widest_load: int


def compile_kernel(found: Launch, target: GPUTarget) -> Resources:
    """Compile a kernel for a target."""
    constants, types = {}, {}
    for parameter in found.kernel.params:
        value = found.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            constants[parameter.name], types[parameter.name] = value, "constexpr"
        else:
            types[parameter.name] = _TYPES[value.dtype] if isinstance(value, Tensor) else "i32"
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    source = ASTSource(found.kernel, types, constants, aligned)
    compiled = triton.compile(source, target=target, options=launch.OPTIONS)
    if target.backend == "hip":
        registers, stack = (
            int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1])  # type: ignore[index]
            for name in ("vgpr_count", "vgpr_spill_count")
        )
        widest = 0
    else:
        registers, stack = _usage(compiled.asm["cubin"])
        widths = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
        widest = max((int(vector or 1) * int(bits) for vector, bits in widths), default=0)
    return Resources(
        kernel=found.name, registers=registers, stack=stack, shared=compiled.metadata.shared, widest_load=widest
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack, as the assembler recorded them."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()  # type: ignore[union-attr]
    return int(registers), int(stack)


def _key(found: Launch) -> tuple[Any, ...]:
    """Return what a compiled kernel depends on: types and constants, not lengths."""
    types = {
        name: value.dtype if isinstance(value, Tensor) else value
        for name, value in found.arguments.items()
        if name not in ("chunks", "N", "rows")
    }
    return (found.name, *types.items())


def compile_all(
    target: str, H: int, D: int, dtype: torch.dtype, names: Sequence[str] = ()
) -> Iterator[tuple[str, Resources]]:
    """Compile kernels for a target; yields each with the call that it is part of.

    Args:
        target: One of `TARGETS`.
        H: Heads.
        D: Head width.
        dtype: Of the tokens.
        names: Which of the `calls`; empty for all.
    """
    compiled: dict[tuple[Any, ...], Resources] = {}
    known = calls(H, D, dtype)
    for name in names or known:
        for found in launches_of(known[name]):
            key = _key(found)
            if key not in compiled:
                compiled[key] = compile_kernel(found, TARGETS[target])
            yield name, compiled[key]


def main(target: str, shape: str, dtype: str, *names: str) -> None:
    """Print what every kernel needs, one JSON object per line."""
    H, D = map(int, shape.split("x"))
    for name, resources in compile_all(target, H, D, getattr(torch, dtype), names):
        sys.stdout.write(json.dumps({"call": name, **resources._asdict()}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
