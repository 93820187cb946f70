"""Both operators as pure functions of JAX arrays, for programs in JAX and for TPUs.

They are `tost.tssa` and `tost.causal_tssa` in plain ``jax.numpy``: equal to the reference in values and gradients, to
be used with ``jax.jit``, ``jax.grad`` and ``jax.vmap``. Running sums are associative scans, so the causal operator
takes log N steps. Sequences are not packed here. Needs the extra ``jax``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import torch
from jax import Array

from tost import ops
from tost.ops._blocks import Layout, matrices
from tost.ops._numerics import MASS_FLOOR, PREFIX_FLOOR, SQUARE_FLOOR
from tost.ops.form import Form, OperatorKeywords
from tost.ops.state import sum_shapes

__all__ = ["TSSAState", "causal_tssa", "causal_tssa_with_state", "tssa"]


class TSSAState(NamedTuple):
    """The state of causal TSSA, as in `tost.TSSAState`, with JAX arrays in it: a pytree.

    Attributes:
        squares: ``sum_n w_n^2``, shape ``[B, H, D]``; what comes after them is as in `tost.TSSAState`, and so below.
        weighted_squares: ``sum_n pi_n w_n^2``, shape ``[B, H, D]``, or packed products ``[B, H, D(g+1)/2]``.
        mass: ``sum_n pi_n``, shape ``[B, H]``; with decays per channel ``[B, H, D / g]``.
        position: Number of tokens seen, padding not counted, shape ``[B]``, int32.
    """

    squares: Array
    weighted_squares: Array
    mass: Array
    position: Array

    @classmethod
    def empty(cls, *sizes: int, dtype: jax.typing.DTypeLike = jnp.float32, **options: Any) -> TSSAState:
        """Return the state before the first token: all zeros; arguments are those of `tost.TSSAState.empty`."""
        *sums, position = ops.TSSAState.empty(*sizes, **options, device="meta")
        squares, weighted, mass = (jnp.zeros(x.shape, dtype) for x in sums)
        return cls(squares, weighted, mass, jnp.zeros(position.shape, jnp.int32))


def tssa(
    w: Array,
    temperature: Array,
    *,
    mask: Array | None = None,
    normalize: bool = True,
    **options: Unpack[OperatorKeywords],
) -> Array:
    """Run `tost.tssa` on JAX arrays; arguments and result are those of `tost.tssa`.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: Multiplier of each head's energy, ``[H]``.
        mask: Real tokens, bool ``[B, N]``.
        normalize: Divide the squares of each feature by their sum over the tokens.
        **options: Options of the operator, as in `tost.tssa`.

    Returns:
        y, ``[B, N, H, D]``, in the dtype of `w`.

    Raises:
        ValueError: An argument has the wrong shape or dtype.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tost.integrations.jax import tssa
        >>> w = jax.random.normal(jax.random.key(0), (1, 10, 2, 4))
        >>> jax.jit(tssa)(w, jnp.ones(2)).shape
        (1, 10, 2, 4)
    """
    form = Form(**options, normalize=normalize, token_decay=False, channel_decay=False)
    _check_tokens(w, temperature, mask, form.block_size)
    x = _real(w, mask)
    share = x
    if form.normalize:
        # By the norm, not by its square: the derivative of 1 / 1e-24 would leave float32.
        share = x / jnp.sqrt(jnp.maximum(jnp.square(x).sum(axis=1, keepdims=True), SQUARE_FLOOR))
    energy = jnp.square(share).sum(axis=-1)
    if form.count_scaled:
        energy = energy * (w.shape[1] if mask is None else mask.sum(axis=1)[:, None, None])
    pi = _memberships(temperature.astype(x.dtype) * energy, mask)
    mass = pi.sum(axis=1, keepdims=True) + MASS_FLOOR
    if form.centered:
        x = x - (pi * x).sum(axis=1, keepdims=True) / mass
    moment = (pi * _products(x, form.block_size)).sum(axis=1, keepdims=True) / mass
    return _shrunk(-pi * x, moment, form.block_size).astype(w.dtype)


class CausalKeywords(OperatorKeywords, total=False):
    """Keyword arguments of `causal_tssa`."""

    mask: Array | None
    decay: Array | None


def causal_tssa(w: Array, temperature: Array, bias: Array | None = None, **options: Unpack[CausalKeywords]) -> Array:
    """Run `tost.causal_tssa` on JAX arrays; arguments and result are those of `causal_tssa_with_state`."""
    y, _ = causal_tssa_with_state(w, temperature, bias, state=None, **options)
    return y


def causal_tssa_with_state(
    w: Array,
    temperature: Array,
    bias: Array | None = None,
    *,
    mask: Array | None = None,
    state: TSSAState | None = None,
    decay: Array | None = None,
    **options: Unpack[OperatorKeywords],
) -> tuple[Array, TSSAState]:
    """Run `tost.causal_tssa_with_state` on JAX arrays.

    Values are not looked at, since they may be traced: a position beyond the table of biases gives NaN, and a decay
    that keeps no share of the sums is not noticed.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: Multiplier of each head's energy, ``[H]``.
        bias: By head and position, ``[H, L]``; or that of every token, ``[B, N, H]`` or ``[1, N, H]``.
        mask: Real tokens, bool ``[B, N]``.
        state: The state after the tokens before `w`; None at the start of a sequence.
        decay: What the sums of each head are multiplied by before a token is added, ``[H]`` in (0, 1]; or from the
            data, ``[B, N, H]`` or ``[B, N, H, D / g]`` in [0, 1].
        **options: Options of the operator, as in `tost.causal_tssa`.

    Returns:
        y, ``[B, N, H, D]``, in the dtype of `w`, and the state after these tokens.

    Raises:
        ValueError: An argument has the wrong shape or dtype.
    """
    axes = 0 if decay is None else decay.ndim
    form = Form(**options, normalize=True, token_decay=axes > 1, channel_decay=axes > 3)
    block_size, centered = form.block_size, form.centered
    _check_tokens(w, temperature, mask, block_size)
    _check_causal(w, bias, mask, state, decay, form)
    (B, N, H, D), layout = w.shape, Layout(w.shape[-1], form, torch.device("cpu"))
    x = _real(w, mask)
    temperature, bias, decay = (None if z is None else z.astype(x.dtype) for z in (temperature, bias, decay))
    if state is None:
        kept = {"channel_decay": form.channel_decay, "counted": form.counted}
        state = TSSAState.empty(B, H, D, block_size=block_size, centered=centered, **kept, dtype=x.dtype)
    tokens = N if mask is None else mask.sum(axis=1, dtype=state.position.dtype)
    index = jnp.arange(N)[None] if mask is None else mask.cumsum(axis=1) - 1
    index = state.position[:, None] + jnp.where(True if mask is None else mask, index, 0)
    factor = None if decay is None else _factor(decay, mask)
    summed = jnp.square(x)
    if form.counted:
        ones = _real(jnp.ones((B, N, H, layout.num_masses), x.dtype), mask)
        summed = jnp.concatenate((summed, ones), axis=-1)
    squares, squares_after = _running(summed, state.squares, factor, layout.squares)
    share = jnp.square(x) / jnp.maximum(squares[..., :D], PREFIX_FLOOR)
    if form.counted:
        share = share * _spread(squares[..., D:], layout.features)
    energy = share.sum(axis=-1)
    if form.count_scaled and not form.counted:
        energy = energy * ((index + 1)[..., None] if decay is None else _effective_count(decay, index + 1))
    if bias is not None:
        each = bias if bias.ndim == 3 else jnp.take(bias.T, index, axis=0, mode="fill", fill_value=jnp.nan)
        energy = energy + D * _real(each, mask)
    pi = _memberships(temperature * energy, mask)
    parts = _products(x, block_size)
    if centered:
        parts = jnp.concatenate((parts, x), axis=-1)
    weighted, weighted_after = _running(pi * parts, state.weighted_squares, factor, layout.weighted)
    weights = jnp.broadcast_to(pi, (B, N, H, layout.num_masses))
    mass, mass_after = _running(weights, state.mass.reshape(B, H, layout.num_masses), factor)
    moment = weighted / _spread(mass + MASS_FLOOR, layout.weighted)
    if centered:
        moment, mean = moment[..., :-D], moment[..., -D:]
        moment, x = moment - _products(mean, block_size), x - mean
        moment = jnp.maximum(moment, 0) if block_size == 1 else moment
    y = _shrunk(-pi * x, moment, block_size).astype(w.dtype)
    after = TSSAState(squares_after, weighted_after, mass_after.reshape(state.mass.shape), state.position + tokens)
    return y, after


def _real(x: Array, mask: Array | None) -> Array:
    """Return x [B, N, ...] in the dtype of the statistics, 0 where the mask is False, with no gradient to it."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x if mask is None else jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - 2)), x, 0)


