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
from tost.ops._inputs import GatedInputs, Inputs, Sums, causal_form, causal_inputs, empty_sums, relative_gates
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
    count_scaled: bool = False,
    block_size: int = 1,
    centered: bool = False,
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
        count_scaled: Multiply the energy by n, the number of real tokens of the sequence (not in the paper).
            Normalized energies sum to D over the tokens, so that memberships flatten as 1/n; scaled ones do not.
        block_size: Consecutive features in a block, g, which divides D (above 1 it is not in the paper). The moments of
            a block are a matrix, ``S_b = sum_n pi w_b w_b^T / sum_n pi``, and ``y_b = -pi (I + S_b)^{-1} w_b``: what
            features have in common over the tokens reaches each token. Time is ``O(N H D g)``.
        centered: Take the moments about the mean of the group (not in the paper): with ``mu = sum_n pi w / sum_n pi``
            and ``var = sum_n pi (w - mu)^2 / sum_n pi``, or in blocks the covariance for ``S_b``,
            ``y = -pi (w - mu) / (1 + var)``. Memberships stay as they are.
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
    form = Form(normalize=normalize, count_scaled=count_scaled, block_size=block_size, centered=centered)
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
    count_scaled: bool = False,
) -> Tensor:
    """Return the soft assignment of tokens to heads (groups) that `tssa` uses.

    Arguments are those of `tssa`. Memberships depend neither on `block_size` nor on `centered`.

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
    form = Form(normalize=normalize, count_scaled=count_scaled)
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
    count_scaled: bool = False,
    decay: Tensor | None = None,
    block_size: int = 1,
    centered: bool = False,
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
    or in float64 for float64 tokens. Gradients reach `w`, `temperature`, `bias` and `decay`, as those of `tssa` do.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: Multiplier of each head's energy, ``[H]``, of any sign.
        bias: Learned bias by head and position, ``[H, L]`` with ``L >= N``; or that of every token, ``[B, N, H]`` or
            ``[1, N, H]``, for rules of one's own about positions.
        mask: Real tokens, bool ``[B, N]``, with padding anywhere. Padding does not exist for the other tokens and
            does not advance their position; its output is 0.
        cu_seqlens: Cumulative lengths of packed sequences, as in `tssa`. Each starts at position 0.
        segment_ids: The sequence of each token, as in `tssa`.
        count_scaled: Multiply the share of the energy, not the bias, by the number of real tokens up to and including
            n (not in the paper): shares fall as 1/n, and with them the differences between memberships.
        decay: Forgetting, ``[H]`` in (0, 1] (not in the paper): before a token is added, each of the three sums of
            head h is multiplied by ``decay[h]``, so that statistics follow about the last ``1 / (1 - decay)`` tokens.
            1 forgets nothing. The count of `count_scaled` forgets too: ``1 + decay + decay^2 + ...``, n terms. From the
            data, each token may bring its own, in [0, 1]: ``[B, N, H]``, or for each block of features
            ``[B, N, H, D / g]``, which is per channel without blocks. The mass is then taken per block as well, and
            that of padding is not looked at.
        block_size: Consecutive features in a block, as in `tssa`, with ``S_b`` over the tokens up to n. The state has
            ``D(g+1)/2`` weighted products per head in place of D weighted squares.
        centered: Take the moments about the mean of the group, as in `tssa`, with ``mu`` and ``var`` over the tokens up
            to n. The state has D more numbers per head. The variance is found as ``E[w^2] - mu^2`` and held at 0 or
            above, so it has an error of about 1e-7 times ``mu^2`` in float32.
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
    form = causal_form(decay, count_scaled=count_scaled, block_size=block_size, centered=centered)
    return _causal(form, backend, packing, w, temperature, bias, mask, None, decay)[0]


def causal_tssa_with_state(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    segment_ids: Tensor | None = None,
    state: TSSAState | None = None,
    count_scaled: bool = False,
    decay: Tensor | None = None,
    block_size: int = 1,
    centered: bool = False,
    backend: str = "auto",
    overwrite: bool = False,
) -> tuple[Tensor, TSSAState]:
    """Run `causal_tssa` on the continuation of a sequence: state in, state out.

    A sequence may be cut anywhere; running the pieces one after the other gives the outputs and, as gradients flow
    through the state, the gradients of the whole. Use ``state.detach()`` between pieces to truncate them.

    Arguments are those of `causal_tssa`; a table of biases is indexed by the position in the whole sequence, and a
    decay ``[H]`` is the same for all pieces. There are two more:

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
    form = causal_form(decay, count_scaled=count_scaled, block_size=block_size, centered=centered)
    return _causal(form, backend, packing, w, temperature, bias, mask, state, decay, overwrite=overwrite)


