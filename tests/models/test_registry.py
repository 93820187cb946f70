"""Names and options of models: found without torch, refused with every reason at once."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

import tost
from tests.models.tiny import make_tiny
from tost.errors import ConfigError
from tost.models import LanguageOptions, SequenceClassifierOptions, model_options, model_spec

SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 4}


def test_registry_and_options_load_no_torch():
    probe = (
        "import sys, tost; tost.list_models(); from tost.models import model_options, token_flops; "
        "token_flops(model_options('tost_lm_base', {'depth': 3})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_unknown_model_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"no model 'tost_lm_bse'; did you mean 'tost_lm_base'\? models: \w+, "):
        tost.create_model("tost_lm_bse")
    with pytest.raises(ConfigError, match=r"no model 'qqq'; models: "):
        model_options("qqq", {})


def test_every_problem_is_told_at_once():
    overrides = {"dept": 3, "num_heads": 0, "dropout": "much", "mlp_ratio": 1e-4, "position": "rotary", "bias": 1}
    with pytest.raises(ConfigError) as caught:
        model_options("tost_lm_base", overrides)
    lines = str(caught.value).splitlines()
    assert lines[0] == "model 'tost_lm_base' cannot be built with these options, 6 problems:"
    assert set(lines[1:]) == {
        "  dept: unknown key; did you mean depth?",
        "  num_heads: 0 given; needs a whole number >= 1 and <= 2147483647",
        "  dropout: much given; needs a number >= 0 and < 1",
        "  position: rotary given; needs one of learned, sinusoidal, none",
        "  bias: 1 given; needs true or false",
        "  mlp_ratio=0.0001 times embed_dim=768 is 0.0768; the hidden width, rounded, has to be at least 1 and below "
        "2147483648: choose another ratio",
    }


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("tost_lm_base", {"num_heads": 7}, "embed_dim=768 is not divisible by num_heads=7: every head .* change one"),
        ("tost_lm_base", {"depth": True}, "depth: true given; needs a whole number >= 1"),
        ("tost_lm_base", {"depth": 2.0}, "depth: 2.0 given; needs a whole number >= 1"),
        ("tost_lm_base", {"zzz": 2}, "zzz: unknown key; the keys here are: embed_dim, depth"),
        ("tost_lm_base", {"layer_scale": 0}, "layer_scale: 0 given; needs a number > 0 or null"),
        ("tost_lm_base", {"dropout": 1.0}, "dropout: 1.0 given; needs a number >= 0 and < 1"),
        ("tost_lm_base", {"mlp_ratio": float("nan")}, ".nan given; needs a number > 0"),
        ("tost_lm_base", {"mlp_ratio": 1e-9}, "is 7.68e-07; the hidden width, rounded, has to be at least 1"),
        ("tost_lm_base", {"backend": "cuda"}, "backend: cuda given; needs one of auto, triton, native, torch, ref"),
        ("tost_lm_base", {"depth": 0, "mlp_ratio": "4"}, "depth: 0 given; needs a whole number >= 1 and <= 10000$"),
        ("lra_listops", {"input": "values"}, "input=values needs in_features; set it\n.*no use for vocab_size=16; set"),
        ("lra_listops", {"vocab_size": None}, "input=tokens needs vocab_size; set it"),
        (
            "lra_image",
            {"input": "tokens", "vocab_size": 5},
            "input=tokens has no use for in_features=1; set it to null",
        ),
        (
            "lra_image",
            {"embed_dim": 3, "num_heads": 3},
            "embed_dim=3 cannot hold the sines and cosines of position=sin",
        ),
        ("lra_image", {"num_classes": 1}, "num_classes: 1 given; needs a whole number >= 2"),
    ],
)
def test_impossible_options_are_refused(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        tost.create_model(name, **overrides)


@pytest.mark.parametrize(("ratio", "hidden"), [(3.992, 64), (1 / 30, 1), (2.5, 40), (307 / 96, 51)])
@pytest.mark.parametrize("name", ["tost_lm_base", "lra_listops", "tost_mini", "vit_mini"])
def test_any_ratio_with_a_hidden_width_of_at_least_one_will_do(name, ratio, hidden):
    model = make_tiny(name, mlp_ratio=ratio)
    assert model.options.hidden_dim == hidden
    mlp = model.blocks[0].mlp
    assert getattr(mlp, "proj_in", getattr(mlp, "fc1", None)).out_features == hidden


def test_options_cannot_be_changed_and_are_checked_on_their_own_too():
    options = LanguageOptions(**SMALL)
    with pytest.raises(ValidationError, match="frozen"):
        options.depth = 3
    with pytest.raises(ValidationError, match="embed_dim=16 is not divisible by num_heads=5"):
        LanguageOptions(**{**SMALL, "num_heads": 5})
    with pytest.raises(ValidationError, match="num_classes"):
        SequenceClassifierOptions(**SMALL, input="tokens", vocab_size=3, max_length=5)


@pytest.mark.parametrize("options", [LanguageOptions, SequenceClassifierOptions])
def test_every_option_is_described(options):
    bare = [name for name, field in options.model_fields.items() if not field.description]
    assert not bare


MIXED = [name for name in tost.list_models() if "mixer" in model_spec(name).options.model_fields]


@pytest.mark.parametrize("name", MIXED)
def test_the_control_is_one_switch_for_every_preset(name):
    options, preset = model_options(name, {"mixer": "none"}), model_options(name, {})
    tssa = {*type(options).tssa_options(), "mixer", "mixer_options"}
    changed = {key for key, value in dict(options).items() if value != getattr(preset, key)}
    assert changed <= tssa
    assert options.mixer == "none"


def test_options_that_are_given_are_still_checked_against_the_mixer():
    with pytest.raises(ConfigError, match="normalize=False is about TSSA, but mixer=none"):
        model_options("tost_mini_plus", {"mixer": "none", "normalize": False})