def _memberships(logits: Array, mask: Array | None) -> Array:
    """Return pi, [B, N, H, 1]."""
    return _real(jax.nn.softmax(logits, axis=-1), mask)[..., None]


def _factor(decay: Array, mask: Array | None) -> Array:
    """Return what a token multiplies the sums before it with, [B or 1, N or 1, H, 1 or K]."""
    factor = decay[None, None] if decay.ndim == 1 else decay
    factor = factor if factor.ndim == 4 else factor[..., None]
    return factor if mask is None else jnp.where(mask[..., None, None], factor, 1)


def _spread(x: Array, places: torch.Tensor | None) -> Array:
    """Return x [..., K] for each number in a sum, [..., F], as `Layout.spread` does."""
    return x if places is None else x[..., places.numpy()]


def _running(x: Array, before: Array, factor: Array | None, places: torch.Tensor | None = None) -> tuple[Array, Array]:
    """Return the sums of x [B, N, H, F] up to every token, after those before [B, H, F], and after the last token.

    `places` are the factors [..., K] of the numbers in a sum; None if factors broadcast.
    """
    if x.shape[1] == 0:
        return x, before
    if factor is None:
        total = before[:, None] + jnp.cumsum(x, axis=1)
    else:
        factor = _spread(factor, places)
        factors = jnp.broadcast_to(factor, (*x.shape[:3], factor.shape[-1]))
        faded, total = jax.lax.associative_scan(_fade_and_add, (factors, x), axis=1)
        total = total + faded * before[:, None]
    return total, total[:, -1]


