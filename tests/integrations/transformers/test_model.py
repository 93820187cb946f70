"""What transformers' own tests ask of a model, asked of tost's: configuration, files, fresh weights, embeddings."""

import importlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tost.integrations.transformers

# isort: split
from transformers import AutoConfig, AutoModelForCausalLM

import tost
from tests.integrations.transformers.models import KINDS, TINY, make, tokens
from tost.errors import ConfigError
from tost.integrations.official import to_official
from tost.integrations.transformers import TostConfig, TostForCausalLM
from tost.models import LanguageOptions
from tost.train.checkpoint.model import save_model

every_kind = pytest.mark.parametrize("kind", KINDS)
OURS = {"embed_dim": 32, "depth": 2, "num_heads": 4, "vocab_size": 61, "max_length": 48}


def equal(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


# Configuration


@every_kind
def test_a_config_is_the_options_one_for_one(kind):
    config = TostConfig(**{**TINY, **KINDS[kind]})
    options = config.options()
    assert isinstance(options, LanguageOptions)
    again = TostConfig.from_options(options, pad_token_id=0)
    assert again.to_dict() == config.to_dict()
    fields = set(LanguageOptions.model_fields) - {"gradient_checkpointing", "max_length"}
    assert {key: getattr(config, key) for key in fields} == {key: getattr(options, key) for key in fields}
    assert config.max_position_embeddings == options.max_length


def test_the_names_that_transformers_uses_everywhere():
    names = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "tie_word_embeddings": False}
    config = TostConfig(**names, num_labels=5, dtype="bfloat16")
    assert (config.embed_dim, config.depth, config.num_heads, config.tie_head) == (64, 3, 2, False)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 3, 2)
    assert config.num_labels == 5
    assert config.dtype is torch.bfloat16
    assert config.get_text_config() is config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"embed_dim": 30}, "embed_dim=30 is not divisible by num_heads=12"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: 0 given; needs a whole number >= 1"),
        ({"mixer": "softmax", "backend": "torch"}, "backend=torch is about TSSA"),
        ({"mixer": "tssa_plus", "mixer_options": {"block_size": 5}}, "block_size=5 does not divide"),
        ({"mixer_options": {"block_size": 4}}, "mixer_options.block_size: unknown"),
        ({"dropout": "much"}, "dropout: much given; needs a number >= 0 and < 1"),
        ({"depth": True}, "depth: true given; needs a whole number >= 1"),
        ({"embed_dmi": 30}, "embed_dmi: not an option of the model; did you mean 'embed_dim'"),
        ({"max_length": 30}, "max_length: not an option of the model; the number of positions is max_position_emb"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing_enable"),
        ({"temperature": 0.5}, "temperature: .* about generation"),
        ({"n_layer": 3, "depth": 0}, "(?s)n_layer: not an option.*depth: 0 given"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        TostConfig(**given)


def test_values_that_are_changed_later_are_checked_too(tmp_path):
    config = TostConfig(**TINY)
    config.num_heads = 5
    for use in (config.options, lambda: TostForCausalLM(config), lambda: config.save_pretrained(tmp_path)):
        with pytest.raises(ConfigError, match="num_heads=5"):
            use()
    TostConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="num_heads=7"):
        TostForCausalLM(AutoConfig.from_pretrained(tmp_path, num_heads=7))


def test_keys_of_other_programs_in_a_file_are_kept_but_slips_are_not(tmp_path):
    TostConfig(**TINY).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "made_by_x": 1}))
    assert TostConfig.from_pretrained(tmp_path).made_by_x == 1
    file.write_text(json.dumps({**content, "embed_dims": 64}))
    with pytest.raises(ConfigError, match="did you mean 'embed_dim'"):
        TostConfig.from_pretrained(tmp_path)


def test_the_import_registers_and_may_be_repeated():
    importlib.reload(tost.integrations.transformers)
    config = AutoConfig.for_model("tost", **TINY)
    assert type(config) is TostConfig
    assert type(AutoModelForCausalLM.from_config(config)) is TostForCausalLM


# Files


@every_kind
def test_a_model_survives_files(kind, tmp_path):
    model, ids = make(kind), tokens(2, 7)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "modeling_tost.py")
    }
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert type(again) is TostForCausalLM
    assert not again.training
    assert equal(again, model)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.model.options == model.model.options


