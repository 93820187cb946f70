"""The native step is the step of the model in any batch, width, thread count and instruction set, or says why not."""

import copy
import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import tost
from tests.generation.models import make, prompts, seeded
from tests.models.tiny import PLUS
from tost import nn as tost_nn
from tost.errors import ConfigError
from tost.generation import decode_step, prefill
from tost.generation.native import NativeStep, make_step, native_obstacles, pack_rows, step_bytes
from tost.generation.prompts import align_prompts
from tost.models import LanguageOptions
from tost.nn import ModelState
from tost.ops import TSSAState, select_isa
from tost.ops import _library as library
from tost.ops._library import compiled_isas
from tost.testing import assert_close

GATED = {**PLUS, "conv_width": 4, "position": "none"}

OPTIONS = {
    "endless": {"position": "none"},
    "waves": {"position": "sinusoidal"},
    "biases": {"bias": True},
    "free head": {"tie_head": False},
    "no layer scale": {"layer_scale": None},
    "narrow": {"mlp_ratio": 0.5, "num_heads": 2},
    "tanh": {"activation": "gelu_tanh"},
    "convolution": {"conv_width": 4},
    "convolution before the mlp": {"conv_width": 2, "conv_at": "mlp"},
    "both convolutions": {"conv_width": 3, "conv_at": "both", "conv_start": "previous"},
    "gated": PLUS,
}
ALONE = {
    "plain": {},
    **OPTIONS,
    "single features": {**PLUS, "mixer_options": {"block_size": 1}},
    "all at once": {**GATED, "embed_dim": 32, "num_heads": 2, "mixer_options": {"block_size": 8}, "bias": True},
    "large blocks": {**GATED, "embed_dim": 32, "num_heads": 2, "mixer_options": {"block_size": 16}},
}


def pairs():
    """Two options at a time, where they go together."""
    for (one, a), (other, b) in itertools.combinations(OPTIONS.items(), 2):
        if not a.keys() & b.keys():
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


@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
def test_native_step_is_the_model(options):
    model = make(torch.float32, **options)
    assert native_obstacles(model) == []
    check_step(model, NativeStep(model), 1e-5)


@pytest.mark.parametrize("options", list(pairs()))
def test_options_go_together(options):
    model = make(torch.float32, **options)
    check_step(model, NativeStep(model), 1e-5)


def test_every_option_of_the_models_is_known_to_these_tests():
    """A new option is compared above, or it is one of those that the modules and parameters show."""
    tried = {name for options in ALONE.values() for name in options}
    shown = {"depth", "vocab_size", "dropout", "gradient_checkpointing", "backend", "max_length"}
    assert set(LanguageOptions.model_fields) == tried | shown


class Strange(torch.nn.Linear):
    """A layer that somebody put in the place of another, as adapters are."""


class Packed(torch.Tensor):
    """Weights in a form of their own, such as those of quantization."""


def replace_forward(block):
    block.mlp.forward = lambda x: 0 * x


def negate(block):
    block.mlp.proj_in.weight = torch.nn.Parameter(torch._neg_view(-block.mlp.proj_in.weight.detach()))


def hook_that_acts(block):
    block.mlp.register_forward_hook(lambda module, inputs, y: -2 * y)


CHANGES = {
    "modules of type Strange": lambda block: setattr(block.mlp, "proj_in", Strange(16, 64, bias=False)),
    "parameters such as .*mystery": lambda block: block.attention.register_parameter(
        "mystery", torch.nn.Parameter(torch.zeros(1))
    ),
    "several kinds of attention": lambda block: setattr(block, "attention", tost_nn.GatedTSSAttention(16, 2)),
    "has hooks": lambda block: block.norm1.register_forward_hook(lambda *args: None),
    "or another forward": replace_forward,
    "are no plain": lambda block: setattr(
        block.mlp.proj_in, "weight", torch.nn.Parameter(block.mlp.proj_in.weight.detach().as_subclass(Packed))
    ),
    "no plain tensors": negate,
    "not on a CPU": lambda block: block.mlp.proj_in.to("meta"),
    "bias per head": lambda block: setattr(block.attention, "position_bias_form", "head"),
    "norms after": lambda block: setattr(block, "norm", "post"),
    "paper's form": lambda block: setattr(block.attention, "paper", tost_nn.PaperForm()),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_other_parts_are_left_to_the_model(reason):
    model = make(torch.float32)
    CHANGES[reason](model.blocks[0])
    assert re.search(reason, "; ".join(native_obstacles(model)))


def greedy(model):
    return tost.generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=6, temperature=0)


@pytest.mark.parametrize("change", [hook_that_acts, replace_forward, negate], ids=lambda change: change.__name__)
def test_a_changed_model_generates_as_it_computes(change):
    model = make(torch.float32)
    change(model.blocks[0])
    ids = torch.tensor([[1, 2, 3]])
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(greedy(model), ids)


