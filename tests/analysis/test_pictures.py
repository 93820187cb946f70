"""Maps, texts, files and pictures."""

from __future__ import annotations

import csv
import io
import json

import pytest
import torch

import tost
import tost._torchvision
import tost.analysis as analysis

# isort: split
import timm
from timm.models.xcit import Xcit

from tests.models.tiny import make_tiny, perturb
from tost.analysis.class_attention import class_attention_layers, keep_mass
from tost.analysis.records import run_batch
from tost.errors import ConfigError, StorageError


def images(count=3, size=32):
    return torch.randn(count, 3, size, size)


def softmax_of(model, attention, x):
    """timm's own textbook attention: its weights are what its dropout sees."""
    found = []
    attention.fused_attn = False
    handle = attention.attn_drop.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    with torch.no_grad():
        model.eval()(x)
    handle.remove()
    return found[0]


def test_vit_maps_are_timms_softmax():
    model, x = perturb(make_tiny("vit_mini"), 0.1).eval(), images()
    result = analysis.class_attention_maps(model, [x])
    assert result.layers == (0,)  # the last but one
    weights = softmax_of(model, model.blocks[0].attn, x)[:, :, 0]
    torch.testing.assert_close(result.maps[:, 0].flatten(2), weights[..., 1:])
    torch.testing.assert_close(result.itself[0], weights[..., 0].double().mean(0))


def test_xcit_of_timm_and_class_blocks_of_ours_agree_with_timm():
    model = timm.create_model("xcit_nano_12_p16_224", depth=1, img_size=32, num_classes=2)
    assert isinstance(model, Xcit)
    x = images()
    result = analysis.class_attention_maps(perturb(model, 0.1), [x])
    weights = softmax_of(model, model.cls_attn_blocks[0].attn, x)
    torch.testing.assert_close(result.maps[:, 0].flatten(2), weights[:, :, 0, 1:])
    ours = perturb(make_tiny("tost_mini"), 0.1).eval()
    found = analysis.class_attention_maps(ours, [x], layers=[0, 1])
    token, patches = [], []
    block = ours.cls_attn_blocks[0]

    def note(module, inputs):
        token.append(inputs[0])
        patches.append(inputs[1])

    handle = block.register_forward_pre_hook(note)
    with torch.no_grad():
        ours(x)
        handle.remove()
        block.attn.fused_attn = False
        caught = []
        handle = block.attn.attn_drop.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
        block.attn(block.norm1(torch.cat((token[0], patches[0]), dim=1)))
        handle.remove()
    torch.testing.assert_close(found.maps[:, 0].flatten(2), caught[0][:, :, 0, 1:], rtol=1e-4, atol=1e-6)


def test_crate_maps_are_a_softmax():
    model, x = perturb(make_tiny("crate_mini"), 0.1).eval(), images()
    result = analysis.class_attention_maps(model, [x], layers=[1])
    total = result.maps.flatten(3).sum(-1).double().mean(0) + result.itself
    torch.testing.assert_close(total, torch.ones_like(total))
    mixer = class_attention_layers(model)[1].module
    with torch.no_grad():
        seen = []
        handle = mixer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        model(x)
        handle.remove()
        w = mixer.proj_in(seen[0]).view(3, -1, 4, 4).transpose(1, 2)
        expected = (w @ w.mT / 2).softmax(-1)[:, :, 0, 1:]
    torch.testing.assert_close(result.maps[:, 0].flatten(2), expected)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_mass_is_kept_by_the_largest():
    weights = torch.tensor([[0.05, 0.5, 0.15, 0.3]])
    assert keep_mass(weights, 0.6).tolist() == [[False, True, False, True]]
    assert keep_mass(weights, 1.0).all()


def test_membership_maps_are_the_memberships():
    model, x = perturb(make_tiny("tost_mini")).eval(), images(5)
    result = analysis.membership_maps(model, [{"inputs": x[:3]}, {"inputs": x[3:]}], shown=4)
    with torch.no_grad(), analysis.capture(model) as records:
        run_batch(model, x)
    for i, record in enumerate(records):
        expected = record.membership()[:4].mT.unflatten(2, (8, 8))
        torch.testing.assert_close(result.maps[:, i], expected)
    assert (result.images, len(result.pixels)) == (5, 4)
    torch.testing.assert_close(result.maps.sum(2), torch.ones(4, 2, 8, 8))
    assert result.at(-1).layers == (1,)
    with pytest.raises(ConfigError, match="not among"):
        result.at(-1).at(0)


