"""The step without modules, and the one in the native library, are the step of the model; or they say why not."""

import itertools
import re
from dataclasses import dataclass

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.generation.models import make, prompts
from tost import nn as tost_nn
from tost.generation import decode_step, prefill
from tost.generation.flat import FlatStep, flat_obstacles
from tost.generation.native import NativeStep, native_obstacles
from tost.generation.prompts import align_prompts
from tost.generation.step import make_step
from tost.models import LanguageOptions
from tost.testing import assert_close

OPTIONS = {
    "endless": {"position": "none"},
    "waves": {"position": "sinusoidal"},
    "hold": {"after_last_position": "repeat", "max_length": 6},
    "biases": {"bias": True},
    "free head": {"tie_head": False},
    "no layer scale": {"layer_scale": None},
    "narrow": {"mlp_ratio": 0.5, "num_heads": 1},
    "tanh": {"activation": "gelu_tanh"},
    "convolution": {"conv_width": 4},
    "convolution before the mlp": {"conv_width": 2, "conv_at": "mlp"},
    "both convolutions": {"conv_width": 3, "conv_at": "both", "conv_start": "previous"},
    "gate": {"gate": True},
    "head norm": {"head_norm": True},
    "count": {"count_scaled": True},
    "blocks": {"block_size": 2},
    "forgetting": {"forget": True},
    "centered": {"centered": True},
}
FROM_DATA = {
    "forgetting by head": {"forget": "head", "count_scaled": True},
    "forgetting by channel alone": {"forget": "channel"},
    "all at once": {
        **{"forget": "channel", "centered": True, "head_norm": True, "gate": True, "unit_variance": True},
        **{"count_scaled": True, "conv_width": 4, "embed_dim": 32, "num_heads": 2, "block_size": 8, "position": "none"},
    },
    "fixed forgetting about means": {"forget": True, "centered": True, "count_scaled": True, "block_size": 2},
    "forgetting by channel": {"forget": "channel", "count_scaled": True, "block_size": 2, "centered": True},
}
GATED = {
    "gated means": {"mixer": "gated_tssa"},
    "gated means everywhere": {"mixer": "gated_tssa", "conv_width": 4, "conv_at": "both", "conv_start": "previous"},
    "minGRU": {"mixer": "mingru", "position": "none", "bias": True, "layer_scale": None},
}
ALONE = {"plain": {}, "reference": {"backend": "reference"}, **OPTIONS, **FROM_DATA}


def pairs():
    """Two options at a time, where they go together."""
    for (one, a), (other, b) in itertools.combinations(OPTIONS.items(), 2):
        if not a.keys() & b.keys() and not {"position", "after_last_position"} <= {*a, *b}:
            yield pytest.param({**a, **b}, id=f"{one}, {other}")


def check_step(model, step, bound):
    """Compare a step with the model's own, from the states of texts of different length."""
    ids, mask = align_prompts(prompts(12, 5, 9), vocab_size=11)
    before = prefill(model, ids[:, :-1], mask=mask[:, :-1])
    with torch.no_grad():
        found, after = step(ids[:, -1], before)
    expected, state = decode_step(model, ids[:, -1], before)
    assert_close("logits", found, expected, bound)
    assert after.position.tolist() == state.position.tolist() == [12, 5, 9]
    assert pytree.tree_structure(after) == pytree.tree_structure(state)
    for one, other in zip(pytree.tree_leaves(after), pytree.tree_leaves(state), strict=True):
        assert one.dtype == other.dtype
        assert_close("state", one.double(), other.double(), bound)


@pytest.mark.parametrize("options", [*ALONE.values(), *GATED.values()], ids=[*ALONE, *GATED])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_flat_step_is_the_model(options, dtype, bound):
    model = make(dtype, **options)
    assert flat_obstacles(model) == []
    check_step(model, FlatStep(model), bound)


