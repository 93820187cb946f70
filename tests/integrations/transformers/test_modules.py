"""Modules are called, not read: hooks fire, offloaded weights arrive, adapters on any layer count; the base model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tost.integrations.transformers  # noqa: F401  comes before transformers

# isort: split
from accelerate import cpu_offload, disk_offload, dispatch_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.integrations.transformers.models import KINDS, TINY, left_padded, make, tokens
from tost.errors import ConfigError
from tost.integrations.transformers import TostConfig, TostForCausalLM, TostModel
from tost.integrations.transformers.modeling import Recomputed

every_kind = pytest.mark.parametrize("kind", KINDS)


class Adapted(nn.Module):
    """A layer with something learned added to it, as PEFT does it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.extra = nn.Linear(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.extra(x)


# Hooks


@every_kind
@pytest.mark.parametrize("use_cache", [False, True])
def test_hooks_fire_with_and_without_a_cache(kind, use_cache):
    model, fired = make(kind), []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: fired.append(name))
    model(tokens(2, 5), use_cache=use_cache)
    # What marks blocks for recomputation is called only in training that recomputes.
    called = [name for name, module in model.named_modules() if not isinstance(module, nn.ModuleList | Recomputed)]
    assert sorted(fired) == sorted(called)


# Offloading


def dispatched(model: nn.Module, folder) -> nn.Module:
    places = {"model.tokens": "cpu", "model.positions": "disk", "model.norm": "disk", "lm_head": "cpu"}
    places |= dict.fromkeys(("model.blocks.0", "model.blocks.1"), "disk")
    held = {name: places[name] for name, _ in model.named_modules() if name in places}
    return dispatch_model(model, held, main_device="cpu", offload_dir=folder)


OFFLOADS = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
    "dispatched": dispatched,
}


@every_kind
@pytest.mark.parametrize("offload", OFFLOADS)
def test_offloaded_weights_arrive(kind, offload, tmp_path):
    plain, ids = make(kind), tokens(2, 9)
    model = OFFLOADS[offload](copy.deepcopy(plain), tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        for use_cache in (False, True):
            assert torch.equal(model(ids, use_cache=use_cache).logits, plain(ids, use_cache=use_cache).logits)
        assert torch.allclose(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    text = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(text, plain.generate(ids, max_new_tokens=4, do_sample=False))


def test_a_device_map_at_loading(tmp_path):
    model, ids = make("authors"), tokens(2, 9)
    model.save_pretrained(tmp_path / "model")
    places = dict.fromkeys(("model.tokens", "model.positions", "model.blocks.0", "model.norm", "lm_head"), "cpu")
    places["model.blocks.1"] = "disk"
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert loaded.model.blocks[1].gamma1.is_meta
    assert torch.equal(loaded(ids).logits, model(ids).logits)


# The output layer


@pytest.mark.parametrize("tie_head", [True, False])
def test_an_adapter_on_the_output_layer_counts(tie_head):
    model, ids = make("plus", dtype=torch.float64, tie_head=tie_head), tokens(2, 9)
    before = model(ids, labels=ids)
    model.lm_head = Adapted(model.lm_head)
    after = model(ids, labels=ids)
    assert not torch.allclose(after.logits, before.logits)
    expected = F.cross_entropy(after.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.allclose(after.loss, expected)
    after.loss.backward()
    assert model.lm_head.extra.weight.grad.abs().max() > 0
    with pytest.raises(ConfigError, match="Merge adapters first"):
        model.to_tost()


def test_an_output_layer_that_is_watched_is_called_for_the_loss():
    model, ids, seen = make("plus"), tokens(2, 9), []
    model.lm_head.register_forward_hook(lambda module, given, output: seen.append(output.shape))
    model(ids, labels=ids, skip_logits=True).loss.backward()
    assert seen == [(2, 9, 61)]


# The base model


@every_kind
def test_the_base_model_gives_what_the_output_layer_takes(kind, tmp_path):
    model = make(kind, dtype=torch.float64)
    ids, mask = left_padded([tokens(9), tokens(4, seed=1)])
    real = mask.bool()
    out = model.base_model(input_ids=ids, attention_mask=mask)
    assert isinstance(out, BaseModelOutputWithPast)
    logits = model.lm_head(out.last_hidden_state)
    assert torch.allclose(logits[real], model(ids, attention_mask=mask).logits[real])
    after = model.get_decoder()(input_ids=ids[:, -1:], past_key_values=out.past_key_values)
    assert after.past_key_values.get_seq_length() == 10
    assert len(model.model(ids, output_hidden_states=True).hidden_states) == 3
    model.save_pretrained(tmp_path / "whole")
    base, report = AutoModel.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert type(base) is TostModel
    assert not any(report.values())
    again = base(ids, attention_mask=mask).last_hidden_state
    assert torch.allclose(again[real], out.last_hidden_state[real])
    # And back: a file without output layer fits a model whose output layer is tied.
    base.save_pretrained(tmp_path / "base")
    if model.config.tie_head:
        whole = TostForCausalLM.from_pretrained(tmp_path / "base")
        a, b = (one(ids, attention_mask=mask).logits for one in (whole, model))
        assert torch.allclose(a[real], b[real])


# Positions


@every_kind
def test_positions_that_are_counted_anyway_are_taken(kind):
    model = make(kind, dtype=torch.float64)
    ids, mask = left_padded([tokens(9), tokens(4, seed=1)])
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    counted = mask.cumsum(1) - 1
    for places in (counted, counted.clamp_min(0), counted.masked_fill(mask == 0, 1)):  # padding may hold anything
        assert torch.equal(model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits, whole)
    cache = model(ids[:, :6], attention_mask=mask[:, :6], position_ids=counted[:, :6]).past_key_values
    later = model(ids[:, 6:], attention_mask=mask, position_ids=counted[:, 6:], past_key_values=cache)
    assert torch.allclose(later.logits, whole[:, 6:])
    assert model(ids, position_ids=torch.arange(9)[None]).logits.shape == (2, 9, 61)


@pytest.mark.parametrize(
    "places", [[[0, 1, 2, 1, 2]], [[1, 2, 3, 4, 5]], [[0, 1, 2, 3]], [0, 1, 2, 3, 4], [[0, 1, 2, 3, 4]] * 3]
)
def test_other_positions_are_refused(places):
    model = make("plus")
    with pytest.raises(ValueError, match=r"not the numbers of the real tokens .* Leave them out"):
        model(tokens(2, 5), position_ids=torch.tensor(places))
    with pytest.raises(ValueError, match="not the numbers of the real tokens"):
        model(tokens(2, 5), attention_mask=torch.ones(2, 5), position_ids=torch.tensor(places))


# What other libraries look for in a configuration


def test_sizes_have_the_usual_names_in_a_dictionary_and_one_name_in_a_file(tmp_path):
    config = TostConfig(**TINY)
    values = config.to_dict()
    assert (values["hidden_size"], values["num_hidden_layers"], values["num_attention_heads"]) == (32, 2, 4)
    assert values["tie_word_embeddings"] is True
    assert TostConfig.from_dict(values).to_dict() == values
    config.save_pretrained(tmp_path)
    assert "hidden_size" not in (tmp_path / "config.json").read_text()
    assert AutoConfig.from_pretrained(tmp_path, embed_dim=64).hidden_size == 64
    assert AutoConfig.from_pretrained(tmp_path, hidden_size=64).embed_dim == 64
