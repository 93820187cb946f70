"""Models and mixers of other packages: registered by a decorator, an entry point, or named as package.module:Class."""

import sys

import pytest
import torch
from pydantic import BaseModel, Field
from torch import nn

import tost
from tests.models.tiny import Running
from tost._plugins import allow
from tost.errors import CheckpointError, ConfigError
from tost.models import mixer_spec, mixers, model_options, model_spec, registry, token_flops
from tost.models.mixers import list_mixers
from tost.models.registry import flops_per_token, model_options_of
from tost.train.checkpoint.model import save_model


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """What a test registers is forgotten after it."""
    for one in (registry.MODELS, mixers.MIXERS):
        monkeypatch.setattr(one, "_specs", dict(one._specs))
        monkeypatch.setattr(one, "_entry_points", None)


class Pool(nn.Module):
    """A model without options, counts or anything else of tost."""

    def __init__(self, num_classes: int, in_chans: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(in_chans, num_classes), scale

    def forward(self, images):
        return self.scale * self.head(images.mean(dim=(2, 3)))


class PoolOptions(BaseModel):
    width: int = Field(2, ge=1)
    bias: bool = True


class Mean(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int, scale: float = 1.0, out_drop: float = 0.0) -> None:
        super().__init__()
        self.proj, self.scale, self.out_drop = nn.Linear(embed_dim, embed_dim), scale, out_drop

    def forward(self, x, mask=None):
        return self.scale * self.proj(x).mean(dim=1, keepdim=True).expand_as(x)


def test_options_are_checked_against_the_signature():
    tost.register_model("pool", tasks=("image_classification",), defaults={"scale": 2.0}, description="a pool")(Pool)
    model = tost.create_model("pool", num_classes=5)
    assert (model.head.out_features, model.head.in_features, model.scale) == (5, 3, 2.0)
    assert model(torch.rand(2, 3, 4, 4)).shape == (2, 5)
    assert model_spec("pool").tasks == ("image_classification",)
    assert "pool" in tost.list_models(task="image_classification")
    assert "pool" not in tost.list_models(task="language_modeling")
    assert registry.MODELS.describe("pool") == {
        "name": "pool",
        "tasks": "image_classification",
        "description": "a pool",
    }
    with pytest.raises(ConfigError, match="num_classes: missing"):
        tost.create_model("pool")
    with pytest.raises(ConfigError, match="num_clases: unknown key; did you mean num_classes"):
        tost.create_model("pool", num_clases=5)
    with pytest.raises(ConfigError, match="scale: much given; needs a number"):
        tost.create_model("pool", num_classes=5, scale="much")


def test_options_class_is_handed_to_the_factory():
    @tost.register_model("made", options=PoolOptions, defaults={"width": 3})
    def make(options):
        assert isinstance(options, PoolOptions)
        return nn.Linear(options.width, options.width, bias=options.bias)

    assert tost.create_model("made", bias=False).weight.shape == (3, 3)
    assert model_options("made", {}) == PoolOptions(width=3)
    with pytest.raises(ConfigError, match="width: 0 given; needs a whole number >= 1"):
        tost.create_model("made", width=0)


def test_names_are_unique_and_suggested():
    tost.register_model("swimming_pool")(Pool)
    with pytest.raises(ConfigError, match="there is a model 'swimming_pool' already"):
        tost.register_model("swimming_pool")(Pool)
    with pytest.raises(ConfigError, match="there is a model 'tost_mini' already"):
        tost.register_model("tost_mini")(Pool)
    with pytest.raises(ConfigError, match="did you mean 'swimming_pool'"):
        tost.create_model("swiming_pool")
    with pytest.raises(ConfigError, match=r"give a tuple, such as \('classification',\)"):
        tost.register_model("other", tasks="classification")
    tost.register_mixer("average")(Mean)
    with pytest.raises(ConfigError, match="there is a mixer 'average' already"):
        tost.register_mixer("average")(Mean)
    with pytest.raises(ConfigError, match="did you mean 'average'"):
        tost.create_model("tost_mini", mixer="averag")
    with pytest.raises(ConfigError, match="no place 'video' for a mixer; the places are: vision, sequence, language"):
        tost.register_mixer("other", places=("video",))


def test_a_model_without_options_is_saved_and_loaded(tmp_path):
    tost.register_model("pool")(Pool)
    model = tost.create_model("pool", num_classes=4)
    assert not hasattr(model, "options")
    assert model_options_of(model).num_classes == 4
    assert flops_per_token(model) is None
    save_model(model, tmp_path / "pool")
    again = tost.load_model(tmp_path / "pool")
    images = torch.rand(2, 3, 4, 4)
    assert torch.equal(again(images), model(images))
    with pytest.raises(ConfigError, match="no options to build it again with"):
        save_model(Pool(3), tmp_path / "other")


def test_a_mixer_is_available_in_every_model_that_it_fits():
    tost.register_mixer("average", description="the mean")(Mean)
    for name in ("tost_mini", "lra_image"):
        model = tost.create_model(name, depth=1, mixer="average", mixer_options={"scale": 0.5}, dropout=0.1)
        mixer = model.blocks[0].attention
        assert (type(mixer), mixer.scale, mixer.out_drop) == (Mean, 0.5, 0.1)
    assert model(torch.rand(2, 10, 1)).shape == (2, 10)
    assert mixers.MIXERS.describe("average") == {
        "name": "average",
        "models": "vision, sequence",
        "description": "the mean",
    }
    with pytest.raises(ConfigError, match=r"'average' does not fit language models; those that do: .*softmax, tssa"):
        tost.create_model("tost_lm_base", mixer="average")
    with pytest.raises(ConfigError, match=r"mixer_options.scal: unknown key; did you mean mixer_options.scale"):
        tost.create_model("tost_mini", mixer="average", mixer_options={"scal": 1})
    with pytest.raises(ConfigError, match=r"mixer_options.out_drop: unknown key"):  # the model's choice
        tost.create_model("tost_mini", mixer="average", mixer_options={"out_drop": 0.1})


def test_arithmetic_of_a_mixer_counts_if_it_is_stated():
    tost.register_mixer("average")(Mean)
    tost.register_mixer("counted", products=lambda sizes, own: sizes.embed_dim**2)(Mean)
    unknown = tost.create_model("lra_image", mixer="average", depth=1)
    assert flops_per_token(unknown) is None
    with pytest.raises(NotImplementedError, match="mixer 'average': it was registered without `products`"):
        token_flops(unknown.options)
    counted = model_options("lra_image", {"mixer": "counted", "depth": 1})
    C, M = counted.embed_dim, counted.hidden_dim
    assert token_flops(counted).total == 2 * (C + C * C + 2 * C * M)


def test_a_causal_mixer_without_a_state_trains_and_does_not_generate():
    tost.register_mixer("running", places=("language",))(Running)
    sizes = {"embed_dim": 8, "depth": 1, "num_heads": 2, "vocab_size": 11, "max_length": 12}
    model = tost.create_model("tost_lm_base", mixer="running", **sizes)
    ids = torch.randint(11, (2, 6))
    model(ids, targets=ids).backward()
    with pytest.raises(ConfigError, match="Running has no forward_with_state, so this model cannot"):
        tost.generate(model, ids, max_new_tokens=2)
    with pytest.raises(ConfigError, match="has no forward_with_state"):
        model.loss(ids, ids, chunk=4)


MODULE = """
import tost
from torch import nn
from pathlib import Path

Path({trace!r}).touch()


class Flat(nn.Module):
    def __init__(self, num_classes: int, side: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(3 * side * side, num_classes)

    def forward(self, images):
        return self.head(images.flatten(1))


@tost.register_mixer("stranger_mixer", description="nothing at all")
class Nothing(nn.Identity):
    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()

    def forward(self, x, mask=None):
        return x
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that is installed, as far as entry points go; the path exists once it was imported."""
    trace = tmp_path / "imported"
    (tmp_path / "stranger_nets.py").write_text(MODULE.format(trace=str(trace)))
    info = tmp_path / "stranger_nets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger_nets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tost.models]\nstranger_flat = stranger_nets:Flat\n[tost.mixers]\nstranger_mixer = stranger_nets:Nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield trace
    sys.modules.pop("stranger_nets", None)


def test_entry_points_are_listed_at_once_and_loaded_when_needed(package):
    assert "stranger_flat" in tost.list_models()
    assert "stranger_mixer" in list_mixers(place="vision")
    assert registry.MODELS.describe("stranger_flat")["description"] == "from the package stranger_nets"
    assert mixers.MIXERS.describe("stranger_mixer")["description"] == "from the package stranger_nets"
    with pytest.raises(ConfigError, match="did you mean 'stranger_flat'"):
        tost.create_model("stranger_flatt")
    assert not package.exists()
    assert tost.create_model("stranger_flat", num_classes=7, side=2).head.weight.shape == (7, 12)
    assert type(tost.create_model("tost_mini", mixer="stranger_mixer").blocks[0].attention).__name__ == "Nothing"
    assert mixer_spec("stranger_mixer").description == "nothing at all"


def test_a_class_is_named_only_if_its_package_is_allowed(package, tmp_path, monkeypatch):
    monkeypatch.delenv("TOST_PLUGINS", raising=False)
    with pytest.raises(ConfigError, match=r"code outside tost.*--plugin stranger_nets"):
        tost.create_model("stranger_nets:Flat", num_classes=7)
    with pytest.raises(ConfigError, match=r"code outside tost.*--plugin stranger_nets"):
        tost.create_model("tost_mini", mixer="stranger_nets:Nothing")
    assert not package.exists()
    allow("stranger_nets")
    model = tost.create_model("stranger_nets:Flat", num_classes=7)
    assert type(tost.create_model("tost_mini", mixer="stranger_nets:Nothing").blocks[0].attention).__name__ == "Nothing"
    save_model(model, tmp_path / "flat")
    assert tost.load_model(tmp_path / "flat").head.weight.shape == (7, 48)
    monkeypatch.delenv("TOST_PLUGINS")
    monkeypatch.delitem(registry.MODELS._specs, "stranger_nets:Flat")
    with pytest.raises(CheckpointError, match="code outside tost"):
        tost.load_model(tmp_path / "flat")
