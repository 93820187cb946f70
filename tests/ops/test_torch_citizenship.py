"""The operators as torch sees them: registered ops, compile, autocast, layouts, dtypes, memory, edge sizes."""

import subprocess
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tost
from tests.ops.cases import BACKENDS, FAST_BACKENDS, make_case
from tost.testing import assert_close

backends = pytest.mark.parametrize("backend", BACKENDS)
fast_backends = pytest.mark.parametrize("backend", FAST_BACKENDS)
LOW = [torch.float16, torch.bfloat16]


@backends
def test_layout_does_not_matter(backend):
    case = make_case((2, 9, 3, 4), torch.float32, bias=True)
    head_first = case.w.transpose(1, 2).contiguous().transpose(1, 2)
    strided = torch.stack((case.w, case.w), dim=-1)[..., 0]
    strided_temperature = case.temperature.repeat_interleave(2)[::2]
    expanded = case.w[:1].expand(2, 9, 3, 4)
    for run in (tost.tssa, tost.causal_tssa):
        y = run(case.w, case.temperature, backend=backend)
        assert_close("head first", run(head_first, case.temperature, backend=backend), y, 1e-6)
        assert_close("strided", run(strided, strided_temperature, backend=backend), y, 1e-6)
        same = run(expanded.contiguous(), case.temperature, backend=backend)
        assert_close("expanded", run(expanded, case.temperature, backend=backend), same, 1e-6)


@backends
def test_gradient_reaches_transposed_and_expanded_inputs(backend):
    case = make_case((2, 9, 3, 4), torch.float64)
    heads_first = case.w.transpose(1, 2).contiguous().requires_grad_()
    one = case.w[:1].clone().requires_grad_()
    for run in (tost.tssa, tost.causal_tssa):
        w = case.w.clone().requires_grad_()
        (expected,) = torch.autograd.grad(run(w, case.temperature, backend=backend), w, case.dy)
        out = run(heads_first.transpose(1, 2), case.temperature, backend=backend)
        (actual,) = torch.autograd.grad(out, heads_first, case.dy)
        assert_close("transposed", actual.transpose(1, 2), expected, 1e-12)
        out = run(one.expand(2, -1, -1, -1), case.temperature, backend=backend)
        (both,) = torch.autograd.grad(out, one, case.dy)
        parts = [torch.autograd.grad(run(one, case.temperature, backend=backend), one, dy[None])[0] for dy in case.dy]
        assert_close("expanded", both, sum(parts), 1e-12)