def test_text_memberships_in_rows():
    model = perturb(make_tiny("tost_lm_base")).eval()
    ids = torch.randint(11, (7,))
    result = analysis.text_memberships(model, ids, "abc\ndef")
    rows = result.rows()
    assert len(rows) == 2 * 7
    assert rows[3]["token"] == "\n"
    assert sum(rows[9][f"pi_{head}"] for head in range(4)) == pytest.approx(1)
    with pytest.raises(ValueError, match="6 tokens"):
        analysis.text_memberships(model, ids, "abcdef")


def samples_of(model):
    if hasattr(model.options, "in_chans"):
        return analysis.Samples(train=[images()], validation=[images()])
    ids = torch.randint(11, (2, 12))
    return analysis.Samples(train=[ids], validation=[ids], text=(ids[:1], [chr(97 + i) for i in ids[0].tolist()]))


@pytest.mark.parametrize("name", ["tost_mini", "tost_lm_base_plus"])
def test_every_analysis_is_drawn_and_becomes_data(name):
    model = perturb(make_tiny(name, depth=1))
    samples, control = samples_of(model), analysis.control_of(model)
    for each in analysis.applicable(model):
        result = analysis.analyze(each, model, samples, control=control)
        assert result.name == each
        picture = io.BytesIO()
        result.figure().savefig(picture, dpi=20)
        assert picture.getvalue().startswith(b"\x89PNG")
        json.dumps(result.to_json(), allow_nan=False)
        keys = {tuple(row) for row in result.rows()}
        assert len(keys) == 1
        assert result.summary()


def test_files_hold_picture_and_data(tmp_path):
    result = analysis.head_usage(make_tiny("tost_mini", depth=1), [images()])
    files = analysis.save(result, tmp_path / "new", "mine")
    assert [file.name for file in files] == [f"mine.{ending}" for ending in ("png", "svg", "json", "csv")]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert files[1].read_bytes() == analysis.image_bytes(result, "svg")
    assert json.loads(files[2].read_text()) == {"analysis": "heads", **result.to_json()}
    with files[3].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["usage"]) for row in rows] == [row["usage"] for row in result.rows()]


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    result = analysis.subspace_coherence(make_tiny("tost_mini", depth=1))
    with pytest.raises(StorageError, match="cannot write subspaces"):
        analysis.save(result, tmp_path / "file")


def test_what_applies_and_what_does_not():
    language = make_tiny("tost_lm_base")
    assert "state-memory" in analysis.applicable(language)
    with pytest.raises(ConfigError, match=r"class-attention does not apply to LanguageToST.*These do: coding-rate"):
        analysis.analyze("class-attention", language, analysis.Samples())
    assert analysis.applicable(make_tiny("vit_mini")) == ["class-attention"]
    assert analysis.applicable(make_tiny("xcit_mini")) == ["class-attention"]
    assert analysis.applicable(make_tiny("gpt2_base")) == []
    assert "state-memory" not in analysis.applicable(make_tiny("lra_listops"))
    assert "text-memberships" not in analysis.applicable(make_tiny("lra_image"))
    with pytest.raises(ConfigError, match="did you mean 'coding-rate'"):
        analysis.analyze("codingrate", language, analysis.Samples())
    with pytest.raises(ConfigError, match="there are none"):
        analysis.analyze("heads", language, analysis.Samples())


def test_control_is_a_fresh_model_of_the_same_options():
    model = perturb(make_tiny("tost_mini"))
    before = torch.get_rng_state()
    control = analysis.control_of(model, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert control.options == model.options
    torch.manual_seed(3)
    expected = tost.create_model("tost_mini", **model.options.model_dump())
    torch.testing.assert_close(control.state_dict(), expected.state_dict())
    rates = analysis.analyze("coding-rate", model, samples_of(model), control=control)
    assert rates.pairs() == [("trained", "train"), ("trained", "validation"), ("control", "validation")]
    with pytest.raises(ConfigError, match="does not say how it was built"):
        analysis.control_of(torch.nn.Linear(1, 1))
