"""The registered operators as torch checks them: schemas, fakes, autograd, traced shapes."""

import pytest
import torch

from tests.ops.cases import make_case, make_decay
from tost.ops.form import Form

pytest.importorskip("triton", reason="triton has no packages for this platform")

OPS = torch.ops.tost


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "all options"])
def test_operators_pass_opcheck(full):
    case = make_case((2, 5, 3, 4), torch.float32, masked=full, state=True)
    w, t = case.w, case.temperature
    form = Form(normalize=not full, count_scaled=full).flags()
    torch.library.opcheck(OPS.tssa_triton.default, (w, t, case.mask, None, form))
    bias = torch.randn(1, 5, 3)
    options = (torch.rand(1, 5, 3), make_decay(3, torch.float32)) if full else (None, None)
    sums = case.state[:3] if full else (None, None, None)
    torch.library.opcheck(OPS.causal_tssa_triton.default, (w, t, bias, case.mask, *sums, *options, None, form))


@pytest.mark.slow
def test_operators_on_packed_sequences_pass_opcheck():
    case = make_case((1, 9, 3, 4), torch.float32, masked=True)
    form = Form(count_scaled=True).flags()
    w, t, cu_seqlens = case.w, case.temperature, torch.tensor([0, 2, 2, 9])
    torch.library.opcheck(OPS.tssa_triton.default, (w, t, case.mask, cu_seqlens, form))
    sums = make_case((3, 1, 3, 4), torch.float32, state=True).state[:3]
    options = (torch.rand(1, 9, 3), make_decay(3, torch.float32), cu_seqlens, form)
    torch.library.opcheck(OPS.causal_tssa_triton.default, (w, t, None, case.mask, *sums, *options))


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True], ids=["plain", "all options"])
def test_steps_and_backward_operators_pass_opcheck(full):
    case = make_case((2, 5, 3, 4), torch.float32, masked=full, state=True)
    w, t, mask = case.w, case.temperature, case.mask
    form = Form(normalize=not full, count_scaled=full).flags()
    _, *saved = OPS.tssa_triton(w, t, mask, None, form)
    torch.library.opcheck(OPS.tssa_triton_backward.default, (case.dy, w, t, mask, *saved, None, form))
    options = (torch.rand(2, 5, 3), make_decay(3, torch.float32)) if full else (None, None)
    _, *saved = OPS.causal_tssa_triton(w, t, None, mask, None, None, None, *options, None, form)
    torch.library.opcheck(
        OPS.causal_tssa_triton_backward.default,
        (case.dy, *case.dstate, w, t, None, mask, *saved[:2], *options, None, form),
    )
    step = tuple(None if x is None else x[:, :1] for x in (w, mask, options[0]))
    torch.library.opcheck(
        OPS.causal_tssa_triton_step.default,
        (step[0], t, None, step[1], *case.state[:3], step[2], options[1], None, form),
    )
