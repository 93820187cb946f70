"""Derivatives of every kind through every backend: torch.func, forward mode, second order. The reference decides."""

from itertools import product

import pytest
import torch
from functorch.compile import make_boxed_func
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import tost
from tests.ops.cases import BACKENDS, FAST_BACKENDS, FAST_BLOCK_BACKENDS, Case, make_case
from tost.ops.flops import tssa_flops
from tost.testing import assert_close

backends = pytest.mark.parametrize("backend", BACKENDS)
fast_backends = pytest.mark.parametrize("backend", FAST_BACKENDS)
SHAPE = (2, 19, 3, 4)
CU_SEQLENS = torch.tensor([0, 7, 8, 19, 38], dtype=torch.int32)


def tssa(case: Case, **options):
    """A function of w and temperature, and its inputs."""

    def run(w, temperature, *, backend):
        return tost.tssa(w, temperature, mask=case.mask, normalize=case.normalize, backend=backend, **options)

    return run, (case.w, case.temperature)


def causal(case: Case, **options):
    """A function of w, temperature, bias, decay and the sums before, as far as the case has them, and its inputs."""
    names = [name for name in ("bias", "decay") if getattr(case, name) is not None]
    inputs = (case.w, case.temperature, *(getattr(case, name) for name in names))

    def run(w, temperature, *rest, backend):
        given = dict(zip(names, rest, strict=False))
        sums = rest[len(names) :]
        state = tost.TSSAState(*sums, case.state.position) if sums else None
        arguments = {"mask": case.mask, "state": state, "decay": given.get("decay"), **options}
        y, after = tost.causal_tssa_with_state(w, temperature, given.get("bias"), backend=backend, **arguments)
        return (y, *after[:3])

    return run, (*inputs, *(case.state[:3] if case.state is not None else ()))


def step(case: Case):
    """One token, after a state."""
    inputs = (case.w[:, 0], case.temperature, *case.state[:3])

    def run(w, temperature, *sums, backend):
        state = tost.TSSAState(*sums, case.state.position)
        y, after = tost.ops.causal_tssa_step(w, temperature, state=state, backend=backend)
        return (y, *after[:3])

    return run, inputs


def make(name):
    plain, full = make_case(SHAPE, torch.float64), make_case(SHAPE, torch.float64, masked=True, bias=True, state=True)
    unnormalized = make_case(SHAPE, torch.float64, masked=True, normalize=False)
    fading = make_case(SHAPE, torch.float64, masked=True, count_scaled=True, decay=True)
    every = {"masked": True, "bias": True, "state": True, "count_scaled": True, "decay": True}
    in_blocks = make_case(SHAPE, torch.float64, block_size=2, **every)
    centered = make_case(SHAPE, torch.float64, centered=True, masked=True)

    def from_data(decay, **options):
        case = make_case(SHAPE, torch.float64, **(every | {"decay": decay}), **options)
        return causal(case, count_scaled=True, **options)

    def in_one_row(operator, **options):
        case = make_case((1, 2 * SHAPE[1], *SHAPE[2:]), torch.float64, masked=True, **options)
        return operator(case, cu_seqlens=CU_SEQLENS, **options)

    return {
        "tssa": lambda: tssa(plain),
        "tssa masked": lambda: tssa(full, count_scaled=True),
        "tssa unnormalized": lambda: tssa(unnormalized),
        "causal": lambda: causal(plain),
        "causal from a state": lambda: causal(full),
        "causal fading": lambda: causal(fading, count_scaled=True),
        "step": lambda: step(full),
        "tssa in blocks": lambda: tssa(in_blocks, count_scaled=True, block_size=2),
        "causal in blocks": lambda: causal(in_blocks, count_scaled=True, block_size=2),
        "tssa packed": lambda: in_one_row(tssa),
        "causal packed": lambda: in_one_row(causal),
        "tssa centered": lambda: tssa(centered, centered=True),
        "causal centered": lambda: from_data(True, centered=True),
        "decays of heads": lambda: from_data("head"),
        "decays of channels": lambda: from_data("channel", block_size=2, centered=True),
        "packed blocks": lambda: in_one_row(causal, block_size=2),
    }[name]()


