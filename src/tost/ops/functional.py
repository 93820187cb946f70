"""The public operators: Token Statistics Self-Attention, causal or not, and their memberships.

Options come as keyword arguments. They become one `Form` here, which implementations receive with the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tost.ops import reference
from tost.ops._checks import (
    check_block_size,
    check_causal,
    check_gated,
    check_mask,
    check_packing,
    check_temperature,
    check_tokens,
)
from tost.ops._dispatch import SHARING, Implementation, select
from tost.ops._inputs import GatedInputs, Inputs, Sums, causal_inputs, relative_gates
from tost.ops._numerics import num_tokens, statistics_dtype
from tost.ops._transforms import is_transformed
from tost.ops.form import Form
from tost.ops.packing import Packing, find_packing
from tost.ops.state import CausalArguments, GatedState, TSSAState


def tssa(
    w: Tensor,
    temperature: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    segment_ids: Tensor | None = None,
    normalize: bool = True,
    block_size: int = 1,
    backend: str = "auto",
    overwrite: bool = False,
) -> Tensor:
    r"""Token Statistics Self-Attention: every token is scaled by statistics of all tokens, without pairwise scores.

    .. code-block:: text

        energy[n,h] = sum_d  w[n,h,d]^2 / sum_m w[m,h,d]^2       share of each feature's squares
        pi[n,:]     = softmax_h( temperature[h] * energy[n,h] )  membership of token n in group h
        moment[h,d] = sum_n pi[n,h] w[n,h,d]^2 / sum_n pi[n,h]   second moment of the group
        y[n,h,d]    = - pi[n,h] * w[n,h,d] / (1 + moment[h,d])

    Time is ``O(N H D)``; beyond w and y the memory is ``N H`` memberships and ``H(2D+1)`` sums per sequence. Sums are
    held in float32, or in float64 for float64 tokens. Gradients reach `w` and `temperature`. The fast backends have a
    backward pass; second derivatives, forward mode and the transforms of ``torch.func`` go through plain PyTorch.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: Multiplier of each head's energy, ``[H]``, of any sign.
        mask: Real tokens, bool ``[B, N]``. Tokens with False do not exist for the others, and their output is 0.
        cu_seqlens: Cumulative lengths of sequences that are packed into one row (B = 1), int32 ``[S + 1]`` from 0 to N,
            as flash-attention takes them; or a `Packing`. Each of the S sequences is taken alone.
        segment_ids: Another way to pack: integers ``[B, N]``, the same for neighbours of one sequence. An id does not
            come back in its row after another one.
        normalize: False uses ``energy = sum_d w^2``, the unnormalized form of the paper's equation 10.
        block_size: Consecutive features in a block, g, which divides D (above 1 it is not in the paper). The moments of
            a block are a matrix, ``S_b = sum_n pi w_b w_b^T / sum_n pi``, and ``y_b = -pi (I + S_b)^{-1} w_b``: what
            features have in common over the tokens reaches each token. Time is ``O(N H D g)``.
        backend: ``"auto"`` for the fastest that can run, or ``"triton"``, ``"native"``, ``"torch"``, ``"reference"``.
        overwrite: The values of `w` are not needed any more, so that y may be written into its memory. This happens
            where a backend can do it and autograd does not need `w`.

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
    form = Form(normalize=normalize, block_size=block_size)
    inputs = _inputs(form, w, temperature, mask, cu_seqlens, segment_ids)
    if SHARING:
        y = SHARING[-1].tssa(inputs, form)
    else:
        chosen = select("tssa", backend, w, form)
        y = (_inplace(chosen, inputs, w, temperature) if overwrite else chosen.run)(inputs, form)
    return y if inputs.packing is None else y.reshape(w.shape)


