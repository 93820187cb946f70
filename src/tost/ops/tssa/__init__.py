"""Non-causal Token Statistics Self-Attention."""

from __future__ import annotations

from torch import Tensor

from tost.ops import _native
from tost.ops._checks import check_mask, check_temperature, check_tokens, refuse_autograd
from tost.ops._dispatch import Backend, register, select
from tost.ops.tssa.lean import tssa_lean
from tost.ops.tssa.native import tssa_native, tssa_native_
from tost.ops.tssa.reference import membership_reference, tssa_reference

__all__ = ["membership", "tssa", "tssa_"]


def tssa(
    w: Tensor,
    temperature: Tensor,
    *,
    mask: Tensor | None = None,
    normalize: bool = True,
    count_scaled: bool = False,
    backend: str = "auto",
) -> Tensor:
    r"""Token Statistics Self-Attention: every token is scaled by statistics of all tokens, without pairwise scores.

    .. code-block:: text

        energy[n,h] = sum_d  w[n,h,d]^2 / sum_m w[m,h,d]^2       share of each feature's squares
        pi[n,:]     = softmax_h( temperature[h] * energy[n,h] )  membership of token n in group h
        moment[h,d] = sum_n pi[n,h] w[n,h,d]^2 / sum_n pi[n,h]   second moment of the group
        y[n,h,d]    = - pi[n,h] * w[n,h,d] / (1 + moment[h,d])

    Time is ``O(N H D)``; beyond w and y the memory is ``N H`` memberships and ``H(2D+1)`` sums per sequence. Sums are
    held in float32, or in float64 for float64 tokens. Gradients reach `w` and `temperature` once (for second
    derivatives use ``backend="reference"``).

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: Multiplier of each head's energy, ``[H]``, of any sign.
        mask: Real tokens, bool ``[B, N]``. Tokens with False do not exist for the others, and their output is 0.
        normalize: False uses ``energy = sum_d w^2``, the un-normalised form of the paper's equation 10.
        count_scaled: Multiply the energy by n, the number of real tokens of the sequence (an option of ours).
            Normalised energies sum to D over the tokens, so that memberships flatten as 1/n; scaled ones do not.
        backend: ``"auto"`` for the fastest that can run, or ``"native"``, ``"torch"``, ``"reference"``.

    Returns:
        y, ``[B, N, H, D]``, in the dtype of `w`.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device.
        BackendError: The requested backend cannot run this call; the message says why.

    Example:
        >>> import torch, tost
        >>> tost.tssa(torch.randn(2, 196, 8, 48), torch.ones(8)).shape
        torch.Size([2, 196, 8, 48])
    """
    _check(w, temperature, mask)
    y: Tensor = select("tssa", backend, w).run(w, temperature, mask, normalize, count_scaled)
    return y


def tssa_(
    w: Tensor,
    temperature: Tensor,
    *,
    mask: Tensor | None = None,
    normalize: bool = True,
    count_scaled: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Run `tssa` in the memory of `w`: no second tensor of that size exists. For inference only.

    Args:
        w: Projected tokens, ``[B, N, H, D]``; overwritten.
        temperature: As in `tssa`.
        mask: As in `tssa`.
        normalize: As in `tssa`.
        count_scaled: As in `tssa`.
        backend: As in `tssa`.

    Returns:
        `w` itself, now holding y.

    Raises:
        ValueError: As in `tssa`.
        RuntimeError: Autograd would need the values that are overwritten.
        BackendError: As in `tssa`.
    """
    _check(w, temperature, mask)
    refuse_autograd("tssa_", w, temperature)
    chosen = select("tssa", backend, w)
    if chosen.run_inplace is None:
        return w.copy_(chosen.run(w, temperature, mask, normalize, count_scaled))
    y: Tensor = chosen.run_inplace(w, temperature, mask, normalize, count_scaled)
    return y


def membership(
    w: Tensor,
    temperature: Tensor,
    *,
    mask: Tensor | None = None,
    normalize: bool = True,
    count_scaled: bool = False,
) -> Tensor:
    """Return the soft assignment of tokens to heads (groups) that `tssa` uses.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: Multiplier of each head's energy, ``[H]``.
        mask: Real tokens, bool ``[B, N]``.
        normalize: As in `tssa`.
        count_scaled: As in `tssa`.

    Returns:
        pi, ``[B, N, H]``, float32 or better. Rows of real tokens sum to 1, rows of padding are 0.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device.

    Example:
        >>> import torch, tost
        >>> pi = tost.membership(torch.randn(1, 5, 3, 4), torch.ones(3))
        >>> bool(torch.allclose(pi.sum(-1), torch.ones(1, 5)))
        True
    """
    _check(w, temperature, mask)
    return membership_reference(w, temperature, mask, normalize, count_scaled)


def _check(w: Tensor, temperature: Tensor, mask: Tensor | None) -> None:
    check_tokens(w)
    check_temperature(temperature, w)
    check_mask(mask, w)


register(
    "tssa",
    Backend("native", tssa_native, tssa_native_, _native.missing, _native.why_not),
    Backend("torch", tssa_lean),
    Backend("reference", tssa_reference),
)
