"""Derivatives of every kind through every backend: torch.func, forward mode, second order. The reference decides."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import tost
from tests.ops.cases import FAST_BACKENDS, OPERATORS, SUMS, Case, backends, continued, make_case, on_operators, plain
from tost.ops._blocks import products
from tost.ops.flops import gated_flops, tssa_flops
from tost.testing import assert_close

SHAPE = (2, 19, 3, 4)
CU_SEQLENS = torch.tensor([0, 7, 8, 19, 38], dtype=torch.int32)


def tssa(case: Case, **options):
    """A function of w and temperature, and its inputs."""

    def run(w, temperature, *, backend):
        return plain(case, backend, w=w, temperature=temperature, **options)

    return run, (case.w, case.temperature)


def causal(case: Case, **options):
    """A function of w, temperature, bias and the sums before, as far as the case has them, and its inputs."""
    given = {"w": case.w, "temperature": case.temperature} | ({} if case.bias is None else {"bias": case.bias})
    given |= {} if case.state is None else dict(zip(SUMS, case.state[:3], strict=True))

    def run(*tensors, backend):
        inputs = dict(zip(given, tensors, strict=True))
        sums = [inputs.pop(name) for name in SUMS if name in inputs]
        state = tost.TSSAState(*sums, case.state.position) if sums else None
        y, after = continued(case, backend, state=state, **inputs, **options)
        return (y, *after[:3])

    return run, tuple(given.values())


def step(case: Case):
    """One token, after a state."""

    def run(w, temperature, *sums, backend):
        state = tost.TSSAState(*sums, case.state.position)
        y, after = tost.causal_tssa_step(w, temperature, state=state, backend=backend)
        return (y, *after[:3])

    return run, (case.w[:, 0], case.temperature, *case.state[:3])


def gated(case: Case, g: int, state: bool, **options):
    """A function of w, gates and, with a state, the one before."""
    B, _, H, D = case.w.shape
    generator = torch.Generator().manual_seed(1)
    gates = torch.rand(*case.w.shape[:3], D // g, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    seen = torch.randn(B, 5, H, D, generator=generator, dtype=torch.float64)
    mass = torch.rand(B, H, D // g, generator=generator, dtype=torch.float64)
    before = (seen.mean(dim=1), products(seen - seen.mean(dim=1, keepdim=True), g).mean(dim=1), mass) if state else ()

    def run(w, write, *before, backend):
        start = tost.GatedState(*before, torch.zeros(B, dtype=torch.int64)) if before else None
        y, after = tost.gated_tssa_with_state(w, write, mask=case.mask, state=start, backend=backend, **options)
        return (y, *after[:3])

    return run, (case.w, gates, *before)


def in_one_row(call, *arguments, **options):
    """A call on packed sequences; `options` are those of the case."""
    case = make_case((1, 2 * SHAPE[1], *SHAPE[2:]), torch.float64, masked=True, **options)
    return call(case, *arguments, cu_seqlens=CU_SEQLENS)


def make_calls():
    simple, full = make_case(SHAPE, torch.float64), make_case(SHAPE, torch.float64, masked=True, bias=True, state=True)
    unnormalized = make_case(SHAPE, torch.float64, masked=True, normalize=False)
    return {
        "tssa": tssa(simple),
        "tssa masked": tssa(full),
        "tssa unnormalized": tssa(unnormalized),
        "tssa packed": in_one_row(tssa),
        "causal": causal(simple),
        "causal from a state": causal(full),
        "causal packed": in_one_row(causal),
        "step": step(full),
        "blocks": tssa(full, block_size=2),
        "blocks packed": in_one_row(tssa, block_size=2),
        "gated": gated(simple, 1, False),
        "gated from a state": gated(full, 2, True),
        "gated packed": in_one_row(gated, 2, False),
    }


CALLS = make_calls()
calls = pytest.mark.parametrize(
    ("backend", "name"),
    [
        (backend, name)
        for backend in FAST_BACKENDS
        for name in CALLS
        if backend != "triton" or name.partition(" ")[0] not in ("blocks", "gated")
    ],
)


def tuple_of(x):
    return x if isinstance(x, tuple) else (x,)


def assert_same(actual, expected, bound=1e-10):
    for i, (a, b) in enumerate(zip(tuple_of(actual), tuple_of(expected), strict=True)):
        assert_close(f"tensor {i}", a, b, bound)


def like(tensors, seed=1):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x.shape, generator=g, dtype=x.dtype) for x in tensors)


def penalty(run, inputs, backend):
    """A loss of the gradient, which takes a second derivative."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    outputs = tuple_of(run(*inputs, backend=backend))
    first = torch.autograd.grad(outputs, inputs, like(outputs), create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)