def membership(
    w: Tensor,
    temperature: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    segment_ids: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """Return the soft assignment of tokens to heads (groups) that `tssa` uses.

    Arguments are those of `tssa`. Memberships do not depend on `block_size`.

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
    form = Form(normalize=normalize)
    inputs = _inputs(form, w, temperature, mask, cu_seqlens, segment_ids)
    return reference.membership(inputs, form).reshape(w.shape[:3])


def causal_tssa(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    segment_ids: Tensor | None = None,
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
    or in float64 for float64 tokens. Gradients reach `w`, `temperature` and `bias`, as those of `tssa` do.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: Multiplier of each head's energy, ``[H]``, of any sign.
        bias: Learned bias by head and position, ``[H, L]`` with ``L >= N``; or that of every token, ``[B, N, H]`` or
            ``[1, N, H]``, for rules of one's own about positions.
        mask: Real tokens, bool ``[B, N]``, with padding anywhere. Padding does not exist for the other tokens and
            does not advance their position; its output is 0.
        cu_seqlens: Cumulative lengths of packed sequences, as in `tssa`. Each starts at position 0.
        segment_ids: The sequence of each token, as in `tssa`.
        backend: ``"auto"`` for the fastest that can run, or ``"triton"``, ``"native"``, ``"torch"``, ``"reference"``.

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
    packing = find_packing(w.shape[:2], cu_seqlens, segment_ids)
    return _causal(backend, packing, w, temperature, bias, mask, None)[0]


def causal_tssa_with_state(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    segment_ids: Tensor | None = None,
    state: TSSAState | None = None,
    backend: str = "auto",
    overwrite: bool = False,
) -> tuple[Tensor, TSSAState]:
    """Run `causal_tssa` on the continuation of a sequence: state in, state out.

    A sequence may be cut anywhere; running the pieces one after the other gives the outputs and, as gradients flow
    through the state, the gradients of the whole. Use ``state.detach()`` between pieces to truncate them.

    Arguments are those of `causal_tssa`; a table of biases is indexed by the position in the whole sequence. There are
    two more:

    Args:
        state: The state after the tokens before `w`; None at the start of a sequence. With packed sequences states
            have S entries in place of B.
        overwrite: The values of `w` are not needed any more, as in `tssa`.

    Returns:
        y, ``[B, N, H, D]``, and the state after these tokens.

    Raises:
        ValueError: As `causal_tssa` does, or the state belongs to another batch or head layout.
        BackendError: As `causal_tssa` does.

    Example:
        >>> import torch, tost
        >>> w, t = torch.randn(1, 10, 2, 4), torch.ones(2)
        >>> first, state = tost.causal_tssa_with_state(w[:, :6], t)
        >>> second, state = tost.causal_tssa_with_state(w[:, 6:], t, state=state)
        >>> bool(torch.allclose(torch.cat((first, second), 1), tost.causal_tssa(w, t), atol=1e-6))
        True
    """
    packing = find_packing(w.shape[:2], cu_seqlens, segment_ids)
    return _causal(backend, packing, w, temperature, bias, mask, state, overwrite=overwrite)


def causal_tssa_step(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    state: TSSAState | None = None,
    backend: str = "auto",
) -> tuple[Tensor, TSSAState]:
    """Advance every sequence by one token, at a cost that does not depend on how many came before.

    Arguments are those of `causal_tssa_with_state`, except:

    Args:
        w: One projected token per sequence, ``[B, H, D]``.

    Returns:
        y, ``[B, H, D]``, and the state after this token.

    Raises:
        ValueError: As `causal_tssa_with_state` does.
        BackendError: As `causal_tssa` does.
    """
    if w.dim() != 3:
        raise ValueError(
            f"w has shape {tuple(w.shape)}; a step takes one token per sequence, [B, H, D]. "
            "For several tokens at once use causal_tssa_with_state."
        )
    y, state = _causal(backend, None, w.unsqueeze(1), temperature, bias, None, state)
    return y.squeeze(1), state


def causal_membership(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    segment_ids: Tensor | None = None,
    state: TSSAState | None = None,
) -> Tensor:
    """Return the soft assignment of tokens to heads (groups) that `causal_tssa` uses.

    Arguments are those of `causal_tssa_with_state`. Of a state they use the squares and the position.

    Returns:
        pi, ``[B, N, H]``, float32 or better. Rows of real tokens sum to 1, rows of padding are 0.

    Raises:
        ValueError: As `causal_tssa_with_state` does.
    """
    packing = find_packing(w.shape[:2], cu_seqlens, segment_ids)
    given = (w, temperature, bias, mask, state)
    check_causal(packing, *given)
    return reference.causal_membership(causal_inputs(packing, *given)).reshape(w.shape[:3])


def gated_tssa(
    w: Tensor,
    write: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    segment_ids: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Causal token statistics over windows that each token sets by a gate (not in the paper).

    A head of D features is cut into blocks b of g features, where ``D / g`` is the last dimension of `write`. For each
    block, with the write gate z of the token:

    .. code-block:: text

        mass[n] = (1 - z) mass[n-1] + z                      z' = z / mass[n], 1 at the first token
        mean[n] = mean[n-1] + z' (w - mean[n-1])             weighted mean of the tokens up to n
        S[n]    = (1 - z') (S[n-1] + z' d d^T)               their covariance, d = w - mean[n-1]
        y[n]    = -(I + S[n])^{-1} (w - mean[n])

    This is the step of TSSA about the mean of a window: the negative gradient of ``log det(I + S) / 2`` in the token,
    up to its weight. Directions in which the window varies most are shrunk most. A gate near 1 restarts the window at
    this token, one near 0 leaves the statistics as they are. ``g = 1`` keeps a mean and a variance per feature; larger
    blocks also keep which features occur together, from which the operator recalls. Time is ``O(N H D g^2)``, the state
    has ``H (D (g+3)/2 + D/g)`` numbers. Statistics are held in float32, or in float64 for float64 tokens.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        write: Gates in [0, 1], ``[B, N, H, D / g]``.
        mask: Real tokens, bool ``[B, N]``. Padding anywhere leaves the statistics as they are; its output is 0.
        cu_seqlens: Cumulative lengths of packed sequences, as in `tssa`.
        segment_ids: The sequence of each token, as in `tssa`.
        backend: ``"auto"`` for the fastest that can run, or ``"native"``, ``"torch"``, ``"reference"``.

    Returns:
        y, ``[B, N, H, D]``, in the dtype of `w`.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device, or a gate lies outside [0, 1].
        BackendError: The requested backend cannot run this call; the message says why.

    Example:
        >>> import torch, tost
        >>> w, write = torch.randn(1, 10, 2, 8), torch.rand(1, 10, 2, 2)  # blocks of 4
        >>> tost.gated_tssa(w, write).shape
        torch.Size([1, 10, 2, 8])
    """
    packing = find_packing(w.shape[:2], cu_seqlens, segment_ids)
    return _gated(backend, packing, w, write, mask, None)[0]


def gated_tssa_with_state(
    w: Tensor,
    write: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    segment_ids: Tensor | None = None,
    state: GatedState | None = None,
    backend: str = "auto",
) -> tuple[Tensor, GatedState]:
    """Run `gated_tssa` on the next tokens of sequences, and return the state after them.

    Arguments are those of `gated_tssa`, except:

    Args:
        w: The next tokens, ``[B, N, H, D]``; N may be 0.
        write: Their gates, ``[B, N, H, D / g]``.
        state: The state after the tokens before; None at the start. With packed sequences it has S entries.

    Returns:
        y, ``[B, N, H, D]``, and the state after these tokens.

    Raises:
        ValueError: As `gated_tssa` does, or the state belongs to another batch or block size.
        BackendError: As `gated_tssa` does.
    """
    packing = find_packing(w.shape[:2], cu_seqlens, segment_ids)
    return _gated(backend, packing, w, write, mask, state)


def _gated(
    backend: str,
    packing: Packing | None,
    w: Tensor,
    write: Tensor,
    mask: Tensor | None,
    state: GatedState | None,
) -> tuple[Tensor, GatedState]:
    check_gated(w, write, mask, state, packing)
    run = SHARING[-1].gated_tssa if SHARING else run_gated
    return run(backend, packing, w, write, mask, state)


def run_gated(
    backend: str,
    packing: Packing | None,
    w: Tensor,
    write: Tensor,
    mask: Tensor | None,
    state: GatedState | None,
) -> tuple[Tensor, GatedState]:
    """Run the gated operator on the tokens of this process; return y and the state after them."""
    chosen = select("gated_tssa", backend, w)
    inputs = GatedInputs(w, write.to(statistics_dtype(w.dtype)), mask, *(state or (None, None))[:2])
    write, mass = relative_gates(inputs.in_one_row(packing), None if state is None else state.mass)
    y, mean, covariance = chosen.run(inputs.in_one_row(packing)._replace(write=write))
    tokens = num_tokens(w, mask) if packing is None else packing.num_tokens(mask)
    position = tokens if state is None else state.position + tokens
    return y.to(w.dtype).reshape(w.shape), GatedState(mean, covariance, mass, position)


def _inputs(
    form: Form,
    w: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | Packing | None,
    segment_ids: Tensor | None,
) -> Inputs:
    check_tokens(w)
    check_temperature(temperature, w)
    check_mask(mask, w)
    check_block_size(form.block_size, w)
    packing = find_packing(w.shape[:2], cu_seqlens, segment_ids)
    check_packing(packing, w)
    return Inputs(w, temperature, mask).in_one_row(packing)


def _causal(
    backend: str, packing: Packing | None, *given: *CausalArguments, overwrite: bool = False
) -> tuple[Tensor, TSSAState]:
    run = SHARING[-1].causal_tssa if SHARING else run_causal
    return run(backend, packing, *given, overwrite=overwrite)


def run_causal(
    backend: str, packing: Packing | None, *given: *CausalArguments, overwrite: bool = False
) -> tuple[Tensor, TSSAState]:
    """Run the causal operator on the tokens of this process; return y and the state after them."""
    check_causal(packing, *given)
    w, temperature, bias, mask, state = given
    chosen, inputs = select("causal_tssa", backend, w), causal_inputs(packing, *given)
    run = _inplace(chosen, inputs, w, temperature, bias, *(state or ())) if overwrite else chosen.run
    sums: Sums
    y, sums = run(inputs)
    tokens = num_tokens(w, mask) if packing is None else packing.num_tokens(mask)
    after = TSSAState(*sums, tokens if state is None else state.position + tokens)
    return y if packing is None else y.reshape(w.shape), after


def _inplace(chosen: Implementation, inputs: Inputs, *tensors: Tensor | None) -> Callable[..., Any]:
    """Return the in-place form of an implementation; the other one where the first of the `tensors`, w, is needed."""
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if recorded or chosen.run_inplace is None or torch.compiler.is_compiling() or is_transformed():
        return chosen.run
    return chosen.run_inplace if inputs.w.is_contiguous() else chosen.run
