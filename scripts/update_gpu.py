"""Makes docs/gpu.md from benchmarks/results/kernels.json. No number is typed by hand.

python scripts/update_gpu.py           rewrite docs/gpu.md
python scripts/update_gpu.py --check   only say whether it is up to date; exit code 1 if not

`scripts/measure_kernels.py` stores the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from page_file import MEASUREMENTS, ROOT, update_page

from tost._text import Table

__all__ = ["generate", "main"]

FILE = MEASUREMENTS / "kernels.json"
PAGE = ROOT / "docs" / "gpu.md"
# What cannot be avoided, in units of w: read w, write y; read w and dy, write dw.
COMPULSORY = {"forward": 2, "backward": 3}
# Bytes per second of memory, from the vendors' data sheets.
BANDWIDTH = {"A100 80 GB": 2.0e12, "H100 SXM": 3.35e12}
LAUNCH_SECONDS = (3e-6, 5e-6)
# Operator, heads x width, tokens: the paper's small vision model and base language model.
PREDICTED = (("tssa", "8x48", 10240), ("causal", "12x64", 8192))
TEXT = """# GPU

There are Triton kernels for both operators. They are **experimental: we have never run them on a GPU**. Every time
on this page is a prediction from counted bytes, and no speed on a GPU has been measured. What we did without one:

- the tests of the operators run under Triton's interpreter: outputs, states and all gradients, in float64 to
  bfloat16, with masks, bias, state, a decay per head, count scaling and packed sequences;
- the interpreter counts the bytes that move, refuses access outside of tensors, two writers of one address, and
  reading what the same launch writes, and programs run in random order with the same bits;
- tests put mistakes into the kernels on purpose, and fail unless the comparisons notice;
- kernels are compiled ahead of time for {targets};
- steps of training and of generation of every model run on a stand-in for a GPU, whose tensors have no numbers: nothing
  is left behind on the CPU, and nothing waits for the device.

The kernels have no statistics in blocks or about the mean, and no decays from the data. `backend="triton"` refuses
these by name, and `auto` runs them with PyTorch.

## If you have a GPU

```console
$ pip install '.[gpu]'  # from a checkout
$ tost bench gpu-check --out results
```

This compares the compiled kernels with the reference on your device, then times them beside the PyTorch backend,
what `torch.compile` makes of it, PyTorch's softmax attention and, if the package is installed, the linear attention of
flash-linear-attention. Please paste what it prints into an issue. If everything is right it also records the device
and the versions of torch, triton and tost (`~/.cache/tost/gpu-check.json`), and from then on `backend="auto"` uses the
kernels there; `tost info` shows the state. In a machine with GPUs of several kinds each has to pass: choose it with
`CUDA_VISIBLE_DEVICES`. Before that they run only if they are asked for, with `backend="triton"` or
`TOST_BACKEND=triton`. Without any of this, GPUs use the PyTorch backend, which works on every device.

## How it works

A sequence is cut into chunks of 64 tokens (32 with a decay). Tokens meet in three sums, so a chunk leaves its sums,
a small kernel adds them up or scans them over chunks in order, and the next pass continues from there. Nothing is
added atomically: results repeat bit for bit. Only memberships need all heads of a token at once; every other kernel
has one program per chunk and head. The backward pass replays a chunk from the sums at its start. Nothing waits for
the device, so calls can be captured in CUDA graphs. Statistics are float32, or float64 for float64 tokens.

## Launches and bytes

Counted under the interpreter for one sequence in bfloat16, every access as often as it happens, by heads x width. The
unit is the size of w, [tokens, heads, width].

{traffic}

The one-launch kernel for up to 256 tokens reads w three times too, from the cache of one multiprocessor or the L2
as it should be; a step moves the state in and out once. Not counted are small operations of torch around the kernels:
the last sum of the temperature's and the decay's gradient, the powers of a decay, the number of tokens, and the bias
of each token from a table.

## Registers

The most that any kernel needs per thread in 8 warps, in its plainest and its fullest form (mask, bias, state, decay,
count scaling). The tests allow 192 registers, 16 bytes of stack, and no spilled registers on AMD. Compiled for this
table: {combinations}.

{registers}

## Predicted times

**Predictions, not measurements**: the bytes above over the bandwidth of the data sheet, and what launches take if
each costs 3 to 5 microseconds. Kernels of one call run after each other, so at batch 1 the launches decide, and a
CUDA graph is what helps.

{predicted}

## What is not known

