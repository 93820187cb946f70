"""Kernels with a mistake put in on purpose: the comparisons with the reference must notice every one."""

import importlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tost
from tests.ops.cases import assert_all_close, make_case, run_causal, run_tssa

pytest.importorskip("triton", reason="triton has no packages for this platform")

from triton.runtime.errors import InterpreterError

from tests.ops.triton.interpreter import watched
from tests.ops.triton.packed import compare_packed
from tost.ops.triton import kernels, launch
from tost.ops.triton import tiles as sizes

FOLDER = Path(kernels.__file__).parent
BOUND = 1e-11
PACKED = [1, 9, 0, 4, 3]
EVERYTHING = {"masked": True, "bias": True, "state": True}

# File, what stands there (once or more), and what is put in its place.
MUTANTS = [
    ("common", "end = tl.minimum(begin + CHUNK, first + N)", "end = begin + CHUNK"),
    ("common", "begin = first + (chunk % chunks) * CHUNK", "begin = first + (chunk % chunks) * (CHUNK - 1)"),
    ("common", "real = real & (tl.load(mask + rows, real, 0) != 0)", "real = real"),
    ("common", 'tl.where((tl.arange(0, HP) < H)[None, :], logit, float("-inf"))', "logit"),
    ("common", "total = tl.cumsum(x, 0) + carry[None, :]", "total = tl.cumsum(x, 0)"),
    ("common", "to = (c - 1) if BACKWARD else (c + 1)", "to = c"),
    ("common", "c = (last - step) if BACKWARD else (low + step)", "c = low + step"),
    ("common", "0.0), 0) + carry_mass", "0.0), 0)"),
    ("common", "== BLOCK - 1)[:, None], total", "== 0)[:, None], total"),
    ("common", "inside = c < count", "inside = c < count + 1"),
    ("common", "kept[:, None] & (d < D)[None, :]", "kept[:, None]"),
    ("common", "kept[:, None, None] & inside[None, :, :]", "kept[:, None, None]"),
    ("common", "inside, onward = step < count, step + 1 < count", "inside, onward = step < count, step < count"),
    ("common", "sequence = tl.load(table + chunk * 4)", "sequence = tl.load(table)"),
    ("common", "begin = tl.load(table + chunk * 4 + 2)", "begin = tl.load(table + chunk * 4 + 1)"),
    ("common", "end = tl.load(table + chunk * 4 + 3)", "end = begin + CHUNK"),
    ("common", "low = tl.load(bounds + sequence)", "low = sequence"),
    ("common", "high = tl.load(bounds + sequence + 1)", "high = low + 1"),
    ("tssa", "DP), SQUARE_FLOOR)", "DP), 1e-40)"),
    ("tssa", "tl.maximum(summed, SQUARE_FLOOR)", "tl.maximum(summed, 1e-40)"),
    ("tssa", "d_squares = tl.where(total > SQUARE_FLOOR, d_squares, 0.0)", "d_squares = d_squares"),
    ("tssa", "tl.load(mass + sequence * H + head) + common.MASS_FLOOR", "tl.load(mass + sequence * H + head)"),
    ("tssa", "m = (masses + common.MASS_FLOOR)[:, None]", "m = (masses + 2 * common.MASS_FLOOR)[:, None]"),
    ("tssa", "[:, None] + common.MASS_FLOOR", "[:, None]"),
    ("tssa", "p * (d_pi - tl.sum(p * d_pi, 1)[:, None])", "p * d_pi"),
    ("tssa", "d_mass = -tl.sum(d_weighted * moment, 1)", "d_mass = tl.sum(d_weighted * moment, 1)"),
    ("causal", "carry += tl.sum(square, 0)", "carry += 0.0"),
    ("causal", "energy + D * load_bias(bias, rows[:, None]", "energy + load_bias(bias, rows[:, None]"),
    ("causal", "rows = rows - first", "rows = rows"),
    ("causal", "return total, m[:, None] + common.MASS_FLOOR", "return total, m[:, None]"),
    ("causal", "floored = (m + common.MASS_FLOOR)[:, None]", "floored = m[:, None]"),
    ("causal", "tl.maximum(prefix, PREFIX_FLOOR)", "tl.maximum(prefix, 1e-40)"),
    ("causal", "tl.where(total > PREFIX_FLOOR, direct, 0.0)", "direct"),
    ("causal", "tl.cumsum(p[:, None] * (x * x), 0) + common", "tl.cumsum(x * x, 0) + common"),
    ("causal", "m = tl.cumsum(p, 0) + tl.load(mass + chunk * H + head)", "m = tl.cumsum(p, 0)"),
    ("causal", "tl.cumsum(direct, 0, reverse=True)", "tl.cumsum(direct, 0)"),
    ("causal", " + common.load_sum(later_weighted, chunk, head, H, D, DP)", ""),
    ("causal", " + common.load_sum(later_squares, chunk, head, H, D, DP)", ""),
    ("causal", "tl.cumsum(to_mass, 0, reverse=True)", "tl.cumsum(to_mass, 0)"),
    ("causal", " + tl.load(later_mass + chunk * H + head)", ""),
    ("causal", "total = tl.cumsum(square, 0) + common", "total = square + common"),
    ("causal", "c = tl.load(squares + own, inside, 0.0) + square", "c = square"),
    ("causal", "tl.sum(x * (x * bar - o * gain), 1) + bar_mass", "tl.sum(x * (x * bar - o * gain), 1)"),
    ("causal", "total_mass += tl.sum(p, 0)", "total_mass += 0.0"),
]  # fmt: skip


