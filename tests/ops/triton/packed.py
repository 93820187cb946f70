"""Comparison of the kernels on packed sequences with the reference, which takes them one by one."""

import torch

import tost
from tests.ops.cases import assert_all_close, make_case


def compare_packed(lengths, *, causal):
    """Fail if outputs, sums or gradients of packed sequences are not those of the reference."""
    case = make_case((1, sum(lengths), 3, 5), torch.float64, bias=True)
    state = make_case((len(lengths), 1, 3, 5), torch.float64, state=True).state
    tensors = {"w": case.w, "temperature": case.temperature}
    if causal:
        tensors |= {"bias": case.bias, **dict(zip(state._fields[:3], state[:3], strict=True))}
    starts = torch.tensor([0, *lengths]).cumsum(0).int()

    def run(backend):
        inputs = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        w, t, *rest = inputs.values()
        options = {"cu_seqlens": starts, "backend": backend}
        if causal:
            bias, *sums = rest
            before = tost.TSSAState(*sums, state.position)
            y, after = tost.causal_tssa_with_state(w, t, bias, state=before, **options)
            outputs = {"y": y, **dict(zip(state._fields[:3], after[:3], strict=True))}
        else:
            outputs = {"y": tost.tssa(w, t, **options)}
        g = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(x.shape, generator=g, dtype=x.dtype) for x in outputs.values()]
        gradients = torch.autograd.grad(list(outputs.values()), list(inputs.values()), cotangents)
        return outputs | {f"d{name}": x for name, x in zip(inputs, gradients, strict=True)}

    assert_all_close(run("triton"), run("reference"), 1e-12)
