"""The backend as the dispatcher sees it: what it says where it cannot run, and that importing it loads no triton."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

import tost
from tost.errors import BackendError
from tost.ops import triton as backend
from tost.ops._dispatch import select
from tost.ops.form import Form
from tost.ops.triton import approval


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
        "print('tost.ops.triton.launch' in sys.modules)"
    )
    said = run_python(code, CUDA_VISIBLE_DEVICES="").stdout.splitlines()
    assert "torch finds no GPU here" in said[0] or "triton is not installed" in said[0]
    assert said[1:] == ["['native', 'torch', 'reference'] ['torch', 'reference']", "False"]


def test_it_is_never_chosen_for_cpu_tensors():
    assert select("tssa", "auto", torch.ones(1, 1, 1, 1)).backend.name == "native"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewForm(Form):
    sorted_first: int = 0


def test_a_form_that_it_does_not_know_is_refused():
    w = torch.ones(1, 1, 1, 1)
    assert backend.unsupported(w, NewForm(normalize=False, count_scaled=True)) == []
    assert backend.unsupported(w, NewForm(sorted_first=2)) == ["has no sorted_first"]
    assert "got complex64" in backend.unsupported(w.to(torch.complex64), Form())[0]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(backend, "_INSTALLED", False)
    assert backend.unavailable() == ["triton is not installed; install tost[gpu]"]


def test_too_many_heads_are_refused():
    if backend.unavailable():
        pytest.skip("triton has no packages for this platform")
    with pytest.raises(ValueError, match=r"512 heads of width 64; .* at most 16384"):
        tost.tssa(torch.ones(1, 1, 512, 64), torch.ones(512), backend="triton")
    with pytest.raises(BackendError, match="needs a CUDA or CPU tensor, got meta"):
        tost.tssa(torch.ones(1, 1, 2, 2, device="meta"), torch.ones(2, device="meta"), backend="triton")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU, as far as approvals are concerned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Test GPU")
    return tmp_path / "tost" / "gpu-check.json"


def test_an_approval_is_for_one_device_and_its_versions(gpu, monkeypatch):
    assert not approval.approved()
    assert "run `tost bench gpu-check`" in approval.state()
    assert approval.approve() == approval.approve() == gpu
    assert approval.approved()
    assert backend.approved()
    assert approval.state().startswith("passed on this device")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Another GPU")
    assert not approval.approved()
    approval.approve()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Test GPU")
    assert approval.approved()
    monkeypatch.setattr(approval, "version", lambda package: "0.0")
    assert not approval.approved()


@pytest.mark.parametrize("content", ["", "[]", '{"passed": 3}', '{"passed": [3, "Test GPU"]}'])
def test_a_record_that_is_something_else_approves_nothing(gpu, content):
    gpu.parent.mkdir()
    gpu.write_text(content)
    assert not approval.approved()
    approval.approve()
    assert approval.approved()