@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
def test_native_step_is_the_model(options):
    model = make(torch.float32, **options)
    assert native_obstacles(model) == (["its backend is reference"] if "backend" in options else [])
    if "backend" not in options:
        check_step(model, NativeStep(model), 1e-5)


@pytest.mark.parametrize("options", list(pairs()))
def test_options_go_together(options):
    model = make(torch.float32, **options)
    check_step(model, FlatStep(model), 1e-5)
    check_step(model, NativeStep(model), 1e-5)


@pytest.mark.parametrize("options", GATED.values(), ids=GATED)
def test_gated_means_are_left_to_the_flat_step(options, monkeypatch):
    model, seen = make(torch.float32, **options), []
    assert native_obstacles(model) == ["its mixer is not TSSA"]
    monkeypatch.setattr(FlatStep, "__call__", lambda self, *given: seen.append(given) or (given[0], given[1]))
    before = prefill(model, prompts(5)[0].unsqueeze(0))
    make_step(model)(torch.tensor([1]), before)
    assert len(seen) == 1
    with pytest.raises(ValueError, match="the state is a"):  # one of another kind goes to the model, which refuses it
        make_step(make(torch.float32))(torch.tensor([1]), before)
    assert len(seen) == 1


class Strange(torch.nn.Linear):
    """A layer that somebody put in the place of another, as adapters are."""


def replace_mlp(model):
    model.blocks[1].mlp.proj_in = Strange(16, 64, bias=False)


def add_parameter(model):
    model.blocks[0].attention.register_parameter("mystery", torch.nn.Parameter(torch.zeros(1)))


def extend(model):
    @dataclass(frozen=True)
    class Later(tost_nn.Extensions):
        new: bool = False

    model.blocks[0].attention.extensions = Later(new=True)


def hook(model):
    model.blocks[0].norm1.register_forward_hook(lambda *args: None)


def head_bias(model):
    model.blocks[0].attention.position_bias_form = "head"


def post_norm(model):
    model.blocks[0].norm = "post"


def paper(model):
    model.blocks[0].attention.paper = tost_nn.PaperForm()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replace_mlp, "modules of type Strange"),
        (add_parameter, "parameters such as .*mystery"),
        (extend, "extensions that came later"),
        (hook, "hooks"),
        (head_bias, "bias per head"),
        (post_norm, "norms after"),
        (paper, "paper's form"),
    ],
)
def test_what_is_not_written_out_is_left_to_the_model(change, reason):
    model = make()
    change(model)
    assert re.search(reason, "; ".join(flat_obstacles(model)))


def test_options_that_came_later_are_left_to_the_model():
    class Later(LanguageOptions):
        """Options of a newer version."""

        forgetting: bool = False

    model = make()
    model.options = Later(**model.options.model_dump())
    assert flat_obstacles(model) == []
    model.options = model.options.model_copy(update={"forgetting": True})
    assert flat_obstacles(model) == ["the options forgetting are set"]


def test_autocast_and_shared_sequences_are_left_to_the_model(monkeypatch):
    model = make(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flat_obstacles(model) == ["autocast is on"]
    monkeypatch.setattr("tost.parallel.active", object)
    assert flat_obstacles(model) == ["sequences are shared between processes"]


def test_any_model_with_a_state_can_be_stepped():
    """A model of another kind, whose state is a nest of tensors."""

    class Counter(torch.nn.Module):
        options = LanguageOptions(embed_dim=4, depth=1, num_heads=1, vocab_size=7, position="none")

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward_with_state(self, ids, state=None, mask=None):
            total = ids.sum(dim=1) + (0 if state is None else state["total"][0])
            return torch.nn.functional.one_hot((total + 1) % 7, 7)[:, None].float(), {"total": (total,)}

    step = make_step(Counter())
    logits, state = step(torch.tensor([3]), None)
    logits, state = step(torch.tensor([2]), state)
    assert logits.argmax().item() == 6