def _fade_and_add(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    return one[0] * other[0], one[1] * other[0] + other[1]


def _effective_count(decay: Array, count: Array) -> Array:
    """Return ``sum_{k < t} decay^k`` for integers t [...], [..., H], by doubling: nothing is subtracted or divided."""
    power = jnp.ones((*count.shape, *decay.shape), decay.dtype)

    def double(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        power, total = carry
        odd = (count[..., None] >> (30 - i)) & 1 == 1
        power, total = power * power, total + power * total
        return jnp.where(odd, power * decay, power), jnp.where(odd, 1 + decay * total, total)

    _, total = jax.lax.fori_loop(0, 31, double, (power, jnp.zeros_like(power)))
    return total


def _products(x: Array, block_size: int) -> Array:
    """Return the products of features of one block, [..., D(g+1)/2], in the order of `tost.TSSAState`."""
    # Sizes are written out: JAX does not infer one from no tokens.
    rows, K = x.shape[:-1], x.shape[-1] // block_size
    blocks = x.reshape(*rows, K, block_size)
    pairs = [blocks[..., : block_size - k] * blocks[..., k:] for k in range(block_size)]
    return jnp.concatenate([pair.reshape(*rows, K * (block_size - k)) for k, pair in enumerate(pairs)], axis=-1)


def _shrunk(v: Array, moment: Array, block_size: int) -> Array:
    """Return v [B, N, H, D] over 1 + moment; in blocks, (I + S_b)^{-1} v_b."""
    if block_size == 1:
        return v / (1 + moment)
    places = matrices(torch.arange(moment.shape[-1]), v.shape[-1], block_size).numpy()
    blocks = jnp.eye(block_size, dtype=v.dtype) + moment[..., places]
    return jnp.linalg.solve(blocks, v.reshape(*v.shape[:-1], *places.shape[:2], 1)).reshape(v.shape)


def _check_tokens(w: Array, temperature: Array, mask: Array | None, block_size: int) -> None:
    if w.ndim != 4 or 0 in w.shape[2:] or not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(
            f"w has shape {w.shape} and dtype {w.dtype}; TSSA needs projected tokens [B, N, H, D] of floating point "
            "numbers, with at least one head and one feature."
        )
    B, N, H, D = w.shape
    _check_shape("temperature", temperature, [(H,)], jnp.floating)
    _check_shape("mask", mask, [(B, N)], jnp.bool_)
    if block_size < 1 or D % block_size:
        raise ValueError(f"block_size is {block_size}; the {D} features of a head need one that divides {D}.")


def _check_causal(
    w: Array,
    bias: Array | None,
    mask: Array | None,
    state: TSSAState | None,
    decay: Array | None,
    form: Form,
) -> None:
    B, N, H, D = w.shape
    _check_shape("decay", decay, [(H,), (B, N, H), (B, N, H, D // form.block_size)], jnp.floating)
    if bias is not None:
        # Padding needs no bias, so that with a mask the table may be shorter than the rows.
        table = [(H, bias.shape[1] if mask is not None else max(N, bias.shape[1]))] if bias.ndim == 2 else []
        _check_shape("bias", bias, [*table, (B, N, H), (1, N, H)], jnp.floating)
    if state is not None:
        for name, shape in zip(TSSAState._fields[:3], sum_shapes(B, H, D, form), strict=True):
            _check_shape(f"state.{name}", getattr(state, name), [shape], jnp.floating)
        _check_shape("state.position", state.position, [(B,)], jnp.integer)


def _check_shape(name: str, x: Array | None, shapes: list[tuple[int, ...]], kind: type) -> None:
    """Refuse an array of another shape or kind of numbers."""
    if x is None or (x.shape in shapes and jnp.issubdtype(x.dtype, kind)):
        return
    wanted = " or ".join(map(str, shapes))
    raise ValueError(f"{name} has shape {x.shape} and dtype {x.dtype}; it needs {wanted} of kind {kind.__name__}.")