def test_a_tied_head_is_stored_once(tmp_path):
    tied, free = make("authors"), make("authors", tie_head=False)
    tied.save_pretrained(tmp_path / "tied")
    free.save_pretrained(tmp_path / "free")
    stored = load_file(tmp_path / "tied/model.safetensors")
    extra = set(load_file(tmp_path / "free/model.safetensors")) - set(stored)
    assert extra == {"model.head.weight"}
    for model in (tied, free):
        assert isinstance(model.get_output_embeddings(), nn.Linear)
        assert (model.lm_head.weight is model.model.tokens.weight) == (model is tied)
    assert TostForCausalLM.from_pretrained(tmp_path / "free")(tokens(1, 3)).logits.shape == (1, 3, 61)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_from_pretrained_with_a_dtype(dtype, tmp_path):
    make("plus").save_pretrained(tmp_path / "wide")
    model = TostForCausalLM.from_pretrained(tmp_path / "wide", dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    out = model(tokens(2, 5))
    assert out.logits.dtype == dtype
    assert out.logits.isfinite().all()
    # Sums over many tokens stay in float32 or better.
    assert out.past_key_values.layers[0].read().mixer.covariance.dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    model.save_pretrained(tmp_path / "narrow")
    assert TostForCausalLM.from_pretrained(tmp_path / "narrow").dtype == dtype


@pytest.mark.parametrize("more", [{}, KINDS["plus"], {**KINDS["plus"], "layer_scale": None}, {"mixer": "s4d"}])
def test_missing_weights_are_initialized_as_those_of_a_new_model(more, tmp_path):
    config = TostConfig(**{**TINY, **more})
    model = TostForCausalLM(config)
    model.save_pretrained(tmp_path)
    kept = {"model.norm.weight": model.state_dict()["model.norm.weight"].fill_(7.0)}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(0)
    loaded, report = TostForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    torch.manual_seed(0)
    new = tost.models.LanguageToST(config.options()).state_dict()
    assert report["missing_keys"] == set(model.state_dict()) - set(kept)
    for key, weight in loaded.to_tost().state_dict().items():
        assert torch.equal(weight, kept["model.norm.weight"] if key == "norm.weight" else new[key]), key


# Our own checkpoints, and the authors'


@every_kind
def test_a_model_of_ours_is_wrapped_and_not_copied(kind):
    config = TostConfig(**{**TINY, **KINDS[kind]})
    ours = tost.models.LanguageToST(config.options()).double()
    model = TostForCausalLM.from_tost(ours, pad_token_id=0)
    assert all(getattr(model.model, name) is getattr(ours, name) for name in ("tokens", "blocks", "norm"))
    first, *others = (set(map(id, each.parameters())) for each in (ours, model, model.to_tost()))
    assert others == [first, first]
    assert model.training is ours.training is True
    assert model.config.dtype == torch.float64
    assert {**model.config.to_dict(), "dtype": None} == {**config.to_dict(), "dtype": None}
    ids = tokens(2, 5)
    assert torch.equal(model.eval()(ids).logits, ours(ids))
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_from_the_authors_through_ours_to_transformers_and_back(tmp_path):
    source = tost.create_model("tost_lm_base", **OURS)
    torch.save({"model": to_official(source)}, tmp_path / "ckpt.pt")
    model = TostForCausalLM.from_tost(tost.load_official(tmp_path / "ckpt.pt"))
    model.save_pretrained(tmp_path / "theirs")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    save_model(loaded.to_tost(), tmp_path / "ours")
    again = tost.load_model(tmp_path / "ours")
    assert equal(again, source)
    assert all(torch.equal(value, to_official(source)[key]) for key, value in to_official(again).items())
    assert loaded.model.options == source.options


@every_kind
def test_a_bare_state_dict_of_ours_beside_a_config_is_read(kind, tmp_path):
    model = make(kind)
    model.config.save_pretrained(tmp_path)
    save_file(model.to_tost().state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert equal(TostForCausalLM.from_pretrained(tmp_path), model)


# Embeddings and flags


@pytest.mark.parametrize("tie_head", [True, False])
def test_the_vocabulary_can_be_resized(tie_head):
    model, ids = make("plus", tie_head=tie_head), tokens(2, 5)
    before = model(ids).logits
    model.resize_token_embeddings(70, mean_resizing=False)
    assert torch.allclose(model(ids).logits[..., :61], before, atol=1e-5)
    assert model(torch.full((1, 2), 69)).logits.shape == (1, 2, 70)
    assert model.config.vocab_size == model.model.options.vocab_size == model.vocab_size == 70
    model.resize_token_embeddings(10)
    with pytest.raises(ValueError, match="vocab_size=10"):
        model(torch.full((1, 2), 10))
    model.resize_token_embeddings(11, pad_to_multiple_of=8)
    assert model.config.vocab_size == 16
    assert model.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=3, do_sample=False).shape == (1, 5)


def test_embeddings_can_be_replaced():
    tied, free = make("authors"), make("authors", tie_head=False)
    tied.set_input_embeddings(nn.Embedding(61, 32))
    assert tied.get_input_embeddings() is tied.model.tokens
    head = nn.Linear(32, 61, bias=False)
    free.set_output_embeddings(head)
    assert free.lm_head is free.get_output_embeddings() is head
    assert tied.lm_head.weight is tied.model.tokens.weight
    with pytest.raises(ConfigError, match="tie_head"):
        tied.set_output_embeddings(head)
    with pytest.raises(NotImplementedError):
        make("authors").resize_position_embeddings(3)


@pytest.mark.parametrize(
    "change",
    [
        *({"depth": value} for value in (0, -1, 10**9, "2", None, 2.5)),
        *({"num_heads": value} for value in (0, 3, [2])),
        *({"embed_dim": 10**9}, {"vocab_size": -1}, {"mlp_ratio": 1e300}, {"mixer": 3}, {"layer_scale": {}}),
        *({"id2label": 3}, {"dtype": "evil"}, {"dtype": "int8"}, {"num_labels": "x"}, {"num_labels": 10**9}),
        *({"quantization_config": value} for value in (5, [], {}, {"quant_method": 3})),
        *({"conv_width": 10**9}, {"conv_width": 10**30}, {"attribute_map": {"a": "b"}}, {"to_dict": 3}, {"_check": 3}),
    ],
    ids=str,
)
def test_a_hostile_config_is_one_error(tmp_path, change):
    TostForCausalLM(TostConfig(**TINY)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(ConfigError):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_foreign_code_in_a_config_is_not_loaded(tmp_path):
    TostForCausalLM(TostConfig(**TINY)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "evil.py").write_text("raise SystemExit")
    foreign = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(content | foreign | {"text_config": {"model_type": "llama"}}))
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is TostForCausalLM
    (tmp_path / "config.json").write_text(json.dumps(content | {"auto_map": 5}))
    with pytest.raises(ConfigError, match="auto_map: 5 given"):
        TostForCausalLM.from_pretrained(tmp_path)


def test_kernels_from_elsewhere_are_not_loaded(tmp_path):
    TostForCausalLM(TostConfig(**TINY)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"_attn_implementation": "kernels-community/x"}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation != "kernels-community/x"
