"""Every family: only the chosen layers change, gradients flow, weights come from the old layer and can be saved."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch

import tost
from tests.integrations.replace.models import ALL, TIMM, example, make, output, quietly
from tost.errors import CheckpointError, ConfigError
from tost.integrations.replace import find_layers
from tost.integrations.replace.saved import load_replaced
from tost.nn import BlockTSSAttention, CausalTSSAttention, GatedTSSAttention, TSSAttention

PLUS = [name for name in ALL if name != "decoder_qwen3"]  # whose heads are wider than its tokens
FORMS = {
    (False, False): TSSAttention,
    (False, True): BlockTSSAttention,
    (True, False): CausalTSSAttention,
    (True, True): GatedTSSAttention,
}


def layers(model):
    return [(layer.name, model.get_submodule(layer.name)) for layer in find_layers(model)]


def recorded(model, x):
    """What goes into and comes out of each self-attention layer."""
    seen = {}

    def hook(name):
        def keep(module, args, kwargs, out):
            given = args[0] if args else kwargs["hidden_states"]
            seen[name] = given.detach(), (out if isinstance(out, torch.Tensor) else out[0]).detach()

        return keep

    handles = [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in layers(model)]
    output(model, x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", ALL)
def test_only_the_chosen_layer_changes(name):
    old, x = make(name), example(name)
    new = quietly(tost.replace_attention, copy.deepcopy(old), layers=[1])
    before, after = recorded(old, x), recorded(new, x)
    assert list(before) == list(after)
    first, second, *_ = before
    for mine, theirs in zip(after[first], before[first], strict=True):
        torch.testing.assert_close(mine, theirs)  # nothing before the layer has changed
    torch.testing.assert_close(after[second][0], before[second][0])
    assert not torch.allclose(after[second][1], before[second][1])
    kept = {key: value for key, value in old.state_dict().items() if not key.startswith(f"{second}.")}
    assert all(torch.equal(new.state_dict()[key], value) for key, value in kept.items())


@pytest.mark.parametrize(
    ("name", "plus"), [*((name, False) for name in ALL), *((name, True) for name in ("vit", "swin", "decoder_llama"))]
)
def test_the_new_layer_has_the_old_weights(name, plus):
    old = make(name)
    new = quietly(tost.replace_attention, copy.deepcopy(old), plus=plus, block_size=4)
    (path, theirs), (_, mine) = layers(old)[0], layers(new)[0]
    attention = getattr(mine, "attention", mine)
    assert type(attention) is FORMS[name.startswith("decoder"), plus]
    x = torch.randn(1, 3, attention.embed_dim)
    fused = next((getattr(theirs, key) for key in ("qkv", "c_attn") if hasattr(theirs, key)), None)
    if fused is not None:
        values = fused(x).chunk(3, dim=-1)[2]
        values = values if getattr(theirs, "v_bias", None) is None else values + theirs.v_bias
    else:
        values = next(getattr(theirs, key) for key in ("value", "v_lin", "v_proj") if hasattr(theirs, key))(x)
    heads = values.unflatten(-1, (-1, attention.head_dim))
    heads = heads.repeat_interleave(attention.num_heads // heads.shape[-2], dim=-2)
    torch.testing.assert_close(-attention.proj_in(x), heads.flatten(-2), msg=f"{path} does not start from its values")
    out = next((getattr(theirs, key) for key in ("proj", "c_proj", "o_proj", "out_lin") if hasattr(theirs, key)), None)
    if out is None:
        assert isinstance(attention.proj_out, torch.nn.Identity)
    else:
        torch.testing.assert_close(attention.proj_out(heads.flatten(-2)), out(heads.flatten(-2)))


@pytest.mark.parametrize(("name", "plus"), [*((name, False) for name in ALL), *((name, True) for name in PLUS)])
def test_gradients_flow_into_every_parameter(name, plus):
    model = quietly(tost.replace_attention, make(name), plus=plus, block_size=4).train()
    output(model, example(name)).square().mean().backward()
    for path, layer in layers(model):
        for parameter_name, parameter in layer.named_parameters():
            assert parameter.grad is not None, f"{path}.{parameter_name}"
            assert parameter.grad.abs().max() > 0, f"{path}.{parameter_name}"


@pytest.mark.parametrize("name", ALL)
def test_save_and_load(name, tmp_path):
    x, options = example(name), {"plus": name in PLUS, "block_size": 4}
    model = quietly(tost.replace_attention, make(name), layers=[0], num_heads=2, **options)
    quietly(tost.replace_attention, model, layers=[-1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = output(model, x)
    if name in TIMM:
        torch.save(model.state_dict(), tmp_path / "model.pt")
        again = quietly(tost.replace_attention, make(name), layers=[0], num_heads=2, **options)
        quietly(tost.replace_attention, again, layers=[-1])
        again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    else:
        model.save_pretrained(tmp_path)
        again = load_replaced(tmp_path)
    torch.testing.assert_close(output(again.eval(), x), expected)


HOSTILE = {
    "kernels from elsewhere": ({"_attn_implementation": "kernels-community/flash-attn"}, "code from elsewhere"),
    "code in the folder": ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}, "trust_remote_code"),
    "a name that is no model": ({"architectures": ["os"]}, "os"),
    "a number for a name": ({"architectures": [3]}, "TypeError"),
    "nothing replaced": ({"tost_attention": []}, r"tost_attention=\[\]"),
    "a strange call": ({"tost_attention": [{"heads": 1}]}, "heads"),
    "more layers than tensors": ({"n_layer": 10**9}, "num_hidden_layers=1000000000 does not fit the weights"),
    "no layer": ({"n_layer": 0}, "num_hidden_layers=0"),
    "no head": ({"n_head": 0}, "num_attention_heads=0"),
    "a wide model": ({"n_embd": 10**9}, "hidden_size=1000000000"),
    "a number as text": ({"n_layer": "2"}, "n_layer"),
    "an unknown function": ({"activation_function": "evil"}, "evil"),
    "an unknown type": ({"dtype": "evil"}, "evil"),
    "labels": ({"id2label": 3}, "AttributeError"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_one_error(case, tmp_path, monkeypatch):
    changes, message = HOSTILE[case]
    quietly(tost.replace_attention, make("decoder_gpt2"), layers=[1]).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | changes))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question about foreign code"))
    with pytest.raises(CheckpointError, match=f"(?s)cannot load .*save_pretrained wrote after .*{message}"):
        load_replaced(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("former", [None, {"gate": True}])
def test_folders_of_an_earlier_revision_load_if_they_have_the_form_of_the_paper(former, tmp_path):
    model, x = quietly(tost.replace_attention, make("encoder_bert")), example("encoder_bert")
    model.config.tost_attention = [{"layers": [0, 1, 2], "causal": None, "num_heads": None, "extensions": former}]
    model.save_pretrained(tmp_path)
    if former is None:
        assert torch.equal(output(load_replaced(tmp_path), x), output(model, x))
        return
    with pytest.raises(CheckpointError, match=r"extensions=\{'gate': True\}: removed after revision 1ae0fcd"):
        load_replaced(tmp_path)


def test_heads_wider_than_the_tokens_have_no_form_with_content():
    with pytest.raises(ConfigError, match="tokens have 32 features, each of 4 heads 12, block_size=4"):
        tost.replace_attention(make("decoder_qwen3"), plus=True, block_size=4)


def test_loading_refuses_other_folders(tmp_path):
    make("encoder_bert").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="save_pretrained wrote after"):
        load_replaced(tmp_path)


def test_a_shared_configuration_stays_as_it_was():
    old = make("encoder_bert")
    new = type(old)(old.config)
    tost.replace_attention(new)
    assert new.config is not old.config
    assert not hasattr(old.config, "tost_attention")
    assert old.config._attn_implementation != new.config._attn_implementation == "tssa"
    assert torch.isfinite(output(old, example("encoder_bert"))).all()


def test_a_model_inside_another():
    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = make("encoder_bert")

        def forward(self, ids):
            return self.encoder(ids)[0].mean(1)

    model = tost.replace_attention(Classifier())
    assert model.encoder.config._attn_implementation == "tssa"
    assert len(layers(model)) == 3
    assert torch.isfinite(model(example("encoder_bert"))).all()


def test_dtype_frozen_weights_and_mode_are_kept():
    model = make("decoder_llama").to(torch.bfloat16).requires_grad_(False).train()
    quietly(tost.replace_attention, model, layers=[0])
    attention = model.model.layers[0].self_attn.attention
    assert attention.proj_in.weight.dtype == attention.temperature.dtype == torch.bfloat16
    assert not attention.proj_in.weight.requires_grad
    assert attention.temperature.requires_grad
    assert attention.training


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("decoder_llama", "rotary positions"),
        ("beit", "relative position biases"),
        ("decoder_mistral", "sliding windows"),
    ],
)
def test_what_is_dropped_is_named(name, words):
    with pytest.warns(UserWarning, match=words):
        tost.replace_attention(make(name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [3]}, r"layers=\[3\], but the model has 3 self-attention layers; choose from 0 to 2"),
        ({"layers": [-4]}, "choose from 0 to 2"),
        ({"layers": []}, "choose from 0 to 2"),
        ({"num_heads": 5}, "num_heads=5 does not divide the 32 features"),
        ({"source": "output"}, "source='output' is not known"),
        ({"plus": True, "block_size": 5}, "each of 4 heads 8, block_size=5"),
        ({"plus": True, "block_size": 0}, "block_size=0"),
    ],
)
def test_wrong_options(options, message):
    model = make("encoder_bert")
    with pytest.raises(ConfigError, match=message):
        tost.replace_attention(model, **options)
    assert not any(isinstance(module, TSSAttention) for module in model.modules())


def test_replacing_twice():
    model = tost.replace_attention(make("encoder_bert"), layers=[1])
    with pytest.raises(ConfigError, match=r"layers \[1\] are replaced already"):
        tost.replace_attention(model, layers=[0, 1])
    tost.replace_attention(model)
    with pytest.raises(ConfigError, match="all self-attention layers of this model are replaced already"):
        tost.replace_attention(model)


def test_other_models_are_refused_by_name():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16)
    words = "of TransformerEncoderLayer can be replaced: it has MultiheadAttention. Known are timm's ViT"
    with pytest.raises(ConfigError, match=re.escape(words)):
        tost.replace_attention(layer)


def test_layers_with_parts_that_have_no_place_are_refused():
    model, images = make("encoder_bert"), make("vit")
    layer = model.encoder.layer[1].attention.self
    layer.value = torch.nn.Sequential(layer.value)
    with pytest.raises(ConfigError, match="the projection value of BertSelfAttention is a Sequential"):
        tost.replace_attention(model)
    images.blocks[0].attn.norm = torch.nn.LayerNorm(32)
    with pytest.raises(ConfigError, match="scale_norm=True"):
        tost.replace_attention(images)


def test_vision_transformers_of_timm_take_their_masks():
    model = tost.replace_attention(make("vit"))
    x = torch.randn(2, 17, 32)
    real = torch.ones(2, 17).bool()
    real[1, 10:] = False
    changed = x.clone()
    changed[1, 10:] = 7.0
    first, second = (model.blocks[0](given, attn_mask=real[:, None, None]) for given in (x, changed))
    torch.testing.assert_close(first[real], second[real])


def test_windows_of_swin_do_not_see_other_regions():
    model = quietly(tost.replace_attention, make("swin"))
    block = model.layers[0].blocks[1]
    mask = block.attn_mask
    x = torch.randn(2 * len(mask), mask.shape[1], 16)
    y = block.attn(x, mask=mask)
    for window in range(len(mask)):
        for token in (0, mask.shape[1] - 1):
            inside = mask[window, token] == 0
            for image in range(2):
                row = image * len(mask) + window
                alone = block.attn.attention(x[row : row + 1, inside])[0]
                torch.testing.assert_close(y[row, inside], alone)
    with pytest.raises(ValueError, match="does not divide it into regions"):
        block.attn(x, mask=torch.ones_like(mask).tril().log())