names = [
    "tssa",
    "tssa masked",
    "tssa unnormalized",
    "causal",
    "causal from a state",
    "causal fading",
    "step",
    "tssa packed",
    "causal packed",
]
blocks = ["tssa in blocks", "causal in blocks", "packed blocks"]
# Not every backend has these; "auto" takes the fastest that does.
some = ["tssa centered", "causal centered", "decays of heads", "decays of channels"]
calls = pytest.mark.parametrize(
    ("backend", "name"),
    [*product(FAST_BACKENDS, names), *product(FAST_BLOCK_BACKENDS, blocks), *product(("auto", "torch"), some)],
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
    run, inputs = make(name)
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
    run, inputs = make(name)
    assert_same(penalty(run, inputs, backend), penalty(run, inputs, "reference"))


@calls
def test_functional_gradients(backend, name):
    run, inputs = make(name)

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
    run, inputs = make(name)
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


@fast_backends
def test_vmap_over_masks_and_biases_that_sequences_share(backend):
    case = make_case((2, 19, 3, 4), torch.float64)
    masks, biases = torch.rand(3, 2, 19) > 0.3, torch.randn(3, 1, 19, 3, dtype=torch.float64)

    def run(w, mask, bias, backend):
        return tost.causal_tssa(w, case.temperature, bias, mask=mask, backend=backend)

    w = torch.stack((case.w, 2 * case.w, -case.w))
    for dims in ((0, 0, 0), (0, None, 0), (0, 0, None), (None, 0, 0)):
        given = [x if d == 0 else x[0] for x, d in zip((w, masks, biases), dims, strict=True)]
        chosen = [[x[i] if d == 0 else x for x, d in zip(given, dims, strict=True)] for i in range(3)]
        expected = torch.stack([run(*each, "reference") for each in chosen])
        assert_same(torch.vmap(lambda *x: run(*x, backend), dims)(*given), expected)


@fast_backends
@pytest.mark.parametrize("run", [tost.tssa, tost.causal_tssa])
def test_gradients_of_each_sample(backend, run):
    case = make_case((3, 9, 2, 4), torch.float64)

    def loss(t, w):
        return run(w[None], t, backend=backend).square().sum()

    actual = torch.vmap(torch.func.grad(loss), (None, 0))(case.temperature, case.w)
    expected = torch.stack([torch.func.grad(loss)(case.temperature, w) for w in case.w])
    assert_same(actual, expected)


@fast_backends
@pytest.mark.parametrize("run", [tost.tssa, tost.causal_tssa])
def test_batched_gradients_of_one_graph(backend, run):
    case = make_case((2, 9, 2, 4), torch.float64)
    w, t = case.w.requires_grad_(), case.temperature.requires_grad_()
    y, several = run(w, t, backend=backend), torch.randn(3, *case.w.shape, dtype=torch.float64)
    actual = torch.autograd.grad(y, (w, t), several, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, (w, t), dy, retain_graph=True) for dy in several]
    assert_same(actual, tuple(torch.stack(x) for x in zip(*each, strict=True)))


@fast_backends
def test_third_derivatives(backend):
    w = torch.randn(1, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    t = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for run in (tost.tssa, tost.causal_tssa):
        assert torch.autograd.gradgradcheck(lambda w, t, run=run: run(w, t, backend=backend), (w, t))
        third = {}
        for chosen in (backend, "reference"):
            x = run(w, t, backend=chosen).square().sum()
            for _ in range(3):
                (dw,) = torch.autograd.grad(x, w, create_graph=True)
                x = dw.square().sum()
            third[chosen] = dw
        assert_same(third[backend], third["reference"])


@pytest.mark.parametrize("run", [tost.tssa, tost.causal_tssa])
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


@pytest.mark.parametrize("causal", [False, True])
def test_flop_counter_sees_the_operator(causal):
    B, N, H, D = 2, 10, 3, 4
    w, t = torch.randn(B, N, H, D, requires_grad=True), torch.ones(H)
    run, once = (tost.causal_tssa, B * N * H * (10 * D + 7)) if causal else (tost.tssa, B * N * H * (8 * D + 7))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run(w, t, backend="native")
    assert counter.get_total_flops() == once
    with FlopCounterMode(display=False) as counter:
        run(w, t, backend="native").sum().backward()
    assert counter.get_total_flops() == 3 * once


@pytest.mark.parametrize("causal", [False, True])
def test_flop_counter_sees_blocks(causal):
    B, N, H, D, g = 2, 10, 3, 4, 2
    w, t = torch.randn(B, N, H, D, requires_grad=True), torch.ones(H)
    with FlopCounterMode(display=False) as counter:
        (tost.causal_tssa if causal else tost.tssa)(w, t, block_size=g, backend="native").sum().backward()
    assert counter.get_total_flops() == 3 * B * N * tssa_flops(H, D, causal=causal, block_size=g)