- Whether the compiled kernels are right on a device. The interpreter rounds differently, runs programs one after
  the other, and cannot see races inside of a program.
- How fast they are, on any device; whether 4,096 numbers in 8 warps is the best tile; what is found in the L2
  cache.
- Whether launching fails for lack of some resource that compiling does not show.

Made by `scripts/update_gpu.py` from what `scripts/measure_kernels.py` stored, with torch {torch}, triton {triton}.
"""


def _moved(call: dict[str, Any]) -> float:
    """Return the bytes of a call in units of w."""
    total: int = sum(launch["bytes"] for launch in call["launches"])
    return total / call["tokens_bytes"]


def _size(shape: str) -> tuple[int, ...]:
    """Return heads and width, for sorting."""
    return tuple(map(int, shape.split("x")))


def _traffic(found: dict[str, Any]) -> Table:
    shapes = sorted(found, key=_size)
    rows = []
    for name, call in found[shapes[0]].items():
        calls = [found[shape][name] for shape in shapes]
        if "step" in name:
            compulsory, moved = "", [f"{sum(x['bytes'] for x in each['launches']):,} B" for each in calls]
        else:
            compulsory, moved = str(COMPULSORY[name.rpartition(" ")[2]]), [f"{_moved(each):.2f}" for each in calls]
        rows.append((name, str(len(call["launches"])), compulsory, *moved))
    return Table(headers=("call", "launches", "compulsory", *shapes), rows=rows)


def _combinations(resources: Mapping[str, Any]) -> str:
    """Name the targets, sizes and types that were compiled, those with the same sizes and types together."""
    found: dict[str, dict[str, list[str]]] = {}
    for key in sorted(resources):
        target, heads, dtype = key.split()
        found.setdefault(target, {}).setdefault(heads, []).append(dtype)
    same: dict[str, list[str]] = {}
    for target, sizes in found.items():
        types: dict[str, list[str]] = {}
        for heads in sorted(sizes, key=_size):
            types.setdefault(" and ".join(sizes[heads]), []).append(heads)
        text = "; ".join(f"{', '.join(heads)} in {dtypes}" for dtypes, heads in types.items())
        same.setdefault(text, []).append(target)
    return "; ".join(f"{', '.join(targets)}: {text}" for text, targets in same.items())


def _registers(found: dict[str, dict[str, dict[str, int]]]) -> Table:
    targets = list(dict.fromkeys(key.split()[0] for key in found))
    kernels = list(dict.fromkeys(kernel for each in found.values() for kernel in each))

    def most(kernel: str, target: str, what: str) -> int:
        return max(each[kernel][what] for key, each in found.items() if key.split()[0] == target and kernel in each)

    rows = [[kernel, *(str(most(kernel, target, "registers")) for target in targets)] for kernel in kernels]
    for title, what in (("bytes of stack, or spilled registers", "stack"), ("bytes of shared memory", "shared")):
        rows.append([f"most {title}", *(f"{max(most(k, target, what) for k in kernels):,}" for target in targets)])
    return Table(headers=("kernel", *targets), rows=rows)


def _predicted(traffic: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for operator, shape, tokens in PREDICTED:
        H, D = map(int, shape.split("x"))
        for mode in ("forward", "backward"):
            call = traffic[shape][f"{operator} {mode}"]
            moved = _moved(call) * tokens * H * D * 2
            launches = [f"{1e6 * len(call['launches']) * seconds:.0f}" for seconds in LAUNCH_SECONDS]
            times = [f"{1e6 * moved / bandwidth:.0f}" for bandwidth in BANDWIDTH.values()]
            yield f"{operator} {mode}", f"1 x {tokens:,} x {shape}", f"{moved / 1e6:.0f}", *times, " to ".join(launches)


def generate(path: Path = FILE) -> str:
    """Return the text of the page."""
    found = json.loads(path.read_text())
    resources = found["resources"]
    targets = list(dict.fromkeys(key.split()[0] for key in resources))
    columns = ("call", "w", "MB moved", *(f"us of kernels, {name}" for name in BANDWIDTH), "us of launches")
    return TEXT.format(
        targets=", ".join(targets),
        combinations=_combinations(resources),
        traffic=_traffic(found["traffic"]).markdown(),
        registers=_registers(resources).markdown(),
        predicted=Table(headers=columns, rows=list(_predicted(found["traffic"])), labels=2).markdown(),
        **found["versions"],
    )


def main(arguments: list[str] | None = None) -> int:
    """Rewrite the page, or check it."""
    return update_page(PAGE, generate, __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
