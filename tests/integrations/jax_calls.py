"""Calls of the operators in JAX, for a process of their own: JAX has threads, and a process with threads must not fork.

Arrays are numpy arrays on both sides.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tost.integrations.jax import TSSAState, causal_tssa, causal_tssa_with_state, tssa

SUMS = TSSAState._fields[:3]


def _results(call, given, cotangents):
    """Outputs of a call and the gradients of what it is given, by name."""
    inputs = {name: jnp.asarray(x) for name, x in given.items()}
    outputs, pull_back = jax.vjp(call, inputs)
    (gradients,) = pull_back({name: jnp.asarray(x) for name, x in zip(("y", *SUMS), cotangents, strict=False)})
    return {name: np.asarray(x) for name, x in (outputs | {f"d{name}": x for name, x in gradients.items()}).items()}


def run_tssa(given, cotangents, mask, options, *, double):
    with jax.enable_x64(double):
        call = jax.jit(lambda inputs: {"y": tssa(inputs["w"], inputs["temperature"], mask=mask, **options)})
        return _results(call, given, cotangents)


def run_causal(given, cotangents, mask, position, options, *, double):
    """The gradient of the position is left out: it has none."""

    @jax.jit
    def call(inputs):
        state = None
        if position is not None:
            state = TSSAState(*(inputs[name] for name in SUMS), jnp.asarray(position, jnp.int32))
        arguments = (inputs["w"], inputs["temperature"], inputs.get("bias"))
        y, after = causal_tssa_with_state(*arguments, mask=mask, state=state, decay=inputs.get("decay"), **options)
        return {"y": y, **{name: getattr(after, name) for name in SUMS}}

    with jax.enable_x64(double):
        return _results(call, given, cotangents)


def positions_after(w, mask, position):
    state = None
    if position is not None:
        state = TSSAState.empty(w.shape[0], *w.shape[2:])._replace(position=jnp.asarray(position, jnp.int32))
    _, after = causal_tssa_with_state(jnp.asarray(w), jnp.ones(w.shape[2]), mask=mask, state=state)
    return np.asarray(after.position), str(after.position.dtype)


def in_pieces(w, temperature, decay, length):
    """A sequence whole, and cut into pieces that a scan runs through."""
    w, temperature, decay = map(jnp.asarray, (w, temperature, decay))

    def piece(state, part):
        y, state = causal_tssa_with_state(part, temperature, state=state, count_scaled=True, decay=decay)
        return state, y

    B, N, H, D = w.shape
    parts = jnp.moveaxis(w.reshape(B, N // length, length, H, D), 1, 0)
    _, ys = jax.lax.scan(piece, TSSAState.empty(B, H, D), parts)
    whole = causal_tssa(w, temperature, count_scaled=True, decay=decay)
    return np.asarray(whole), np.asarray(jnp.moveaxis(ys, 0, 1).reshape(w.shape))


def message(name, changes):
    """What an operator says about wrong arguments; arrays of ones of given shapes and dtypes."""
    arguments = {"w": ((2, 3, 4, 6), "float32"), "temperature": ((4,), "float32")} | changes
    state = arguments.pop("state", None)
    given = {key: np.ones(*x) if isinstance(x, tuple) else x for key, x in arguments.items()}
    if state is not None:
        given["state"] = TSSAState.empty(*state)
    try:
        {"tssa": tssa, "causal_tssa": causal_tssa_with_state}[name](**given)
    except ValueError as error:
        return str(error)
    return ""


def beyond_the_table():
    """Outputs where the second of three tokens is the last one that the table of biases has an entry for."""
    state = TSSAState.empty(1, 2, 4)._replace(position=jnp.array([5], jnp.int32))
    y, _ = causal_tssa_with_state(jnp.ones((1, 3, 2, 4)), jnp.ones(2), jnp.ones((2, 7)), state=state)
    return np.isnan(np.asarray(y)).any(axis=(0, 2, 3)).tolist()


def run_page(text):
    """Run the Python blocks of a page."""
    from tests.test_docs import blocks

    namespace = {"__name__": "__main__"}
    found = [block for block in blocks(Path(text).read_text()) if block.language == "python"]
    for block in found:
        exec(block.text, namespace)
    return len(found)
