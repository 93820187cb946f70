"""A tour of the operator: what it computes, why it streams, what it costs. Ends with a table and a picture.

python examples/operator_tour.py --out demo
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import tost
from tost.bench.harness.timing import Trial, interleave, spread
from tost.bench.ops.cases import Case
from tost.bench.ops.contenders import SoftmaxAttention

WIDTH, HEADS = 384, 8


def compare(claim: str, a: Tensor, b: Tensor, bound: float) -> None:
    difference = (a - b).abs().max().item()
    print(f"{claim:<76} largest difference {difference:.1e}", flush=True)
    if not difference <= bound:
        raise SystemExit(f"this should be at most {bound:.0e}: please report it, with the output of `tost info`")


def subspaces(width: int, heads: int, head_width: int) -> Tensor:
    """Orthonormal bases of `heads` subspaces that are orthogonal to each other, as [H, C, D]."""
    basis = torch.linalg.qr(torch.randn(width, heads * head_width, dtype=torch.float64)).Q
    return basis.reshape(width, heads, head_width).transpose(0, 1)


def gradient_step() -> None:
    z, u = torch.randn(64, 32, dtype=torch.float64, requires_grad=True), subspaces(32, 4, 8)
    w, temperature = torch.einsum("nc,hcd->nhd", z, u)[None], torch.ones(4, dtype=torch.float64)
    step = torch.einsum("nhd,hcd->nc", tost.tssa(w, temperature)[0], u)
    pi = tost.membership(w, temperature)[0].detach()
    # eps^2 = C makes the constant C / eps^2 of the coding rate 1, as in the operator.
    tost.objective.variational_compression(z, pi, u, z.shape[1] ** 0.5).backward()
    compare("TSSA with tied projections is -n times the gradient of the objective", step, -len(z) * z.grad, 1e-6)


def stream(tokens: int = 2048, chunk: int = 300) -> None:
    w, temperature = torch.randn(1, tokens, HEADS, WIDTH // HEADS), torch.ones(HEADS)
    whole = tost.causal_tssa(w, temperature)
    state, pieces = None, []
    for piece in w.split(chunk, dim=1):
        y, state = tost.causal_tssa_with_state(piece, temperature, state=state)
        pieces.append(y)
    compare(f"a causal sequence of {tokens} tokens can be fed in chunks of {chunk}", torch.cat(pieces, 1), whole, 1e-4)
    state, steps = tost.TSSAState.empty(1, HEADS, WIDTH // HEADS), []
    for token in w.unbind(dim=1):
        y, state = tost.causal_tssa_step(token, temperature, state=state)
        steps.append(y)
    size = sum(part.numel() for part in state[:3])
    compare(f"or token by token, from {size} numbers of state at any length", torch.stack(steps, 1), whole, 1e-4)


def mask_is_deletion() -> None:
    w, temperature, mask = torch.randn(1, 200, HEADS, 16), torch.ones(HEADS), torch.rand(1, 200) < 0.7
    masked, deleted = tost.tssa(w, temperature, mask=mask)[mask], tost.tssa(w[mask][None], temperature)[0]
    compare("a masked token is as good as deleted", masked, deleted, 1e-5)


def soft_clusters(tokens: int = 96, groups: int = 4) -> Tensor:
    """Memberships of noisy tokens that are drawn, segment by segment, from different subspaces."""
    u, label = subspaces(64, groups, 8), torch.arange(tokens) // 8 % groups
    z = torch.einsum("nd,ncd->nc", torch.randn(tokens, 8, dtype=torch.float64), u[label])
    w = torch.einsum("nc,hcd->nhd", z + 0.2 * torch.randn_like(z), u)[None]
    pi = tost.membership(w, torch.full((groups,), 12.0, dtype=torch.float64))[0]
    print(f"memberships find the subspace of {(pi.argmax(1) == label).sum()} of {tokens} tokens")
    return pi


@torch.inference_mode()
def measure(lengths: list[int], repeats: int = 5) -> list[tuple[float, float]]:
    """Median milliseconds of one layer; the two contenders take turns."""
    softmax = SoftmaxAttention(Case(op="tssa", batch=1, tokens=1, width=WIDTH, heads=HEADS))
    layers = {"tssa": tost.TSSAttention(WIDTH, HEADS), "softmax": softmax}
    medians: list[tuple[float, float]] = []
    print(f"\n{'tokens':>8} {'tssa ms':>10} {'softmax ms':>11} {'ratio':>7}")
    for length in lengths:
        x = torch.randn(1, length, WIDTH)
        trials = {name: Trial(run=lambda f=f, x=x: f(x), reset=lambda: None) for name, f in layers.items()}
        rounds = interleave(trials, repeats=dict.fromkeys(trials, repeats + 2))[2:]  # the first two only warm up
        ours, theirs = (1e3 * spread([seconds[name] for seconds in rounds]).median for name in layers)
        medians.append((ours, theirs))
        print(f"{length:>8} {ours:>10.2f} {theirs:>11.2f} {theirs / ours:>6.1f}x", flush=True)
    return medians


def draw(path: Path, lengths: list[int], medians: list[tuple[float, float]], pi: Tensor) -> None:
    left, right = (figure := Figure(figsize=(11, 4), layout="constrained")).subplots(1, 2)
    for name, milliseconds in zip(("tssa", "softmax"), zip(*medians, strict=True), strict=True):
        left.loglog(lengths, milliseconds, "o-", label=name)
    left.set(xlabel="tokens", ylabel="milliseconds per layer", title=f"forward, width {WIDTH}, {HEADS} heads")
    left.set_xticks(lengths, [str(length) for length in lengths])
    left.minorticks_off()
    left.legend()
    figure.colorbar(right.imshow(pi.T, aspect="auto", vmin=0, vmax=1, interpolation="nearest"), label="membership")
    right.set(xlabel="token", ylabel="head", yticks=range(pi.shape[1]), title="soft clusters of a mixed sequence")
    figure.savefig(path, dpi=150)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the picture")
parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], help="tokens to time")
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
gradient_step()
stream()
mask_is_deletion()
memberships = soft_clusters()
draw(options.out / "operator_tour.png", options.lengths, measure(options.lengths), memberships)
print(f"\npicture: {options.out / 'operator_tour.png'}")
