"""Parsers alone, without the folders around them: many more inputs a second for the code that reads the bytes."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

from fuzz.harness import Harness, one_file
from tost.errors import ConfigError


def value(folder: Path) -> Harness:
    """The right-hand side of an override."""
    from tost._yaml import parse_value

    seeds = (
        "1e-3",
        "[0.9, 'a', ~]",
        '"\\u0041"',
        "text # no",
        "{a: 1}",
        "|-\n  b",
        "&a x",
        "!!int 3",
        "0x1F",
        "- 1\n- 2",
    )

    def parse(data: bytes) -> None:
        parse_value(data.replace(b"\0", b"").decode("utf-8", "surrogateescape"))

    return Harness(parse, [seed.encode() for seed in seeds], [b".inf", b"1_000", b"\\x", b"\\U00110000", b"? "])


def tensors(folder: Path) -> Harness:
    """Tensors in safetensors, of every type."""
    import torch
    from safetensors.torch import save

    from tost.train.checkpoint.files import load_tensors

    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
    seeds = [save({"w": torch.zeros(2, 3, dtype=kind)}) for kind in kinds]
    return one_file(folder / "w.safetensors", load_tensors, seeds, ("__metadata__", "data_offsets", "shape", "F8_E5M2"))


def idx_file(folder: Path) -> Harness:
    """An array of bytes in idx, compressed or not."""
    import numpy as np

    from tests.data.images.files import idx
    from tost.data.images.published import _read_idx

    plain = idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    seeds = [plain, gzip.compress(plain, mtime=0)]
    return one_file(folder / "images", lambda path: _read_idx(path, 3), seeds)


def listops_line(folder: Path) -> Harness:
    """A line of ListOps."""
    from tost.data.lra.readers import parse_listops

    seeds = (b"[MAX 1 [SM 2 3 ] ]\t5", b"( ( ( [MED 4 ) 5 ) ] )\t4", b"[MIN 7 8 X\t7")
    return Harness(lambda data: parse_listops(data), seeds, (b"[MAX", b"[MIN", b"[MED", b"[SM", b"] ", b"( ", b"\t9"))


def pairs_file(folder: Path) -> Harness:
    """A file of pairs of documents."""
    from tests.data.lra.files import write_pairs
    from tost.data.lra.readers import index_pairs

    seed = (write_pairs(folder) / "new_aan_pairs.train.tsv").read_bytes()

    def parse(path: Path) -> None:
        source = index_pairs(path)
        assert source.spans.shape == (len(source.targets), 2, 2)
        assert 0 <= source.spans.min() <= source.spans.max() <= path.stat().st_size

    return one_file(folder / "pairs.tsv", parse, [seed], ("1.0\t", "0.0\ta\tb\tc\td\n"))


def packing(folder: Path) -> Harness:
    """Boundaries of packed sequences: each sequence gets the outputs it has alone, or the call is an error."""
    import torch

    import tost

    w, temperature = torch.randn(1, 24, 2, 4, generator=torch.Generator().manual_seed(0)), torch.ones(2)

    def parse(data: bytes) -> None:
        kind = (torch.int32, torch.int64, torch.float32, torch.uint8)[data[0] % 4 if data else 0]
        bounds = torch.tensor([byte - 256 * (byte > 200) for byte in data[1:]], dtype=torch.int64).to(kind)
        for operator in (tost.tssa, tost.causal_tssa):
            try:
                found = operator(w, temperature, cu_seqlens=bounds)
            except (TypeError, ValueError) as error:
                raise ConfigError(str(error)) from error
            ends = bounds.tolist()
            alone = [operator(w[:, a:b], temperature) for a, b in pairwise(ends)]
            torch.testing.assert_close(found, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)

    seeds = (b"\0\0\x18", b"\0\0\5\x18", b"\1\0\1\1\2\x10\x18", b"\2\0\x18", b"\0\5\0\x18", b"\0")
    return Harness(parse, seeds)
