"""Steps on devices that are no CPU: `meta`, whose tensors have a shape but no numbers, and a GPU that is not there.

Tensors that were left on the CPU, or a number that is asked for in the middle of a step, are errors there.
"""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.tiny import LANGUAGE_VARIANTS, VISION_VARIANTS, distinct, example, make_tiny
from tost.models.mixers import list_mixers

# Operators without a deterministic form on CUDA, from the page of `torch.use_deterministic_algorithms`. Cumulative sums
# are listed for floating point numbers only.
REFUSED = (
    "adaptive_avg_pool2d_backward",
    "adaptive_max_pool2d_backward",
    "avg_pool3d_backward",
    "bincount",
    "cumprod",
    "cumsum",
    "grid_sampler_2d_backward",
    "histc",
    "kthvalue",
    "logcumsumexp",
    "median",
    "put_",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "upsample_",
)


class Refusal(TorchDispatchMode):
    """Fails where torch would in deterministic mode on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        exact = isinstance(out, torch.Tensor) and not out.is_floating_point()
        assert exact or not name.lstrip("_").startswith(REFUSED), f"{name} is not deterministic on CUDA"
        return out


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


STEPS = [
    *((name, {}, ()) for name in distinct()),
    *(("lra_listops", {"mixer": m, "num_heads": 2}, pytest.mark.slow) for m in list_mixers(place="sequence")),
    *(("tost_lm_base", {"mixer": mixer, "num_heads": 2}, ()) for mixer in list_mixers(place="language")),
    *(("tost_lm_base", options, ()) for options in LANGUAGE_VARIANTS.values()),
    *(("tost_small_patch16_224", options, ()) for options in VISION_VARIANTS.values()),
]


@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(name, options, marks=m, id=f"{name} {options}") for name, options, m in STEPS]
)
def test_a_deterministic_step_with_clipped_gradients(deterministic, name, options):
    with torch.device("meta"):
        model = make_tiny(name, **options)
        x = example(model, length=24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Refusal():
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert all(p.grad is None or p.grad.is_meta for p in model.parameters())
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("words", [["plain"], pytest.param([], marks=pytest.mark.slow, id="all")])
def test_steps_on_a_gpu_that_is_not_there(words):
    command = [sys.executable, "-m", "tests.models.fake_gpu", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