@calls
def test_forward_mode(backend, name):
    run, inputs = CALLS[name]
    tangents = like(inputs)
    expected = torch.func.jvp(lambda *x: run(*x, backend="reference"), inputs, tangents)
    actual = torch.func.jvp(lambda *x: run(*x, backend=backend), inputs, tangents)
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, dx) for x, dx in zip(inputs, tangents, strict=True)]
        outputs = tuple_of(run(*duals, backend=backend))
        assert_same(tuple(forward_ad.unpack_dual(y).tangent for y in outputs), expected[1])


@calls
def test_second_backward_pass(backend, name):
    run, inputs = CALLS[name]
    assert_same(penalty(run, inputs, backend), penalty(run, inputs, "reference"))


@calls
def test_functional_gradients(backend, name):
    run, inputs = CALLS[name]

    def loss(chosen):
        return lambda *x: sum(y.square().sum() for y in tuple_of(run(*x, backend=chosen)))

    everything = tuple(range(len(inputs)))
    for transform in (
        lambda f: torch.func.grad(f, everything),
        lambda f: torch.func.jacrev(f, everything),
        lambda f: torch.func.jacfwd(f, 1),
        lambda f: torch.func.hessian(f, 1),
        lambda f: torch.func.grad(lambda *x: torch.func.grad(f)(*x).square().sum(), everything),
    ):
        assert_same(transform(loss(backend))(*inputs), transform(loss("reference"))(*inputs))


@calls
def test_vmap(backend, name):
    run, inputs = CALLS[name]
    stacked = tuple(torch.stack((x, x.sqrt() if (x >= 0).all() else x / 2, x), dim=-1) for x in inputs)
    for mapped in ((0,), range(len(inputs)), range(1, len(inputs)), (len(inputs) - 1,)):
        dims = tuple(-1 if i in mapped else None for i in range(len(inputs)))
        given = tuple(s if d else x for s, x, d in zip(stacked, inputs, dims, strict=True))
        expected = [
            run(*(x if d is None else x[..., i] for x, d in zip(given, dims, strict=True)), backend="reference")
            for i in range(3)
        ]
        expected = tuple(torch.stack(each) for each in zip(*map(tuple_of, expected), strict=True))
        assert_same(torch.vmap(lambda *x: run(*x, backend=backend), dims)(*given), expected)


@on_operators(FAST_BACKENDS)
def test_vmap_over_masks(backend, run):
    case = make_case((2, 19, 3, 4), torch.float64)
    masks, w = torch.rand(3, 2, 19) > 0.3, torch.stack((case.w, 2 * case.w, -case.w))
    for dims in ((0, 0), (0, None), (None, 0)):
        given = [x if d == 0 else x[0] for x, d in zip((w, masks), dims, strict=True)]
        each = [[x[i] if d == 0 else x for x, d in zip(given, dims, strict=True)] for i in range(3)]
        expected = [run(w, case.temperature, mask=mask, backend="reference") for w, mask in each]
        found = torch.vmap(lambda w, mask: run(w, case.temperature, mask=mask, backend=backend), dims)(*given)
        assert_same(found, torch.stack(expected))


@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_vmap_over_biases_that_sequences_share(backend):
    case, biases = make_case((2, 19, 3, 4), torch.float64), torch.randn(3, 1, 19, 3, dtype=torch.float64)
    found = torch.vmap(lambda bias: tost.causal_tssa(case.w, case.temperature, bias, backend=backend))(biases)
    expected = [tost.causal_tssa(case.w, case.temperature, bias, backend="reference") for bias in biases]
    assert_same(found, torch.stack(expected))