def compare(run, shape, *, times=1.0, **options):
    case = make_case(shape, torch.float64, **options)
    case = replace(case, w=case.w * times)
    if case.mask is not None:
        case.w[~case.mask] = torch.nan
        case.dy[~case.mask] = torch.nan
    expected = run(replace(case, w=case.w.nan_to_num(), dy=case.dy.nan_to_num()), "reference")
    assert_all_close(run(case, "triton"), expected, BOUND)


def compare_step():
    case = make_case((3, 1, 3, 5), torch.float64, **EVERYTHING)
    keywords = {"mask": case.mask, "state": case.state}
    with torch.no_grad():
        found, expected = (
            tost.causal_tssa_with_state(case.w, case.temperature, case.bias, **keywords, backend=backend)
            for backend in ("triton", "reference")
        )
    assert_all_close({"y": found[0], **found[1]._asdict()}, {"y": expected[0], **expected[1]._asdict()}, BOUND)


def compare_tssa():
    compare(run_tssa, (2, 7, 3, 5), masked=True)
    compare(run_tssa, (1, 7, 3, 5), times=1e-13)
    compare(run_tssa, (1, 9, 3, 5), times=1e-13)
    compare(run_tssa, (2, 18, 3, 5), masked=True)
    compare_packed(PACKED, causal=False)


def compare_causal():
    compare_step()
    compare(run_causal, (2, 5, 3, 5), bias=True)
    compare(run_causal, (1, 18, 3, 5), state=True)
    compare(run_causal, (1, 9, 3, 5), times=1e-7)
    compare(run_causal, (1, 18, 3, 5), **EVERYTHING)
    compare_packed(PACKED, causal=True)


def compare_all(module="common"):
    """Fail if what uses a file of kernels is not the reference: below floors, in many chunks, with options, packed."""
    with watched():
        if module != "causal":
            compare_tssa()
        if module != "tssa":
            compare_causal()


@pytest.fixture
def small_tiles(monkeypatch):
    """Chunks of 4 tokens in tiles of 2, scans of 4 chunks: a short sequence has them all."""
    monkeypatch.setattr(sizes, "LONGEST_CHUNK", 4)
    monkeypatch.setattr(sizes, "LANES", 128)
    monkeypatch.setattr(launch, "SHORT", 8)
    assert sizes.choose_tiles(3, 5)[2:5] == (4, 2, 4)


@pytest.mark.slow
def test_the_kernels_pass(small_tiles):
    compare_all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a NaN must be noticed, not that numpy warns about it
@pytest.mark.parametrize(("module", "old", "new"), MUTANTS)
def test_a_mistake_is_noticed(small_tiles, monkeypatch, tmp_path, module, old, new):
    name = f"mutant_{abs(hash((module, old, new)))}"
    folder = tmp_path / name
    shutil.copytree(FOLDER, folder)
    for path in folder.glob("*.py"):
        path.write_text(path.read_text().replace("tost.ops.triton.kernels", name))
    text = (folder / f"{module}.py").read_text()
    assert old in text
    (folder / f"{module}.py").write_text(text.replace(old, new))
    monkeypatch.syspath_prepend(str(tmp_path))
    for attribute in ("common", "causal", "tssa"):
        mutant = importlib.import_module(f"{name}.{attribute}")
        monkeypatch.setattr(launch, "noncausal" if attribute == "tssa" else attribute, mutant)
    # A number that is off, or an access that is refused.
    with pytest.raises((AssertionError, InterpreterError), match=r"relative rms|outside|written"):
        compare_all(module)
    for loaded in [key for key in sys.modules if key.startswith(name)]:
        del sys.modules[loaded]
