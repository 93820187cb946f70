"""Every model under torch.func, forward mode, second backward passes and autocast: as with the reference backend."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.models.tiny import distinct, example, make_tiny, perturb
from tost.models import list_mixers
from tost.testing import assert_close

# Forward mode and second derivatives exist for the plain form of softmax attention only.
pytestmark = pytest.mark.usefixtures("plain_attention")
CASES = [
    *((name, {}) for name in distinct()),
    *(("lra_listops", {"mixer": name, "num_heads": 2}) for name in list_mixers(place="sequence") if name != "tssa"),
    *(("tost_lm_base", {"mixer": name, "num_heads": 2}) for name in list_mixers(place="language") if name != "tssa"),
    ("tost_lm_base", {"mixer": "tssa_plus", "mixer_options": {"block_size": 4}}),
]
models = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[" ".join([name, *map(str, options.values())]) for name, options in CASES]
)


@pytest.fixture
def plain_attention():
    with sdpa_kernel(SDPBackend.MATH):
        yield


def make_pair(name, options, dtype=torch.float64):
    """A model with the default backend, the same one with the reference, its parameters and an input."""
    torch.manual_seed(0)
    fast = perturb(make_tiny(name, **options), by=0.1).to(dtype).eval()
    slow = copy.deepcopy(fast)
    for module in slow.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    parameters = {key: value.detach() for key, value in fast.named_parameters()}
    return fast, slow, parameters, example(fast, dtype=dtype)


def loss_of(model, x):
    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    return loss


def assert_same(actual, expected, bound=1e-9):
    assert actual.keys() == expected.keys()
    scale = max(float(x.square().mean().sqrt()) for x in expected.values())
    for name, b in expected.items():
        # Gradients that cancel are zero up to rounding.
        assert_close(name, actual[name] + scale, b + scale, bound)


def directions(parameters, seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(x.shape, generator=g, dtype=x.dtype) for name, x in parameters.items()}


@models
def test_forward_mode(name, options):
    fast, slow, parameters, x = make_pair(name, options)
    along = directions(parameters, 1)
    value, slope = torch.func.jvp(loss_of(fast, x), (parameters,), (along,))
    gradients = torch.func.grad(loss_of(slow, x))(parameters)
    assert_close("value", value, loss_of(slow, x)(parameters), 1e-10)
    assert_close("slope", slope, sum((gradients[k] * along[k]).sum() for k in along), 1e-8)


@models
def test_gradients_and_products_with_the_hessian(name, options):
    fast, slow, parameters, x = make_pair(name, options)
    along = directions(parameters, 2)
    assert_same(torch.func.grad(loss_of(fast, x))(parameters), torch.func.grad(loss_of(slow, x))(parameters))

    def curvature(model):
        leaves = {key: value.clone().requires_grad_() for key, value in parameters.items()}
        first = torch.autograd.grad(loss_of(model, x)(leaves), tuple(leaves.values()), create_graph=True)
        slope = sum((g * along[key]).sum() for g, key in zip(first, leaves, strict=True))
        second = torch.autograd.grad(slope, tuple(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, second, strict=True))

    assert_same(curvature(fast), curvature(slow))
    _, forward_over_reverse = torch.func.jvp(torch.func.grad(loss_of(fast, x)), (parameters,), (along,))
    assert_same(forward_over_reverse, curvature(slow), 1e-8)


@models
def test_vmap_over_inputs(name, options):
    fast, _, _, x = make_pair(name, options)
    several = torch.stack((x, x.flip(0)))
    mapped = torch.vmap(fast)(several)
    assert_close("outputs", mapped, torch.stack([fast(each) for each in several]), 1e-10)


@pytest.mark.parametrize("name", ["tost_lm_base", "tost_tiny_patch16_224", "lra_listops"])
def test_gradients_of_each_sample(name):
    fast, slow, parameters, x = make_pair(name, {})

    def loss(model):
        return lambda parameters, x: loss_of(model, x[None])(parameters)

    mapped = torch.vmap(torch.func.grad(loss(fast)), (None, 0))(parameters, x)
    for i, each in enumerate(x):
        expected = torch.func.grad(loss(slow))(parameters, each)
        assert_same({key: value[i] for key, value in mapped.items()}, expected)


@pytest.mark.parametrize("name", ["tost_lm_base", "tost_tiny_patch16_224", "crate_tiny_patch16_224", "lra_listops"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_second_backward_pass_through_one_graph(name, checkpointing):
    model = make_tiny(name, gradient_checkpointing=checkpointing).train()
    loss = model(example(model)).square().mean()
    first = torch.autograd.grad(loss, tuple(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, tuple(model.parameters()))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