def test_global_hooks_are_called():
    model, seen = make(torch.float32), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        assert native_obstacles(model) == ["a module has hooks or another forward"]
        greedy(model)
    finally:
        handle.remove()
    assert seen.count(tost_nn.MLP) == 2 * (1 + 6)  # two layers: the prompt once, then every token


def test_autocast_and_shared_sequences_are_left_to_the_model(monkeypatch):
    model = make(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert native_obstacles(model) == ["autocast is on"]
    monkeypatch.setattr("tost.parallel.active", object)
    assert native_obstacles(model) == ["sequences are shared between processes"]


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


def step_both(model, count, weights="fp32", length=6):
    """Return what the native step and the model give for a batch."""
    ids = torch.stack(prompts(*[length] * count))
    before = prefill(model, ids[:, :-1])
    step = NativeStep(model, weights)
    assert step.fits(ids[:, -1], before)
    with torch.no_grad():
        return step(ids[:, -1], before), decode_step(model, ids[:, -1], before)


@given(
    st.integers(1, 19),
    st.sampled_from([(4, 1), (12, 3), (16, 2), (20, 4), (36, 2), (72, 4), (132, 1)]),
    st.sampled_from([None, 1, 2, 4, 12]),
)
@settings(max_examples=25, deadline=None)
def test_any_batch_and_any_width(count, sizes, features):
    head_dim = sizes[0] // sizes[1]
    options = {**GATED, "mixer_options": {"block_size": math.gcd(head_dim, features)}} if features else {}
    model = make(torch.float32, embed_dim=sizes[0], num_heads=sizes[1], depth=1, **options)
    (found, after), (expected, state) = step_both(model, count)
    assert_close("logits", found, expected, 1e-5)
    for one, other in zip(pytree.tree_leaves(after), pytree.tree_leaves(state), strict=True):
        assert_close("state", one.double(), other.double(), 1e-5)


@pytest.mark.parametrize("options", [{}, {**GATED, "mixer_options": {"block_size": 3}}], ids=["paper", "gated"])
def test_threads_change_nothing(options):
    # Widths for which the shares of threads differ, with a rest that no block takes.
    model = make(torch.float32, embed_dim=36, vocab_size=75, **options)
    threads = torch.get_num_threads()
    ids = torch.stack(prompts(6, 6, 6))
    before, step = prefill(model, ids[:, :-1]), NativeStep(model)
    try:
        results = []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            results.append(pytree.tree_leaves(step(ids[:, -1], before)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@torch.no_grad()
def round_weights(model, weights):
    """Round the matrices in place; tokens are looked up as they are."""
    model.head = torch.nn.Linear(model.tokens.embedding_dim, model.tokens.num_embeddings, bias=False)
    model.head.weight.copy_(model.tokens.weight)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            packed, scale = pack_rows(module.weight, weights)
            module.weight.copy_(packed if scale is None else packed * scale.unsqueeze(1))


@pytest.mark.parametrize("isa", compiled_isas())
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("g", [None, 1, 2, 8, 16])
def test_every_instruction_set(isa, weights, g):
    try:
        select_isa(isa)
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        options = {} if g is None else {**GATED, "mixer_options": {"block_size": g}}
        model = make(torch.float32, embed_dim=96, num_heads=2, **options)
        rounded = copy.deepcopy(model)
        round_weights(rounded, weights)
        (found, _), _ = step_both(model, 3, weights)
        ids = torch.stack(prompts(6, 6, 6))
        before = prefill(model, ids[:, :-1])  # the prompt is read with the weights as they are
        assert_close("logits", found, decode_step(rounded, ids[:, -1], before)[0], 1e-5)
    finally:
        select_isa("auto")


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 1000))
@settings(max_examples=30)
def test_packing_rounds_to_the_nearest(rows, columns, seed):
    weight = torch.randn(rows, columns, generator=seeded(seed)) * torch.rand(rows, 1, generator=seeded(seed)).exp()
    assert torch.equal(pack_rows(weight, "fp32")[0], weight)
    assert torch.equal(pack_rows(weight, "bf16")[0], weight.bfloat16())
    packed, scale = pack_rows(weight, "int8")
    assert ((packed * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()
    assert (packed.abs().amax(dim=1) == 127).all()


@pytest.mark.parametrize(("weights", "bound"), [("bf16", 2e-2), ("int8", 5e-2)])
def test_a_text_with_rounded_weights(weights, bound):
    model, ids = make(torch.float32), torch.stack(prompts(9, 9))
    (found, _), (expected, _) = step_both(model, 2, weights)
    assert 0 < (found - expected).norm() / expected.norm() < bound
    text = tost.generate(model, ids, max_new_tokens=8, temperature=0, weights=weights)
    assert text.shape == (2, 17)


def test_weights_that_cannot_be_had_are_refused():
    with pytest.raises(ConfigError, match="weights='int8' cannot be used: its parameters are not all float32"):
        tost.generate(make(torch.float64), torch.tensor([[1]]), max_new_tokens=1, weights="int8")
    with pytest.raises(ConfigError, match="weights='int4' cannot be used: it takes one of fp32, bf16, int8"):
        tost.generate(make(torch.float32), torch.tensor([[1]]), max_new_tokens=1, weights="int4")
    with pytest.raises(ConfigError, match="it has modules of type CausalSoftmaxAttention"):
        make_step(make(torch.float32, mixer="softmax", layer_scale=None), "bf16")


def test_an_old_library_is_left_alone(monkeypatch):
    model = make(torch.float32, backend="torch")
    monkeypatch.setattr(library.ctypes, "sizeof", lambda kind: 1)
    found, reason = library._load()
    monkeypatch.setattr(library, "_LIBRARY", found)
    monkeypatch.setattr(library, "_REASON", reason)
    assert native_obstacles(model) == [
        "the native library was built from other sources than this package; reinstall tost"
    ]
    assert make_step(model)(torch.tensor([1]), prefill(model, torch.tensor([[1, 2]])))[0].shape == (1, 11)


def test_a_state_of_another_model_never_reaches_the_library():
    model = make(torch.float32, **GATED)
    form, tokens = NativeStep(model), torch.tensor([1, 2])
    ids = torch.ones(2, 3, dtype=torch.int64)
    state = prefill(model, ids)
    assert form.fits(tokens, state)
    assert not form.fits(tokens, None)
    assert not form.fits(tokens[:1], state)
    assert not form.fits(tokens, state.to(dtype=torch.float64))
    for other in (
        {"depth": 1},
        {"num_heads": 2},
        {"embed_dim": 32},
        {"conv_width": 3},
        {"conv_width": 0},
        {"conv_at": "both"},
        {"mixer_options": {"block_size": 4}},
        {"mixer": "tssa", "mixer_options": {}},
    ):
        strange = prefill(make(torch.float32, **{**GATED, **other}), ids)
        assert not form.fits(tokens, strange)
        with pytest.raises(ValueError, match=r"state|window"):
            make_step(model)(tokens, strange)


def test_small_contributions_to_a_large_sum_are_not_lost():
    """Rounding to the nearest would leave such a sum where it is; on average it has to grow by what tokens add."""
    model = make(torch.float32, position="none", depth=1)
    step = NativeStep(model)
    start = prefill(model, torch.tensor([[1, 2, 3]]))
    (layer,) = start.layers
    large = TSSAState(*(torch.full_like(x, 2.0**27) for x in layer[:3]), layer.position)
    state = ModelState((large,))
    with torch.no_grad():
        for token in range(4000):
            _, state = step(torch.tensor([token % 11]), state)
    # From small sums, in float64, what these tokens add.
    exact = copy.deepcopy(model).double()
    zero = TSSAState(*(torch.full_like(x, 2.0**27, dtype=torch.float64) for x in layer[:3]), layer.position)
    ids = torch.arange(4000)[None] % 11
    expected = prefill(exact, ids, ModelState((zero,)))
    for found, wanted, before in zip(state.layers[0][:3], expected.layers[0][:3], zero[:3], strict=True):
        grown, truth = (found.double() - before).sum(), (wanted - before).sum()
        assert truth > 0
        assert 0.8 < grown / truth < 1.2
        assert (wanted - before).max() / 4000 < 0.5 * 16  # half a digit of such a sum: each token alone would be lost


def test_what_came_before_is_not_changed():
    model = make(torch.float32, **GATED)
    state = prefill(model, torch.ones(2, 3, dtype=torch.int64))
    copies = [x.clone() for x in pytree.tree_leaves(state)]
    NativeStep(model)(torch.tensor([1, 2]), state)
    assert all(map(torch.equal, pytree.tree_leaves(state), copies))


@pytest.mark.parametrize(("weights", "size"), [("fp32", 4), ("bf16", 2), ("int8", 1)])
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_step_are_those_of_its_matrices(tied, weights, size):
    model = tost.create_model(
        "tost_lm_base", embed_dim=8, depth=3, num_heads=2, mlp_ratio=2, vocab_size=50, tie_head=tied
    )
    per_block = 2 * 8 * 8 + 2 * 8 * 16
    assert step_bytes(model, weights) == size * (3 * per_block + 50 * 8)


@pytest.mark.parametrize(("width", "rows", "threads"), [(64, 1, 1), (64, 50, 3), (512, 1, 3)])
def test_small_steps_take_one_thread(monkeypatch, width, rows, threads):
    model = tost.create_model("tost_lm_base", embed_dim=width, depth=2, num_heads=4, vocab_size=50, position="none")
    taken = []
    monkeypatch.setattr(library, "num_threads", lambda: 3)
    monkeypatch.setattr(library, "run_step", lambda dtype, step: taken.append(step.threads))
    ids = torch.zeros(rows, 2, dtype=torch.int64)
    NativeStep(model)(ids[:, -1], prefill(model, ids[:, :-1]))
    assert taken == [threads]
