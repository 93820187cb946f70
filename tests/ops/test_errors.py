"""Bad input gets a clear error: what was given, what is needed, what to do."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

import tost
from tost.errors import BackendError, ConfigError
from tost.ops import _dispatch, _library

W, T = torch.randn(2, 5, 3, 4), torch.ones(3)
BOTH = pytest.mark.parametrize("run", [tost.tssa, tost.causal_tssa, tost.membership, tost.causal_membership])


@BOTH
@pytest.mark.parametrize(
    ("w", "t", "mask", "message"),
    [
        (W[0], T, None, r"w has shape \(5, 3, 4\); TSSA needs projected tokens \[B, N, H, D\].*unflatten"),
        (W.long(), T, None, r"w has dtype torch.int64; .*w\.float\(\)"),
        (W[:, :, :0], T[:0], None, r"no heads or no features"),
        (W, T[:2], None, r"temperature has shape \(2,\), but w has 3 heads; it needs shape \[3\]"),
        (W, T[:, None], None, r"temperature has shape \(3, 1\).*\.flatten\(\)"),
        (W, T.long(), None, r"temperature has dtype torch.int64"),
        (W, T.to("meta"), None, r"temperature is on meta, but w is on cpu. Move it with \.to\('cpu'\)"),
        (
            W,
            T,
            torch.ones(2, 5),
            r"mask has dtype torch.float32; .*ones and zeros.*mask\.bool\(\)",
        ),
        (W, T, torch.tensor([0.0, 0, 0, 0, -1e4]).expand(2, 5), r"added to scores, 0 for real tokens: use mask == 0"),
        (W, T, torch.zeros(2, 5), r"mask\.bool\(\) if it holds ones .* or mask == 0 if"),
        (W, T, torch.ones(2, 4, dtype=torch.bool), r"mask has shape \(2, 4\).*2 sequences of 5 tokens"),
        (W, T, torch.ones(2, 5, dtype=torch.bool, device="meta"), r"mask is on meta, but w is on cpu"),
    ],
)
def test_bad_tensors_are_refused(run, w, t, mask, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        run(w, t, mask=mask)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (torch.zeros(3, 4), r"bias covers 4 positions, but the sequence reaches position 5"),
        (torch.zeros(2, 9), r"bias has shape \(2, 9\).*w has 3 heads"),
        (torch.zeros(3), r"bias has shape \(3,\)"),
        (torch.zeros(3, 9, device="meta"), r"bias is on meta"),
        *[
            (torch.zeros(shape), r"the bias of every token is a floating point tensor \[2, 5, 3\] or \[1, 5, 3\]")
            for shape in ((2, 4, 3), (3, 5, 3), (2, 5, 4))
        ],
    ],
)
def test_bad_bias_is_refused(bias, message):
    with pytest.raises(ValueError, match=message):
        tost.causal_tssa(W, T, bias)


def test_bias_length_counts_the_state_and_only_real_tokens():
    state = tost.TSSAState.empty(2, 3, 4)._replace(position=torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="bias covers 6 positions, but the sequence reaches position 7"):
        tost.causal_tssa_with_state(W, T, torch.zeros(3, 6), state=state)
    mask = torch.tensor([[True] * 5, [False, True, True, True, True]])
    tost.causal_tssa_with_state(W, T, torch.zeros(3, 6), state=state, mask=mask)


EMPTY = tost.TSSAState.empty


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (EMPTY(1, 3, 4), r"state.squares has shape \(1, 3, 4\), but w .* needs \(2, 3, 4\).*same batch"),
        (EMPTY(2, 3, 5), r"needs \(2, 3, 4\)"),
        (EMPTY(2, 3, 4, dtype=torch.float64), r"state has dtype torch.float64.*state\.to\("),
        (EMPTY(2, 3, 4, device="meta"), r"state.squares is on meta"),
    ],
)
def test_bad_state_is_refused(state, message):
    with pytest.raises(ValueError, match=message):
        tost.causal_tssa_with_state(W, T, state=state)


@pytest.mark.parametrize("g", [0, -1, 3, 8])
def test_blocks_that_do_not_divide_are_refused(g):
    with pytest.raises(ValueError, match=rf"block_size is {g}, but the heads of w have 4 features.*divides 4"):
        tost.tssa(W, T, block_size=g)


def test_step_refuses_a_sequence():
    with pytest.raises(ValueError, match=r"w has shape \(2, 5, 3, 4\); a step takes one token per sequence"):
        tost.causal_tssa_step(W, T)


def test_unknown_backend_is_refused_with_a_suggestion():
    with pytest.raises(
        BackendError, match=r"`tssa` has no backend 'natve'; it has auto, triton, native, torch, reference.*'native'"
    ):
        tost.tssa(W, T, backend="natve")
    with pytest.raises(ValueError, match=r"no operator 'attention'; .* are causal_tssa, gated_tssa, tssa\."):
        tost.available_backends("attention")


@pytest.fixture
def without_native(monkeypatch):
    monkeypatch.setattr(_library, "_LIBRARY", None)
    monkeypatch.setattr(_library, "_REASON", "the native library was not built (no compiler)")
    monkeypatch.setattr(_dispatch, "_WARNED", set())
    monkeypatch.setattr(_dispatch, "_SELECTED", {})


def test_missing_native_backend_says_why(without_native):
    assert tost.available_backends("tssa")["native"] == "the native library was not built (no compiler)"
    with pytest.raises(BackendError) as caught:
        tost.tssa(W, T, backend="native")
    text = str(caught.value)
    assert "no backend can run `tssa`" in text
    assert "(2, 5, 3, 4) float32 on cpu" in text
    assert "native: the native library was not built (no compiler)" in text
    assert 'backend="reference"' in text


def test_auto_without_native_warns_once_and_gives_the_same_result(without_native):
    with pytest.warns(RuntimeWarning, match=r"`tssa` runs on backend 'torch'; 'native' is faster.*no compiler"):
        y = tost.tssa(W, T)
    assert torch.equal(tost.tssa(W, T), y)  # a second warning would be an error here
    assert torch.allclose(y, tost.tssa(W, T, backend="reference"), atol=1e-6)


def test_a_library_from_other_sources_is_not_used(monkeypatch):
    class Longer(_library.Forward):
        _fields_ = (("added_later", ctypes.c_int64),)

    assert _library._load()[1] == ""
    monkeypatch.setitem(_library._CALLS, "tost_tssa_forward", Longer)
    library, reason = _library._load()
    assert library is None
    assert reason == "the native library was built from other sources than this package; reinstall tost"


def test_native_info_and_isa_selection(monkeypatch):
    info = tost.ops.native_info()
    assert info["isa"] in info["compiled"]
    with pytest.raises(ConfigError, match=r"cannot select instruction set 'sse9': the library holds .*baseline"):
        tost.ops.select_isa("sse9")
    monkeypatch.setattr(_library, "_LIBRARY", None)
    assert tost.ops.native_info() == {"missing": _library._REASON}
    with pytest.raises(ConfigError, match="cannot select instruction set 'avx2'"):
        tost.ops.select_isa("avx2")


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_environment_variables_are_strict_and_work():
    bad = run_python(
        "import os, tost\n"
        "for name, value in {'TOST_NATIVE_ISA': 'mmx', 'TOST_BACKEND': 'cuda'}.items():\n"
        "    os.environ[name] = value\n"
        "    try:\n"
        "        tost.tssa\n"
        "    except tost.errors.ConfigError as error:\n"
        "        print(error)\n"
        "    del os.environ[name]\n"
    )
    isa, backend = bad.stdout.splitlines()
    assert "TOST_BACKEND='cuda' is not understood; it takes one of: auto, triton, native, torch," in backend
    assert "TOST_NATIVE_ISA='mmx' is not understood" in isa
    code = (
        "import torch, tost\nfrom tost.ops._dispatch import select\n"
        "print(select('tssa', 'auto', torch.ones(1, 1, 1, 1)).backend.name, tost.ops.native_info()['isa'])"
    )
    done = run_python(code, TOST_BACKEND="reference", TOST_NATIVE_ISA="baseline")
    assert done.stdout.split() == ["reference", "baseline"]
