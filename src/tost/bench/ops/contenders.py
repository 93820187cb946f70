"""The contenders: our layers, the limit they cannot beat, the paper's formulation, and two other token mixers.

All contenders map ``[B, N, C]`` to ``[B, N, C]``. Our layers, the paper's and the limit use the same two projections
and differ only in what happens between them.

Axes: B batch, N tokens, H heads, D head width, C = H * D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.bench.ops.cases import Case, Op
from tost.nn import (
    CausalSoftmaxAttention,
    CausalTSSAttention,
    CrossCovarianceAttention,
    Extensions,
    SoftmaxAttention,
    TSSAttention,
)

LIMIT = "limit"
"""Name of the contender that every ratio is relative to."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to mix tokens.

    Attributes:
        name: Column title and key in the result files.
        summary: What is computed, in a few words.
        build: Makes the layer for a case; its second argument is our layer, whose projections may be shared.
        ops: Operators that it can stand beside.
        always: Takes part in every round, whatever it costs.
        quadratic: Its time grows with the square of the tokens, so that long cases are estimated before they are run.
        compiled: It needs torch.compile, hence a C++ compiler; where that fails, only its own row is lost.
    """

    name: str
    summary: str
    build: Callable[[Case, nn.Module], nn.Module]
    ops: tuple[Op, ...] = tuple(Op)
    always: bool = False
    quadratic: bool = False
    compiled: bool = False


def paper_tssa(w: Tensor, temperature: Tensor) -> Tensor:
    """TSSA as the paper's listing computes it: one tensor operation per step, heads before tokens.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: One multiplier per head, ``[H]``.

    Returns:
        ``[B, N, H, D]``.
    """
    w_BHND = w.transpose(1, 2)
    energy_BHN = F.normalize(w_BHND, dim=-2).square().sum(dim=-1)
    pi_BHN = torch.softmax(energy_BHN * temperature[:, None], dim=1)
    weight_BHN = pi_BHN / (pi_BHN.sum(dim=-1, keepdim=True) + 1e-8)
    moment_BH1D = weight_BHN.unsqueeze(-2) @ w_BHND.square()
    shrink_BH1D = 1 / (1 + moment_BH1D)
    return (-(w_BHND * pi_BHN.unsqueeze(-1) * shrink_BH1D)).transpose(1, 2)


def paper_causal_tssa(w: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
    """Causal TSSA as the paper's listing computes it, with the two small constants of the authors' code.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: One multiplier per head, ``[H]``.
        bias: Added to every feature's share, ``[H, >=N]``.

    Returns:
        ``[B, N, H, D]``.
    """
    w_BHND = w.transpose(1, 2)
    square_BHND = w_BHND.square()
    share_BHND = square_BHND / square_BHND.cumsum(dim=-2).clamp_min(1e-12) + bias[:, : w.shape[1], None]
    pi_BHN = torch.softmax(share_BHND.sum(dim=-1) * temperature[:, None], dim=1)
    mass_BHN = pi_BHN.cumsum(dim=-1) + 1e-8
    moment_BHND = (square_BHND * pi_BHN.unsqueeze(-1)).cumsum(dim=-2) / mass_BHN.unsqueeze(-1)
    shrink_BHND = 1 / (1 + moment_BHND)
    return (-(w_BHND * pi_BHN.unsqueeze(-1) * shrink_BHND)).transpose(1, 2)


class PaperAttention(nn.Module):
    """The paper's attention layer around `paper_tssa` or `paper_causal_tssa`.

    Args:
        case: Gives the heads, the length and whether it is causal.
        proj_in: Projection of the tokens.
        proj_out: Projection of the result.
    """

    def __init__(self, case: Case, proj_in: nn.Module, proj_out: nn.Module) -> None:
        super().__init__()
        self.num_heads = case.heads
        self.proj_in, self.proj_out = proj_in, proj_out
        self.temperature = nn.Parameter(torch.ones(case.heads))
        self.bias = nn.Parameter(torch.zeros(case.heads, case.tokens)) if case.causal else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, N, C]`` to ``[B, N, C]``."""
        w_BNHD = self.proj_in(x).unflatten(-1, (self.num_heads, -1))
        if self.bias is None:
            y_BNHD = paper_tssa(w_BNHD, self.temperature)
        else:
            y_BNHD = paper_causal_tssa(w_BNHD, self.temperature, self.bias)
        return self.proj_out(y_BNHD.flatten(-2))


def our_layer(case: Case, *, backend: str) -> nn.Module:
    """Return our attention layer for a case, on one backend."""
    extensions = Extensions(block_size=case.block_size)
    if case.causal:
        return CausalTSSAttention(case.width, case.heads, case.tokens, extensions=extensions, backend=backend)
    return TSSAttention(case.width, case.heads, extensions=extensions, backend=backend)


def _limit(case: Case, ours: nn.Module) -> nn.Module:
    return nn.Sequential(ours.get_submodule("proj_in"), ours.get_submodule("proj_out"))


def _ours_on_torch(case: Case, ours: nn.Module) -> nn.Module:
    layer = our_layer(case, backend="torch")
    layer.load_state_dict(ours.state_dict())
    return layer


def _paper(case: Case, ours: nn.Module) -> nn.Module:
    return PaperAttention(case, ours.get_submodule("proj_in"), ours.get_submodule("proj_out"))


def _softmax(case: Case, ours: nn.Module) -> nn.Module:
    return (CausalSoftmaxAttention if case.causal else SoftmaxAttention)(case.width, case.heads)


def _cross_covariance(case: Case, ours: nn.Module) -> nn.Module:
    return CrossCovarianceAttention(case.width, case.heads)


def _paper_compiled(case: Case, ours: nn.Module) -> nn.Module:
    layer = _paper(case, ours)
    # One graph per case with its sizes fixed: the best that the compiler can do, and no recompilation in a round.
    torch.compiler.reset()
    layer.compile(dynamic=False, fullgraph=True)
    return layer


CONTENDERS = (
    Contender(name=LIMIT, summary="the layer's two linear projections alone", build=_limit, always=True),
    Contender(name="tost", summary="our layer, fastest backend", build=lambda case, ours: ours, always=True),
    Contender(name="tost-torch", summary="our layer on plain PyTorch operations", build=_ours_on_torch),
    Contender(name="paper eager", summary="the paper's listing, one PyTorch operation per step", build=_paper),
    Contender(name="paper compiled", summary="torch.compile of the same", build=_paper_compiled, compiled=True),
    Contender(name="sdpa", summary="softmax attention on PyTorch's fused kernel", build=_softmax, quadratic=True),
    Contender(name="xca", summary="cross-covariance attention of XCiT", build=_cross_covariance, ops=(Op.TSSA,)),
)