@on_operators(FAST_BACKENDS)
def test_gradients_of_each_sample(backend, run):
    case = make_case((3, 9, 2, 4), torch.float64)

    def loss(t, w):
        return run(w[None], t, backend=backend).square().sum()

    actual = torch.vmap(torch.func.grad(loss), (None, 0))(case.temperature, case.w)
    assert_same(actual, torch.stack([torch.func.grad(loss)(case.temperature, w) for w in case.w]))


@on_operators(FAST_BACKENDS)
def test_batched_gradients_of_one_graph(backend, run):
    case = make_case((2, 9, 2, 4), torch.float64)
    w, t = case.w.requires_grad_(), case.temperature.requires_grad_()
    y, several = run(w, t, backend=backend), torch.randn(3, *case.w.shape, dtype=torch.float64)
    actual = torch.autograd.grad(y, (w, t), several, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, (w, t), dy, retain_graph=True) for dy in several]
    assert_same(actual, tuple(torch.stack(x) for x in zip(*each, strict=True)))


@on_operators(FAST_BACKENDS)
def test_third_derivatives(backend, run):
    w = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    t = torch.ones(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda w, t: run(w, t, backend=backend), (w, t))
    third = {}
    for chosen in (backend, "reference"):
        x = run(w, t, backend=chosen).square().sum()
        for _ in range(3):
            (dw,) = torch.autograd.grad(x, w, create_graph=True)
            x = dw.square().sum()
        third[chosen] = dw
    assert_same(third[backend], third["reference"])


@pytest.mark.parametrize("run", [tost.tssa, tost.causal_tssa, pytest.param(OPERATORS["gated"], marks=pytest.mark.slow)])
def test_compiled_transforms(run):
    case = make_case((1, 9, 2, 4), torch.float64)
    (dw,) = like((case.w,))

    def forward_mode(w, dw, backend):
        return torch.func.jvp(lambda w: run(w, case.temperature, backend=backend), (w,), (dw,))[1]

    def slope(w, dw, backend):
        return torch.func.grad(lambda w: (run(w, case.temperature, backend=backend) * dw).sum())(w)

    for function in (forward_mode, slope):
        compiled = torch.compile(function, backend="aot_eager")
        assert_same(compiled(case.w, dw, "native"), function(case.w, dw, "reference"))


def test_compiled_backward_pass_uses_the_kernel():
    names = []

    def look(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=look, bw_compiler=look)
    w, t = torch.randn(1, 9, 2, 4, requires_grad=True), torch.ones(2, requires_grad=True)
    run = torch.compile(lambda w: tost.tssa(w, t, backend="native").sum(), backend=backend, fullgraph=True)
    run(w).backward()
    assert [name for name in names if "tost" in name] == ["tost.tssa.default", "tost.tssa_backward.default"]


@backends
def test_functional_call_and_autocast(backend):
    module = tost.TSSAttention(12, 3, backend=backend)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(2, 7, 12)

    def loss(parameters, x):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    plain = torch.autograd.grad(module(x).square().sum(), tuple(module.parameters()))
    assert_same(tuple(torch.func.grad(loss)(parameters, x).values()), plain, 1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = torch.func.grad(loss)(parameters, x)
    assert_same(tuple(low.values()), plain, 0.03)


H, D = 3, 4
FLOPS = {
    "tssa": (8 * D + 7) * H,
    "causal": (10 * D + 7) * H,
    "blocks": tssa_flops(H, D, causal=False, block_size=2),
    "gated": gated_flops(H * D, 2),
}


@pytest.mark.parametrize("name", FLOPS)
def test_flop_counter_sees_the_operator(name):
    B, N = 2, 10
    w, t = torch.randn(B, N, H, D, requires_grad=True), torch.ones(H)
    run, once = OPERATORS[name], B * N * FLOPS[name]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run(w, t, backend="native")
    assert counter.get_total_flops() == once
    with FlopCounterMode(display=False) as counter:
        run(w, t, backend="native").sum().backward()
    assert counter.get_total_flops() == 3 * once
