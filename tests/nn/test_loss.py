"""Cross-entropy without logits: the value and gradients of the plain one, in less memory."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tost.nn import linear_cross_entropy
from tost.testing import assert_close

C, V = 8, 37


def inputs(shape, dtype=torch.float64, ignored=0.3):
    x = torch.randn(*shape, C, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, C, dtype=dtype, requires_grad=True)
    targets = torch.randint(V, shape)
    return x, weight, targets.where(torch.rand(shape) > ignored, -100)


def plain(x, weight, targets, reduction):
    logits = F.linear(x, weight).flatten(0, -2)
    return F.cross_entropy(
        logits.to(torch.promote_types(x.dtype, torch.float32)), targets.flatten(), reduction=reduction
    )


@given(
    st.lists(st.integers(1, 5), max_size=3), st.integers(1, 40), st.sampled_from(["mean", "sum"]), st.integers(0, 99)
)
@settings(max_examples=40)
def test_value_and_gradients_are_those_of_the_plain_one(shape, chunk_size, reduction, seed):
    torch.manual_seed(seed)
    x, weight, targets = inputs((2, *shape))
    targets.view(-1)[0] = 3  # of nothing the plain one has no mean
    found = linear_cross_entropy(x, weight, targets, reduction=reduction, chunk_size=chunk_size)
    expected = plain(x, weight, targets, reduction)
    assert_close("loss", found, expected, 1e-13)
    scale = torch.randn((), dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(found * scale, (x, weight)), torch.autograd.grad(expected * scale, (x, weight)), strict=True
    ):
        assert_close("gradient", a, b, 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_reduced_precision_is_as_near_as_the_plain_one(dtype, bound):
    x, weight, targets = inputs((4, 50), dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    exact = plain(*wide, targets, "mean")
    loss = linear_cross_entropy(x, weight, targets, chunk_size=16)
    assert loss.dtype == torch.float32
    assert_close("loss", loss, exact, bound)
    loss.backward()
    exact.backward()
    assert x.grad.dtype == weight.grad.dtype == dtype
    other = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    plain(*other, targets, "mean").backward()
    for mine, theirs, best in zip((x, weight), other, wide, strict=True):
        error, plain_error = ((tensor.grad.double() - best.grad).norm() for tensor in (mine, theirs))
        assert error <= 1.2 * plain_error + 1e-7


def test_autocast_takes_its_products_in_less_and_keeps_the_sums():
    x, weight, targets = inputs((4, 50), torch.float32)
    exact = linear_cross_entropy(x, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, chunk_size=8)
        assert_close("as logits", loss, plain(x, weight, targets, "mean"), 1e-6)
    loss.backward()
    assert loss.dtype == x.grad.dtype == weight.grad.dtype == torch.float32
    assert loss != exact
    assert_close("loss", loss, exact, 1e-2)


def test_graph_that_is_kept_can_be_used_again():
    x, weight, targets = inputs((5, 5))
    loss = linear_cross_entropy(x, weight, targets)
    first = torch.autograd.grad(3 * loss, (x, weight), retain_graph=True)
    kept = [tensor.clone() for tensor in first]
    second = torch.autograd.grad(3 * loss, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(kept, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, first, strict=True))


def test_only_what_is_asked_for_is_differentiated():
    x, weight, targets = inputs((5, 5))
    weight.requires_grad_(False)
    linear_cross_entropy(x, weight, targets).backward()
    assert x.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, targets).requires_grad


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else (out,)
        self.numel = max([self.numel, *(tensor.numel() for tensor in made if isinstance(tensor, torch.Tensor))])
        return out


def test_memory_is_that_of_a_chunk_and_of_the_gradients():
    tokens, vocabulary, rows = 600, 5000, 20
    x = torch.randn(tokens, C, requires_grad=True)
    weight = torch.randn(vocabulary, C, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    saved, given = [], {tensor.data_ptr() for tensor in (x, weight, targets)}

    def note(tensor):
        saved.append(0 if tensor.data_ptr() in given else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), Largest() as mode:
        linear_cross_entropy(x, weight, targets, chunk_size=rows)
    assert sum(saved) <= x.numel() + weight.numel() + 10
    assert mode.numel <= rows * vocabulary
    # The plain one keeps all logits, and so says this measure.
    with Largest() as mode:
        plain(x, weight, targets, "mean")
    assert mode.numel == tokens * vocabulary


def test_default_chunk_is_bounded_whatever_the_vocabulary():
    with torch.device("meta"):
        x, weight = torch.empty(100_000, 1), torch.empty(50_304, 1)
        targets = torch.empty(100_000, dtype=torch.int64)
        with Largest() as mode:
            linear_cross_entropy(x, weight, targets)
    assert mode.numel <= 1 << 24


def test_compiles_without_a_break():
    x, weight, targets = inputs((3, 7), torch.float32)
    compiled = torch.compile(
        lambda *tensors: linear_cross_entropy(*tensors, chunk_size=9), fullgraph=True, backend="aot_eager"
    )
    found = compiled(x, weight, targets)
    expected = linear_cross_entropy(x, weight, targets)
    assert_close("loss", found, expected, 1e-6)
    gradients = [torch.autograd.grad(loss, (x, weight)) for loss in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        assert_close("gradient", a, b, 1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, t: linear_cross_entropy(x, w, t, reduction="none"), "reduction='none' is not known"),
        (lambda x, w, t: linear_cross_entropy(x, w, t, chunk_size=0), "chunk_size=0 takes no token"),
        (lambda x, w, t: linear_cross_entropy(x, w, t[:1]), r"targets of shape \(1, 3\) do not fit; they need"),
        (lambda x, w, t: linear_cross_entropy(x, w[:, :2], t), r"a weight of shape \(37, 2\)"),
        (lambda x, w, t: linear_cross_entropy(x, w, t + V), "but there are 37 classes, from 0 to 36; use -100 for"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(*inputs((2, 3), ignored=0.0))
