"""Causal Token Statistics Self-Attention: parallel over a sequence, or token by token from a constant-size state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tost.ops import _native
from tost.ops._checks import (
    check_bias,
    check_decay,
    check_mask,
    check_state,
    check_temperature,
    check_tokens,
    refuse_autograd,
)
from tost.ops._dispatch import Backend, register, select
from tost.ops._numerics import num_tokens, statistics_dtype
from tost.ops.causal_tssa._sums import Sums, bias_of_tokens, count_of_tokens
from tost.ops.causal_tssa.lean import causal_tssa_lean
from tost.ops.causal_tssa.native import causal_tssa_native, causal_tssa_native_
from tost.ops.causal_tssa.reference import causal_membership_reference, causal_tssa_reference
from tost.ops.state import TSSAState

__all__ = ["causal_membership", "causal_tssa", "causal_tssa_", "causal_tssa_step", "causal_tssa_with_state"]


def causal_tssa(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    count_scaled: bool = False,
    decay: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Causal TSSA: token n is scaled by statistics of the tokens up to and including n.

    .. code-block:: text

        energy[n,h]   = sum_d ( w[n,h,d]^2 / sum_{m<=n} w[m,h,d]^2  +  bias[h,n] )
        pi[n,:]       = softmax_h( temperature[h] * energy[n,h] )
        moment[n,h,d] = sum_{m<=n} pi[m,h] w[m,h,d]^2 / sum_{m<=n} pi[m,h]
        y[n,h,d]      = - pi[n,h] * w[n,h,d] / (1 + moment[n,h,d])

    The bias is added to every feature's share, as in the authors' code, so its effect on the energy is ``D * bias``.
    For the paper's equation, where it is added once, pass ``bias / D``. Time is ``O(N H D)``; sums are held in float32,
    or in float64 for float64 tokens. Gradients reach `w`, `temperature`, `bias` and `decay` once.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: Multiplier of each head's energy, ``[H]``, of any sign.
        bias: Learned bias by head and position, ``[H, L]`` with ``L >= N``; or that of every token, ``[B, N, H]`` or
            ``[1, N, H]``, for rules of one's own about positions.
        mask: Real tokens, bool ``[B, N]``, with padding anywhere. Padding does not exist for the other tokens and
            does not advance their position; its output is 0.
        count_scaled: Multiply the share of the energy, not the bias, by the number of real tokens up to and including
            n (an option of ours): shares fall as 1/n, and with them the differences between memberships.
        decay: Forgetting, ``[H]`` in (0, 1] (an option of ours): before a token is added, each of the three sums of
            head h is multiplied by ``decay[h]``, so that statistics follow about the last ``1 / (1 - decay)`` tokens.
            1 forgets nothing. The count of `count_scaled` forgets too: ``1 + decay + decay^2 + ...``, n terms.
        backend: ``"auto"`` for the fastest that can run, or ``"native"``, ``"torch"``, ``"reference"``.

    Returns:
        y, ``[B, N, H, D]``, in the dtype of `w`.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device, or the bias is shorter than the sequence.
        BackendError: The requested backend cannot run this call; the message says why.

    Example:
        >>> import torch, tost
        >>> w = torch.randn(1, 10, 2, 4)
        >>> y = tost.causal_tssa(w, torch.ones(2))
        >>> bool(torch.equal(y[:, :7], tost.causal_tssa(w[:, :7], torch.ones(2))))
        True
    """
    y, _ = _run(w, temperature, bias, mask, None, count_scaled, decay, backend)
    return y


def causal_tssa_with_state(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    state: TSSAState | None = None,
    count_scaled: bool = False,
    decay: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, TSSAState]:
    """Run `causal_tssa` on the continuation of a sequence: state in, state out.

    A sequence may be cut anywhere; running the pieces one after the other gives the outputs and, as gradients flow
    through the state, the gradients of the whole. Use ``state.detach()`` between pieces to truncate them.

    Args:
        w: Projected tokens that follow those in `state`, ``[B, N, H, D]``.
        temperature: As in `causal_tssa`.
        bias: As in `causal_tssa`; indexed by the position in the whole sequence.
        mask: As in `causal_tssa`.
        state: What the tokens before left behind; None at the start of a sequence.
        count_scaled: As in `causal_tssa`.
        decay: As in `causal_tssa`, the same for all pieces of a sequence.
        backend: As in `causal_tssa`.

    Returns:
        y, ``[B, N, H, D]``, and the state after these tokens.

    Raises:
        ValueError: As in `causal_tssa`, or the state belongs to another batch or head layout.
        BackendError: As in `causal_tssa`.

    Example:
        >>> import torch, tost
        >>> w, t = torch.randn(1, 10, 2, 4), torch.ones(2)
        >>> first, state = tost.causal_tssa_with_state(w[:, :6], t)
        >>> second, state = tost.causal_tssa_with_state(w[:, 6:], t, state=state)
        >>> bool(torch.allclose(torch.cat((first, second), 1), tost.causal_tssa(w, t), atol=1e-6))
        True
    """
    y, sums = _run(w, temperature, bias, mask, state, count_scaled, decay, backend)
    return y, TSSAState(*sums, _position_after(w, mask, state))