def causal_tssa_step(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    state: TSSAState | None = None,
    count_scaled: bool = False,
    decay: Tensor | None = None,
    block_size: int = 1,
    centered: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, TSSAState]:
    """Advance every sequence by one token, at a cost that does not depend on how many came before.

    Arguments are those of `causal_tssa_with_state`, except:

    Args:
        w: One projected token per sequence, ``[B, H, D]``.
        decay: ``[H]``, or that of this token, ``[B, H]`` or ``[B, H, D / g]``.

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
    if decay is not None and decay.dim() > 1 and decay.shape[0] == w.shape[0]:
        decay = decay.unsqueeze(1)
    form = causal_form(decay, count_scaled=count_scaled, block_size=block_size, centered=centered)
    y, state = _causal(form, backend, None, w.unsqueeze(1), temperature, bias, None, state, decay)
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
    count_scaled: bool = False,
    decay: Tensor | None = None,
) -> Tensor:
    """Return the soft assignment of tokens to heads (groups) that `causal_tssa` uses.

    Arguments are those of `causal_tssa_with_state`. Memberships depend neither on `block_size` nor on `centered`; of a
    state they use the squares and the position.

    Returns:
        pi, ``[B, N, H]``, float32 or better. Rows of real tokens sum to 1, rows of padding are 0.

    Raises:
        ValueError: As `causal_tssa_with_state` does.
    """
    # A decay of blocks has one entry for each of them.
    block_size = max(1, w.shape[-1] // max(1, decay.shape[-1])) if decay is not None and decay.dim() == 4 else 1
    form = causal_form(decay, count_scaled=count_scaled, block_size=block_size)
    packing = find_packing(w.shape[:2], cu_seqlens, segment_ids)
    if state is not None:
        unused = empty_sums(w, form, state.squares.shape[0])
        state = state._replace(weighted_squares=unused.weighted_squares, mass=unused.mass)
    given = (w, temperature, bias, mask, state, decay)
    check_causal(form, packing, *given)
    return reference.causal_membership(causal_inputs(form, packing, *given), form).reshape(w.shape[:3])


def gated_tssa(
    w: Tensor,
    write: Tensor,
    share: Tensor,
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
        y[n]    = mean[n] - share (I + S[n])^{-1} (w - mean[n])

    The step is the gradient of ``log det(I + S)`` in the token, up to its weight: directions in which the window varies
    little are shrunk most. A gate near 1 restarts the window at this token, one near 0 leaves the statistics as they
    are. ``g = 1`` keeps a mean and a variance per feature; larger blocks also keep which features occur together, from
    which the operator recalls. Time is ``O(N H D g^2)``, the state has ``H (D (g+3)/2 + D/g)`` numbers. Statistics are
    held in float32, or in float64 for float64 tokens.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        write: Gates in [0, 1], ``[B, N, H, D / g]``.
        share: Weight of the step, ``[H, D]``.
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
        >>> tost.gated_tssa(w, write, torch.ones(2, 8)).shape
        torch.Size([1, 10, 2, 8])
    """
    packing = find_packing(w.shape[:2], cu_seqlens, segment_ids)
    return _gated(backend, packing, w, write, share, mask, None)[0]


def gated_tssa_with_state(
    w: Tensor,
    write: Tensor,
    share: Tensor,
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
        share: Weight of the step, ``[H, D]``.
        state: The state after the tokens before; None at the start. With packed sequences it has S entries.

    Returns:
        y, ``[B, N, H, D]``, and the state after these tokens.

    Raises:
        ValueError: As `gated_tssa` does, or the state belongs to another batch or block size.
        BackendError: As `gated_tssa` does.
    """
    packing = find_packing(w.shape[:2], cu_seqlens, segment_ids)
    return _gated(backend, packing, w, write, share, mask, state)


def _gated(
    backend: str,
    packing: Packing | None,
    w: Tensor,
    write: Tensor,
    share: Tensor,
    mask: Tensor | None,
    state: GatedState | None,
) -> tuple[Tensor, GatedState]:
    check_gated(w, write, share, mask, state, packing)
    run = SHARING[-1].gated_tssa if SHARING else run_gated
    mean, step, after = run(backend, packing, w, write, mask, state)
    y = torch.addcmul(mean, share.to(mean.dtype), step, value=-1)
    return y.to(w.dtype).reshape(w.shape), after


def run_gated(
    backend: str,
    packing: Packing | None,
    w: Tensor,
    write: Tensor,
    mask: Tensor | None,
    state: GatedState | None,
) -> tuple[Tensor, Tensor, GatedState]:
    """Return mean and step of the tokens of this process, and the state after them."""
    chosen = select("gated_tssa", backend, w)
    inputs = GatedInputs(w, write.to(statistics_dtype(w.dtype)), mask, *(state or (None, None))[:2])
    write, mass = relative_gates(inputs.in_one_row(packing), None if state is None else state.mass)
    mean, step, last, covariance = chosen.run(inputs.in_one_row(packing)._replace(write=write))
    tokens = num_tokens(w, mask) if packing is None else packing.num_tokens(mask)
    position = tokens if state is None else state.position + tokens
    return mean, step, GatedState(last, covariance, mass, position)


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
    form: Form, backend: str, packing: Packing | None, *given: *CausalArguments, overwrite: bool = False
) -> tuple[Tensor, TSSAState]:
    run = SHARING[-1].causal_tssa if SHARING else run_causal
    return run(form, backend, packing, *given, overwrite=overwrite)


def run_causal(
    form: Form, backend: str, packing: Packing | None, *given: *CausalArguments, overwrite: bool = False
) -> tuple[Tensor, TSSAState]:
    """Run the causal operator on the tokens of this process; return y and the state after them."""
    check_causal(form, packing, *given)
    w, temperature, bias, mask, state, decay = given
    chosen = select("causal_tssa", backend, w, form)
    inputs = causal_inputs(form, packing, *given)
    run = _inplace(chosen, inputs, w, temperature, bias, decay, *(state or ())) if overwrite else chosen.run
    sums: Sums
    y, sums = run(inputs, form)
    tokens = num_tokens(w, mask) if packing is None else packing.num_tokens(mask)
    after = TSSAState(*sums, tokens if state is None else state.position + tokens)
    return y if packing is None else y.reshape(w.shape), after


def _inplace(chosen: Implementation, inputs: Inputs, *tensors: Tensor | None) -> Callable[..., Any]:
    """Return the in-place form of an implementation; the other one where the first of the `tensors`, w, is needed."""
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if recorded or chosen.run_inplace is None or torch.compiler.is_compiling() or is_transformed():
        return chosen.run
    return chosen.run_inplace if inputs.w.is_contiguous() else chosen.run
