"""Comparison of the kernels on packed sequences with the reference on each of them."""

import torch

from tests.ops.cases import assert_all_close, make_decay
from tost.ops._inputs import Inputs, Sums
from tost.ops.form import Form
from tost.ops.reference import causal_tssa, tssa
from tost.ops.triton import launch
from tost.ops.triton.tiles import choose_tiles

H, D = 3, 5


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def pack(lengths):
    """w, dy, temperature, the rows of each sequence, and where they begin."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rows = [slice(a, b) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    return randn(1, sum(lengths), H, D), randn(1, sum(lengths), H, D), randn(H), rows, ends.int()


def compare_packed_tssa(lengths, *, count_scaled):
    w, dy, t, rows, ends = pack(lengths)
    layout = launch.packed_layout(ends, w.shape[1], choose_tiles(H, D).CHUNK)
    count = torch.tensor(lengths).double() if count_scaled else None
    y, *saved = launch.tssa_forward(w, t, None, count, normalize=True, layout=layout)
    dw, dt = launch.tssa_backward(dy, w, t, None, count, *saved, layout=layout)
    expected = {"y": torch.empty_like(w), "dw": torch.empty_like(w), "dt": torch.zeros_like(t)}
    for part in rows:
        x, s = w[:, part].clone().requires_grad_(), t.clone().requires_grad_()
        z = tssa(Inputs(x, s, None), Form(count_scaled=count_scaled))
        dx, ds = torch.autograd.grad(z, (x, s), dy[:, part])
        expected["y"][:, part], expected["dw"][:, part] = z.detach(), dx
        expected["dt"] += ds
    assert_all_close({"y": y, "dw": dw, "dt": dt}, expected, 1e-12)


def compare_packed_causal(lengths, *, decays):
    w, dy, t, rows, ends = pack(lengths)
    S, decay = len(lengths), make_decay(H, torch.float64) if decays else None
    bias, before = randn(1, w.shape[1], H), (randn(S, H, D).square(), randn(S, H, D).square(), randn(S, H).square())
    after = (randn(S, H, D), randn(S, H, D), randn(S, H))
    layout = launch.packed_layout(ends, w.shape[1], choose_tiles(H, D, decays=decays).CHUNK)
    inputs = Inputs(w, t, None, bias=bias, before=Sums(*before), decay=decay)
    result = launch.causal_forward(inputs, layout)
    found = launch.causal_backward(dy, after, inputs, result.pi, result.starts, layout)
    expected = {"y": torch.empty_like(w), "dw": torch.empty_like(w), "dt": torch.zeros_like(t)}
    sums, gradients, by_decay = [], [], torch.zeros_like(t)
    for number, part in enumerate(rows):
        x, s = w[:, part].clone().requires_grad_(), t.clone().requires_grad_()
        start = [z[number : number + 1].clone().requires_grad_() for z in before]
        a = None if decay is None else decay.clone().requires_grad_()
        z, end = causal_tssa(Inputs(x, s, None, bias[:, part], Sums(*start), None, a), Form())
        inputs = [x, s, *start, *([] if a is None else [a])]
        cotangents = (dy[:, part], *(c[number : number + 1] for c in after))
        dx, ds, *rest = torch.autograd.grad((z, *end), inputs, cotangents, materialize_grads=True)
        expected["y"][:, part], expected["dw"][:, part] = z.detach(), dx
        expected["dt"] += ds
        sums.append([q.detach() for q in end])
        gradients.append(rest[:3])
        by_decay += 0 if a is None else rest[3]
    actual = {"y": result.y, "dw": found.w, "dt": found.temperature}
    for i, name in enumerate(Sums._fields):
        actual[name], expected[name] = result.after[i], torch.cat([q[i] for q in sums])
        actual[f"d{name}"], expected[f"d{name}"] = found.before[i], torch.cat([q[i] for q in gradients])
    if decay is not None:
        actual["ddecay"], expected["ddecay"] = found.decay, by_decay
    assert_all_close(actual, expected, 1e-12)
