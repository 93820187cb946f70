"""The registered operators as torch checks them: schemas, fakes, autograd, traced shapes."""

import pytest
import torch

from tests.ops.cases import make_case
from tost.ops.form import Form

pytest.importorskip("triton", reason="triton has no packages for this platform")

OPS = torch.ops.tost


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "all options"])
def test_operators_pass_opcheck(full):
    case = make_case((2, 5, 3, 4), torch.float32, masked=full, state=True)
    w, t, form = case.w, case.temperature, Form(normalize=not full).flags()
    torch.library.opcheck(OPS.tssa_triton.default, (w, t, case.mask, None, form))
    sums = case.state[:3] if full else (None, None, None)
    torch.library.opcheck(OPS.causal_tssa_triton.default, (w, t, torch.randn(1, 5, 3), case.mask, *sums, None))


@pytest.mark.slow
def test_operators_on_packed_sequences_pass_opcheck():
    case = make_case((1, 9, 3, 4), torch.float32, masked=True)
    w, t, cu_seqlens = case.w, case.temperature, torch.tensor([0, 2, 2, 9])
    torch.library.opcheck(OPS.tssa_triton.default, (w, t, case.mask, cu_seqlens, Form().flags()))
    sums = make_case((3, 1, 3, 4), torch.float32, state=True).state[:3]
    torch.library.opcheck(OPS.causal_tssa_triton.default, (w, t, None, case.mask, *sums, cu_seqlens))


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True], ids=["plain", "all options"])
def test_steps_and_backward_operators_pass_opcheck(full):
    case = make_case((2, 5, 3, 4), torch.float32, masked=full, state=True)
    w, t, mask, form = case.w, case.temperature, case.mask, Form(normalize=not full).flags()
    _, *saved = OPS.tssa_triton(w, t, mask, None, form)
    torch.library.opcheck(OPS.tssa_triton_backward.default, (case.dy, w, t, mask, *saved, None, form))
    bias = torch.randn(2, 5, 3) if full else None
    _, pi, starts, *_ = OPS.causal_tssa_triton(w, t, bias, mask, None, None, None, None)
    backward = OPS.causal_tssa_triton_backward.default
    torch.library.opcheck(backward, (case.dy, *case.dstate, w, t, bias, mask, pi, starts, None))
    token, bias, mask = (None if x is None else x[:, :1] for x in (w, bias, mask))
    torch.library.opcheck(OPS.causal_tssa_triton_step.default, (token, t, bias, mask, *case.state[:3], None))