@backends
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 300.0])
def test_half_precision_has_no_nan_where_the_statistics_would_leave_its_range(backend, dtype, scale):
    w = (scale * torch.randn(1, 65, 2, 8, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    t = torch.ones(2, requires_grad=True)
    for y in (tost.tssa(w, t, backend=backend), tost.causal_tssa(w, t, backend=backend)):
        assert y.dtype == dtype
        dw, dt = torch.autograd.grad(y.float().sum(), (w, t))
        assert torch.isfinite(y).all()
        assert torch.isfinite(dw).all()
        assert torch.isfinite(dt).all()


@backends
def test_zero_tokens_give_zero(backend):
    w, t = torch.zeros(1, 4, 2, 3), torch.ones(2)
    assert not tost.tssa(w, t, backend=backend).any()
    assert not tost.causal_tssa(w, t, backend=backend).any()
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    assert not tost.tssa(torch.ones(1, 4, 2, 3), t, mask=nothing, backend=backend).any()


@backends
def test_autocast_keeps_statistics_in_float32(backend):
    torch.manual_seed(0)
    linear, t = torch.nn.Linear(12, 12), torch.ones(3, requires_grad=True)
    x = torch.randn(2, 50, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        w = linear(x).unflatten(-1, (3, 4))
        y, state = tost.causal_tssa_with_state(w, t, backend=backend)
    assert y.dtype == torch.bfloat16
    assert state.squares.dtype == torch.float32
    y.sum().backward()
    assert t.grad.dtype == torch.float32
    assert linear.weight.grad.dtype == torch.float32


@fast_backends
@pytest.mark.parametrize("causal", [False, True, "with options"], ids=["tssa", "causal", "with options"])
def test_backward_keeps_little_more_than_w(backend, causal):
    B, N, H, D = 1, 2048, 8, 48
    w = torch.randn(B, N, H, D, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    run = tost.causal_tssa if causal else tost.tssa
    decay = torch.full((H,), 0.9, requires_grad=True)
    options = {"count_scaled": True, "decay": decay} if causal == "with options" else {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run(w, torch.ones(H, requires_grad=True), backend=backend, **options)
    assert 0 < sum(kept.values()) <= 1.1 * w.nbytes + 3 * N * H * 4


@pytest.mark.parametrize("needed", ["w", "temperature", "bias", "decay", "state", "jvp", "vmap"])
def test_tokens_that_are_needed_are_not_overwritten(needed):
    case = make_case((2, 7, 3, 5), torch.float64, bias=True, state=True, decay=True)
    tensors = {name: getattr(case, name) for name in ("w", "temperature", "bias", "decay")}
    if needed in tensors:
        tensors[needed].requires_grad_()
    elif needed == "state":
        case.state.mass.requires_grad_()
    w, before = tensors["w"], tensors["w"].detach().clone()

    def run(w, overwrite=True):
        given = {"decay": tensors["decay"], "state": case.state, "overwrite": overwrite}
        return tost.causal_tssa_with_state(w, tensors["temperature"], tensors["bias"], **given)[0]

    if needed == "jvp":
        y, tangent = torch.func.jvp(run, (w,), (torch.ones_like(w),))
        assert_close("dy", tangent, torch.func.jvp(lambda w: run(w, False), (w,), (torch.ones_like(w),))[1], 1e-12)
    else:
        y = torch.vmap(run)(w.unsqueeze(0))[0] if needed == "vmap" else run(w)
    assert torch.equal(w, before)
    assert_close("y", y, run(w, False), 1e-12)


@pytest.mark.parametrize("run", [tost.tssa, tost.causal_tssa_with_state])
def test_autograd_notices_that_a_saved_tensor_was_overwritten(run):
    w = torch.randn(1, 4, 2, 3, requires_grad=True) + 0
    loss = w.square().sum()
    with torch.no_grad():
        run(w, torch.ones(2), backend="native", overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Names:
    def __init__(self):
        super().__init__()
        self.names = []

    def note(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Dispatched(Names, TorchDispatchMode):
    __torch_dispatch__ = Names.note


class Called(Names, TorchFunctionMode):
    __torch_function__ = Names.note


@pytest.mark.parametrize("name", ["tssa", "causal_tssa"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("mode", [Dispatched, Called])
def test_modes_see_the_operator(name, overwrite, mode):
    run = tost.tssa if name == "tssa" else tost.causal_tssa_with_state
    with torch.no_grad(), mode() as seen:
        run(torch.randn(1, 4, 2, 3), torch.ones(2), backend="native", overwrite=overwrite)
    assert f"tost.{name}{'_' * overwrite}.default" in seen.names


def test_profiler_sees_the_operator():
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tost.tssa(torch.randn(1, 4, 2, 3), torch.ones(2), backend="native", overwrite=True)
    assert "tost::tssa_" in [event.name for event in profile.events()]


@pytest.mark.parametrize("context", ["torch.device('meta')", "torch.inference_mode()", "FakeTensorMode()"])
def test_operators_may_be_loaded_while_a_mode_is_at_work(context):
    program = (
        "import torch\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        f"with {context}:\n"
        "    from tost.ops import tssa\n"
        "with FakeTensorMode():\n"
        "    print(type(tssa(torch.ones(1, 4, 2, 3), torch.ones(2), backend='native')).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "FakeTensor"


@fast_backends
@pytest.mark.parametrize("run", [tost.tssa, tost.causal_tssa])
def test_views_that_are_still_to_be_negated(backend, run):
    w = torch.complex(torch.randn(1, 9, 2, 3), torch.randn(1, 9, 2, 3)).conj().imag
    t = torch.complex(torch.ones(2), torch.ones(2)).conj().imag
    assert w.is_neg()
    assert t.is_neg()
    expected = run(w.resolve_neg(), t.resolve_neg(), backend="reference")
    assert_close("y", run(w, t, backend=backend), expected, 1e-6)
    assert_close("y", run(w.resolve_neg(), t, backend=backend), expected, 1e-6)


@backends
def test_operators_run_on_the_meta_device(backend):
    w, t = torch.empty(2, 5, 3, 4, device="meta"), torch.empty(3, device="meta")
    if backend in ("native", "triton"):
        with pytest.raises(tost.errors.BackendError, match=r"needs a .*CPU tensor, got meta"):
            tost.tssa(w, t, backend=backend)
    else:
        assert tost.tssa(w, t, backend=backend).shape == w.shape
        assert tost.causal_tssa_with_state(w, t, backend=backend)[1].mass.shape == (2, 3)


def test_state_moves_merges_and_detaches():
    case = make_case((2, 6, 2, 3), torch.float32, state=True)
    w = case.w.requires_grad_()
    _, state = tost.causal_tssa_with_state(w, case.temperature, state=case.state)
    assert state.squares.requires_grad
    assert not any(x.requires_grad for x in state.detach())
    wide = state.to(dtype=torch.float64)
    assert wide.mass.dtype == torch.float64
    assert wide.position.dtype == torch.int64
    empty = tost.TSSAState.empty(2, 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(state.merge(empty), state, strict=True))
    assert state.merge(state).position.tolist() == (2 * state.position).tolist()
