"""The backend as the dispatcher sees it: what it says where it cannot run, and that importing it loads no triton."""

import os
import subprocess
import sys

import pytest
import torch

import tost
from tost.errors import BackendError
from tost.ops import _dispatch
from tost.ops import triton as backend
from tost.ops.form import Form


def run_python(code, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=False
    )


def test_a_machine_without_a_gpu_says_so_and_the_cpu_does_not_miss_it():
    code = (
        "import sys, torch, tost\n"
        "print(tost.available_backends('tssa')['triton'])\n"
        "print(list(tost.ops.backends_on('cpu', 'tssa')), list(tost.ops.backends_on('cuda', 'tssa')))\n"
        "tost.tssa(torch.ones(1, 2, 1, 1), torch.ones(1))\n"
        "print([name for name in ('tost.ops.triton.launch', 'torch._dynamo') if name in sys.modules])\n"
        "gpus = torch.version.cuda or torch.version.hip\n"
        "print(bool(gpus) or 'tost.ops.triton.operators' not in sys.modules)"
    )
    said = run_python(code, CUDA_VISIBLE_DEVICES="").stdout.splitlines()
    assert "torch finds no GPU here" in said[0] or "triton is not installed" in said[0]
    assert said[1:] == ["['native', 'torch', 'reference'] ['torch', 'reference']", "[]", "True"]


def test_it_is_never_chosen_for_cpu_tensors():
    assert _dispatch.select("tssa", "auto", torch.ones(1, 1, 1, 1)).backend.name == "native"


def test_only_dtypes_and_forms_that_the_kernels_have_are_accepted():
    w, t = torch.ones(1, 3, 1, 4), torch.ones(1)
    assert backend.unsupported(w, Form(normalize=False)) == []
    assert "got complex64" in backend.unsupported(w.to(torch.complex64), Form())[0]
    with pytest.raises(BackendError, match="triton: its kernels have no block_size, got block_size=2"):
        tost.tssa(w, t, block_size=2, backend="triton")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(backend, "_INSTALLED", False)
    assert backend.unavailable() == ["triton is not installed; run: pip install 'tost-transformer[gpu]'"]


def test_too_many_heads_are_refused():
    if backend.unavailable():
        pytest.skip("triton has no packages for this platform")
    with pytest.raises(ValueError, match=r"512 heads of width 64; .* at most 16384"):
        tost.tssa(torch.ones(1, 1, 512, 64), torch.ones(512), backend="triton")
    with pytest.raises(BackendError, match="needs a CUDA or CPU tensor, got meta"):
        tost.tssa(torch.ones(1, 1, 2, 2, device="meta"), torch.ones(2, device="meta"), backend="triton")
