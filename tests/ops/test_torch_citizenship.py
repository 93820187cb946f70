"""The operators as torch sees them: registered ops, compile, autocast, layouts, dtypes, memory, edge sizes."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tost
from tests.ops.cases import (
    BACKENDS,
    FAST_BACKENDS,
    OPERATORS,
    backends,
    continued,
    make_case,
    on_operators,
)
from tost.testing import assert_close

LOW = [torch.float16, torch.bfloat16]
SHAPE = (2, 9, 3, 4)


def layouts(w):
    """The same tokens, laid out in other ways."""
    return {
        "heads first": w.transpose(1, 2).contiguous().transpose(1, 2),
        "strided": torch.stack((w, w), dim=-1)[..., 0],
        "features last but one": w.mT.contiguous().mT,
    }


@on_operators()
def test_layout_does_not_matter(backend, run):
    case = make_case(SHAPE, torch.float32)
    w, t = case.w, case.temperature
    y = run(w, t, backend=backend)
    for name, tokens in layouts(w).items():
        assert_close(name, run(tokens, t.repeat_interleave(2)[::2], backend=backend), y, 1e-6)
    one = w[:1].expand(SHAPE)
    assert_close("expanded", run(one, t, backend=backend), run(one.contiguous(), t, backend=backend), 1e-6)


@on_operators()
def test_gradient_reaches_transposed_and_expanded_inputs(backend, run):
    case = make_case(SHAPE, torch.float64)
    w, t = case.w.requires_grad_(), case.temperature
    (expected,) = torch.autograd.grad(run(w, t, backend=backend), w, case.dy)
    for name, tokens in layouts(w).items():
        (actual,) = torch.autograd.grad(run(tokens, t, backend=backend), w, case.dy)
        assert_close(name, actual, expected, 1e-12)
    one = case.w[:1].detach().requires_grad_()
    (both,) = torch.autograd.grad(run(one.expand(2, -1, -1, -1), t, backend=backend), one, case.dy)
    parts = [torch.autograd.grad(run(one, t, backend=backend), one, dy[None])[0] for dy in case.dy]
    assert_close("expanded", both, sum(parts), 1e-12)


@on_operators()
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 300.0])
def test_half_precision_has_no_nan_where_the_statistics_would_leave_its_range(backend, run, dtype, scale):
    w = (scale * torch.randn(1, 65, 2, 8, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    t = torch.ones(2, requires_grad=True)
    y = run(w, t, backend=backend)
    assert y.dtype == dtype
    for x in (y, *torch.autograd.grad(y.float().sum(), (w, t))):
        assert torch.isfinite(x).all()


@on_operators()
def test_zero_tokens_give_zero(backend, run):
    w, t = torch.zeros(1, 4, 2, 4), torch.ones(2)
    assert not run(w, t, backend=backend).any()
    assert not run(w + 1, t, mask=torch.zeros(1, 4, dtype=torch.bool), backend=backend).any()


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


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_gated_states_are_in_float32_for_tokens_in_half_precision(backend):
    w, write = torch.randn(2, 7, 3, 4).bfloat16(), torch.rand(2, 7, 3, 2)
    for gates in (write, write.bfloat16()):
        y, state = tost.gated_tssa_with_state(w, gates, backend=backend)
        assert [x.dtype for x in (y, *state)] == [torch.bfloat16, *[torch.float32] * 3, torch.int64]


# What the backward pass needs of gated statistics beside w are the gates, one number per block.
@on_operators(FAST_BACKENDS)
def test_backward_keeps_little_more_than_w(backend, run):
    B, N, H, D = 1, 2048, 8, 48
    w = torch.randn(B, N, H, D, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    write = torch.rand(B, N, H, D // 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        if run is OPERATORS["gated"]:
            tost.gated_tssa(w, write, backend=backend)
        else:
            run(w, torch.ones(H, requires_grad=True), backend=backend)
    assert 0 < sum(kept.values()) <= 1.1 * w.nbytes + (8 * write.nbytes if run is OPERATORS["gated"] else 3 * N * H * 4)


@on_operators(FAST_BACKENDS)
def test_calls_are_computed_again_in_the_backward_pass_of_a_checkpoint(backend, run):
    case = make_case(SHAPE, torch.float64, masked=True)
    w, t = case.w.requires_grad_(), case.temperature.requires_grad_()

    def call(w, t):
        return run(w, t, mask=case.mask, backend=backend)

    expected, found = call(w, t), checkpoint(call, w, t, use_reentrant=False)
    for a, b in zip(*(torch.autograd.grad(y, (w, t), case.dy) for y in (found, expected)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("needed", ["w", "temperature", "bias", "state", "jvp", "vmap"])
def test_tokens_that_are_needed_are_not_overwritten(needed):
    case = make_case((2, 7, 3, 5), torch.float64, bias=True, state=True)
    tensors = {"w": case.w, "temperature": case.temperature, "bias": case.bias, "state": case.state.mass}
    if needed in tensors:
        tensors[needed].requires_grad_()
    w, before = case.w, case.w.detach().clone()

    def run(w, overwrite=True):
        return continued(case, "auto", w=w, overwrite=overwrite)[0]

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


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (tost.tssa, "tssa"),
        (partial(tost.tssa, overwrite=True), "tssa_"),
        (tost.causal_tssa, "causal_tssa"),
        (partial(tost.causal_tssa_with_state, overwrite=True), "causal_tssa_"),
        (OPERATORS["gated"], "gated_tssa"),
    ],
)
@pytest.mark.parametrize("mode", [Dispatched, Called])
def test_modes_see_the_operator(run, name, mode):
    with torch.no_grad(), mode() as seen:
        run(torch.randn(1, 4, 2, 3), torch.ones(2), backend="native")
    assert f"tost.{name}.default" in seen.names


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


@on_operators(FAST_BACKENDS)
def test_views_that_are_still_to_be_negated(backend, run):
    w = torch.complex(torch.randn(1, 9, 2, 4), torch.randn(1, 9, 2, 4)).conj().imag
    t = torch.complex(torch.ones(2), torch.ones(2)).conj().imag
    assert w.is_neg()
    assert t.is_neg()
    expected = run(w.resolve_neg(), t.resolve_neg(), backend="reference")
    assert_close("y", run(w, t, backend=backend), expected, 1e-6)
    assert_close("y", run(w.resolve_neg(), t, backend=backend), expected, 1e-6)


@on_operators()
def test_operators_run_on_the_meta_device(backend, run):
    w, t = torch.empty(2, 5, 3, 4, device="meta"), torch.empty(3, device="meta")
    if backend in ("native", "triton"):
        with pytest.raises(tost.errors.BackendError, match=r"needs a .*CPU tensor, got meta"):
            run(w, t, backend=backend)
    else:
        assert run(w, t, backend=backend).shape == w.shape


@on_operators([name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_calls_compile_without_a_graph_break(backend, run, compiler):
    case = make_case((2, 18 if backend != "torch" else 3, 2, 6), torch.float32, masked=True)
    w, t = case.w.requires_grad_(), case.temperature.requires_grad_()

    def step(w, t):
        return run(w, t, mask=case.mask, backend=backend)

    torch._dynamo.reset()  # the function is compiled again for every operator, which is limited
    compiled, eager = torch.compile(step, fullgraph=True, backend=compiler)(w, t), step(w, t)
    assert_close("y", compiled, eager, 1e-6)
    for a, b in zip(*(torch.autograd.grad(y, (w, t), case.dy) for y in (compiled, eager)), strict=True):
        assert_close("gradient", a, b, 1e-5)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_states_go_through_compiled_functions(backend, compiler):
    case = make_case((2, 3, 2, 6), torch.float32, bias=True, state=True)
    write, before = torch.rand(2, 3, 2, 3), tost.GatedState.empty(2, 2, 6, block_size=2)

    def step(w, position):
        y, after = continued(case, backend, w=w, state=case.state._replace(position=position))
        z, end = tost.gated_tssa_with_state(w, write, state=before._replace(position=position), backend=backend)
        return y, z, *after, *end

    given = case.w, case.state.position
    for a, b in zip(torch.compile(step, fullgraph=True, backend=compiler)(*given), step(*given), strict=True):
        assert_close("output", a, b, 1e-6)


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
