"""One registration per backend: what follows from it, and which backend runs on which device."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tost
from tost._env import VARIABLES
from tost.errors import BackendError
from tost.models.options import ModelOptions
from tost.ops import _dispatch, _library, backends_on
from tost.ops._scan import linear_recurrence
from tost.ops.backends import BACKENDS, OPERATORS, VARIABLE, Backend, backend_names
from tost.ops.form import FLAGS, Form
from tost.testing import assert_close

W, T = torch.randn(2, 5, 3, 4), torch.rand(3)


def test_every_list_of_backends_is_the_registered_one():
    names = tuple(backend.name for backend in BACKENDS)
    assert backend_names() == ("auto", *names)
    assert VARIABLE.values == backend_names()
    assert VARIABLE in VARIABLES
    assert get_args(ModelOptions.model_fields["backend"].annotation) == backend_names()
    for op in OPERATORS:
        assert tuple(tost.available_backends(op)) == tuple(each.name for each in BACKENDS if op in each.operators)
    assert all(set(backend.operators) <= set(OPERATORS) for backend in BACKENDS)
    assert tost.ops.operators() == list(OPERATORS)


def test_registrations_load_no_torch():
    code = "import sys, tost.ops.backends, tost.ops.form; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def implementation(backend: Backend, reasons: list[str]) -> _dispatch.Implementation:
    return _dispatch.Implementation(backend, lambda *_: None, None, lambda: reasons, lambda *_: [])


def put_first(monkeypatch, backend: Backend, reasons: list[str]) -> None:
    for op, known in _dispatch._IMPLEMENTATIONS.items():
        monkeypatch.setitem(_dispatch._IMPLEMENTATIONS, op, (implementation(backend, reasons), *known))
    monkeypatch.setattr(_dispatch, "_WARNED", set())
    monkeypatch.setattr(_dispatch, "_SELECTED", {})


def test_a_first_backend_for_another_device_is_not_missed(monkeypatch):
    put_first(monkeypatch, Backend("gpu", "nowhere", devices=("cuda",)), ["no such device"])
    assert _dispatch.select("tssa", "auto", W).backend.name == "native"  # a warning would be an error
    with pytest.raises(BackendError, match="gpu: no such device"):
        _dispatch.select("tssa", "gpu", W)


def test_a_faster_backend_for_this_device_is_missed(monkeypatch):
    put_first(monkeypatch, Backend("fast", "nowhere", devices=("cpu",)), ["not built"])
    with pytest.warns(RuntimeWarning, match="runs on backend 'native'; 'fast' is faster but cannot be used: not built"):
        assert _dispatch.select("tssa", "auto", W).backend.name == "native"


def test_a_form_that_a_backend_does_not_have_is_refused_and_left_to_others(monkeypatch):
    def unsupported(w, form):
        return ["has no blocks"] if form.block_size > 1 else []

    first = _dispatch.Implementation(Backend("plain", "nowhere"), lambda *_: None, None, list, unsupported)
    for op, known in _dispatch._IMPLEMENTATIONS.items():
        monkeypatch.setitem(_dispatch._IMPLEMENTATIONS, op, (first, *known))
    monkeypatch.setattr(_dispatch, "_WARNED", {"plain"})
    monkeypatch.setattr(_dispatch, "_SELECTED", {})
    for form, name in ((Form(), "plain"), (Form(block_size=2), "native"), (Form(), "plain")):
        assert _dispatch.select("tssa", "auto", W, form).backend.name == name
    with pytest.raises(BackendError, match="plain: has no blocks"):
        _dispatch.select("tssa", "plain", W, Form(block_size=2))


def test_a_backend_that_is_not_automatic_runs_by_its_name_only(monkeypatch):
    put_first(monkeypatch, Backend("trial", "nowhere", automatic=False), [])
    assert _dispatch.select("tssa", "auto", W).backend.name == "native"
    assert _dispatch.select("tssa", "trial", W).backend.name == "trial"


@pytest.mark.parametrize("op", OPERATORS)
def test_other_devices_have_no_native_backend(op):
    assert list(backends_on("cuda", op)) == ["torch", "reference"]
    assert list(backends_on("cpu", op)) == ["native", "torch", "reference"]
    assert _dispatch.select(op, "auto", torch.empty(1, 1, 1, 1, device="meta")).backend.name == "torch"


@pytest.mark.parametrize(
    ("broken", "chosen", "expected"),
    [(0, None, None), (1, None, "AVX512_CORE_FP16"), (0, "AVX2", "AVX2"), (1, "AVX2", "AVX2")],
)
def test_matrix_registers_that_are_not_as_announced_are_left_alone(monkeypatch, broken, chosen, expected):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", chosen or "")
    if chosen is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    _library._avoid_broken_amx(SimpleNamespace(tost_amx_is_broken=lambda: broken))
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == expected


@pytest.mark.skipif(_library._LIBRARY is None, reason="the library knows about the registers")
def test_products_in_bfloat16_work_here_once_the_library_is_loaded():
    ones = torch.ones(64, 64, dtype=torch.bfloat16)
    assert (ones @ ones == 64).all()


def test_flags_are_fields_in_the_order_of_the_library():
    form = Form(block_size=4, normalize=False)
    assert form.flags() == tuple(getattr(form, name) for name in FLAGS)
    assert Form.from_flags(form.flags()) == form
    assert set(get_type_hints(Form)) >= set(FLAGS)
    assert _library._LIBRARY.tost_form().decode().split() == list(FLAGS)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (1, MemoryError, "tost_tssa_forward: no memory for the partial sums of 5 tokens"),
        (2, BackendError, "tost_tssa_forward: the native library has no kernel for type 0"),
        (7, RuntimeError, "tost_tssa_forward failed with error code 7, which is not known"),
    ],
)
def test_error_codes_of_the_library_have_meanings(monkeypatch, code, error, message):
    monkeypatch.setattr(_library, "_LIBRARY", SimpleNamespace(tost_tssa_forward=lambda *_: code))
    with pytest.raises(error, match=message):
        tost.tssa(W, T, backend="native")


class FloatCumulativeSums(TorchDispatchMode):
    """Records the shapes of floating point tensors that are summed up cumulatively."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.cumsum.default and args[0].is_floating_point():
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("N", [5, 40])
def test_no_cumulative_sum_that_torch_refuses_on_gpus(deterministic, backend, N):
    # Tensors without data take the path of a device that is not a CPU.
    w = torch.empty(2, N, 3, 4, device="meta", requires_grad=True)
    with FloatCumulativeSums() as recorded:
        tost.causal_tssa(w, torch.empty(3, device="meta"), backend=backend).sum().backward()
    assert recorded.shapes == []


@pytest.mark.parametrize("N", [0, 1, 16, 17, 300])
def test_a_recurrence_that_keeps_everything_is_the_cumulative_sum(N):
    x, start = torch.randn(2, N, 12, dtype=torch.float64), torch.randn(2, 12, dtype=torch.float64)
    expected = start.unsqueeze(1) + x.cumsum(1)
    assert_close("sums", linear_recurrence(torch.ones_like(x), x, start), expected, 1e-13)