def causal_tssa_step(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    state: TSSAState | None = None,
    count_scaled: bool = False,
    decay: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, TSSAState]:
    """Advance every sequence by one token, at a cost that does not depend on how many came before.

    Args:
        w: One projected token per sequence, ``[B, H, D]``.
        temperature: As in `causal_tssa`.
        bias: As in `causal_tssa`.
        state: What the tokens before left behind; None for the first token.
        count_scaled: As in `causal_tssa`.
        decay: As in `causal_tssa`.
        backend: As in `causal_tssa`.

    Returns:
        y, ``[B, H, D]``, and the state after this token.

    Raises:
        ValueError: As in `causal_tssa_with_state`.
        BackendError: As in `causal_tssa`.
    """
    if w.dim() != 3:
        raise ValueError(
            f"w has shape {tuple(w.shape)}; a step takes one token per sequence, [B, H, D]. "
            "For several tokens at once use causal_tssa_with_state."
        )
    y, state = causal_tssa_with_state(
        w.unsqueeze(1), temperature, bias, state=state, count_scaled=count_scaled, decay=decay, backend=backend
    )
    return y.squeeze(1), state


def causal_tssa_(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    state: TSSAState | None = None,
    count_scaled: bool = False,
    decay: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, TSSAState]:
    """Run `causal_tssa_with_state` in the memory of `w`. For inference only.

    Args:
        w: Projected tokens, ``[B, N, H, D]``; overwritten.
        temperature: As in `causal_tssa`.
        bias: As in `causal_tssa`.
        mask: As in `causal_tssa`.
        state: As in `causal_tssa_with_state`.
        count_scaled: As in `causal_tssa`.
        decay: As in `causal_tssa`.
        backend: As in `causal_tssa`.

    Returns:
        `w` itself, now holding y, and the state after these tokens.

    Raises:
        ValueError: As in `causal_tssa_with_state`.
        RuntimeError: Autograd would need the values that are overwritten.
        BackendError: As in `causal_tssa`.
    """
    refuse_autograd("causal_tssa_", w, temperature, bias, decay, *(state or ()))
    y, sums = _run(w, temperature, bias, mask, state, count_scaled, decay, backend, inplace=True)
    return y, TSSAState(*sums, _position_after(w, mask, state))


def causal_membership(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    state: TSSAState | None = None,
    count_scaled: bool = False,
    decay: Tensor | None = None,
) -> Tensor:
    """Return the soft assignment of tokens to heads (groups) that `causal_tssa` uses.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: As in `causal_tssa`.
        bias: As in `causal_tssa`.
        mask: As in `causal_tssa`.
        state: As in `causal_tssa_with_state`.
        count_scaled: As in `causal_tssa`.
        decay: As in `causal_tssa`.

    Returns:
        pi, ``[B, N, H]``, float32 or better. Rows of real tokens sum to 1, rows of padding are 0.

    Raises:
        ValueError: As in `causal_tssa_with_state`.
    """
    _check(w, temperature, bias, mask, state, decay)
    return causal_membership_reference(*_arguments(w, temperature, bias, mask, state, count_scaled, decay))


def _run(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    state: TSSAState | None,
    count_scaled: bool,
    decay: Tensor | None,
    backend: str,
    inplace: bool = False,
) -> tuple[Tensor, Sums]:
    _check(w, temperature, bias, mask, state, decay)
    chosen = select("causal_tssa", backend, w)
    arguments = _arguments(w, temperature, bias, mask, state, count_scaled, decay)
    if inplace and chosen.run_inplace is not None:
        result: tuple[Tensor, Sums] = chosen.run_inplace(*arguments)
        return result
    y, sums = chosen.run(*arguments)
    return (w.copy_(y) if inplace else y), sums


def _arguments(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    state: TSSAState | None,
    count_scaled: bool,
    decay: Tensor | None,
) -> tuple[Any, ...]:
    """Return what every implementation takes: the bias and the scale of each token instead of tables and positions."""
    position = None if state is None else state.position
    if bias is not None:
        bias = bias.to(statistics_dtype(w.dtype))
        bias = bias if bias.dim() == 3 else bias_of_tokens(bias, w.shape[1], mask, position)
    if decay is not None:
        decay = decay.to(statistics_dtype(w.dtype))
    scale = count_of_tokens(w, mask, position, decay) if count_scaled else None
    return w, temperature, bias, mask, _sums(state), scale, decay


def _check(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    state: TSSAState | None,
    decay: Tensor | None,
) -> None:
    check_tokens(w)
    check_temperature(temperature, w)
    check_mask(mask, w)
    check_state(state, w)
    check_bias(bias, w, mask, state)
    check_decay(decay, w)


def _sums(state: TSSAState | None) -> Sums | None:
    return None if state is None else Sums(state.squares, state.weighted_squares, state.mass)


def _position_after(w: Tensor, mask: Tensor | None, state: TSSAState | None) -> Tensor:
    tokens = num_tokens(w, mask)
    return tokens if state is None else state.position + tokens


register(
    "causal_tssa",
    Backend("native", causal_tssa_native, causal_tssa_native_, _native.missing, _native.why_not),
    Backend("torch", causal_tssa_lean),
    Backend("reference", causal_tssa_reference),
)
