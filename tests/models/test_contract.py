"""What every registered model keeps to, whatever it is for."""

import io
import math

import pytest
import torch

import tost
from tests.models.tiny import distinct, example, make_tiny, perturb
from tost.models import model_options

# Trainable parameters as published: those of text models without learned positions, those of image models with them.
PARAMETERS = {
    "crate_base_patch16_224": 22_796_008,
    "crate_large_patch16_224": 77_641_192,
    "crate_mini": 375_166,
    "crate_small_patch16_224": 13_116_328,
    "crate_tiny_patch16_224": 6_090_856,
    "gpt2_base": 123_587_328,
    "gpt2_large": 772_271_360,
    "gpt2_medium": 353_551_360,
    "lra_image": 211_136,
    "lra_listops": 16_842_800,
    "lra_pathfinder": 75_398,
    "lra_pathx": 75_398,
    "lra_retrieval": 1_157_400,
    "lra_text": 2_964_496,
    "softmax_mini": 375_274,
    "tost_large_patch16_224": 160_286_920,
    "tost_large_patch8_224": 160_123_432,
    "tost_lm_base": 109_597_584,
    "tost_lm_base_plus": 117_478_272,
    "tost_lm_large": 655_136_720,
    "tost_lm_large_plus": 721_082_240,
    "tost_lm_medium": 303_662_464,
    "tost_lm_medium_plus": 331_755_520,
    "tost_medium_patch16_224": 71_481_064,
    "tost_medium_plus_patch16_224": 77_907_688,
    "tost_medium_patch8_224": 71_408_936,
    "tost_medium_plus_patch8_224": 77_835_560,
    "tost_mini": 375_490,
    "tost_mini_plus": 371_266,
    "tost_small_24_patch16_224": 40_344_664,
    "tost_small_24_patch8_224": 40_304_392,
    "tost_sequence": 110_496,
    "tost_small_patch16_224": 22_589_944,
    "tost_small_plus_patch16_224": 24_410_104,
    "tost_small_patch8_224": 22_549_672,
    "tost_small_plus_patch8_224": 24_369_832,
    "tost_tiny_24_patch16_224": 10_223_008,
    "tost_tiny_24_patch8_224": 10_213_240,
    "tost_tiny_patch16_224": 5_769_328,
    "tost_tiny_plus_patch16_224": 6_237_040,
    "tost_tiny_patch8_224": 5_759_560,
    "tost_tiny_plus_patch8_224": 6_227_272,
    "vit_base_patch16_224": 86_567_656,
    "vit_mini": 372_474,
    "vit_small_patch16_224": 22_050_664,
    "xcit_medium_nolpi_patch16_224": 84_088_552,
    "xcit_mini": 375_294,
    "xcit_small_nolpi_patch16_224": 26_138_104,
}

every_name = pytest.mark.parametrize("name", tost.list_models())
every_model = pytest.mark.parametrize("name", distinct())


def gradients_of(model, x):
    model.zero_grad()
    torch.manual_seed(1)
    logits = model(x)
    (logits.logsumexp(-1).square().mean() + logits.square().mean()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@every_model
def test_forward_is_finite_and_of_the_promised_shape(name):
    model = make_tiny(name)
    x = example(model)
    logits = model(x)
    options = model.options
    assert logits.shape == ((2, 9, options.vocab_size) if hasattr(model, "forward_with_state") else (2, 3))
    assert torch.isfinite(logits).all()
    assert logits.std() > 1e-4


@every_model
def test_every_parameter_gets_a_gradient(name):
    model = make_tiny(name, dropout=0.0)
    x = example(model, length=getattr(model.options, "max_length", 9))
    for parameter, gradient in gradients_of(model, x).items():
        assert gradient is not None, f"{parameter} is not used"
        assert torch.isfinite(gradient).all(), parameter
        assert gradient.abs().max() > 0, f"{parameter} has no effect"


@every_model
def test_gradient_checkpointing_changes_no_gradient(name):
    plain = perturb(make_tiny(name, dropout=0.1))
    thrifty = make_tiny(name, dropout=0.1, gradient_checkpointing=True)
    thrifty.load_state_dict(plain.state_dict())
    x = example(plain)
    expected = gradients_of(plain, x)
    runs = []
    for block in thrifty.blocks:
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    for parameter, gradient in gradients_of(thrifty, x).items():
        assert torch.equal(gradient, expected[parameter]), parameter
    assert len(runs) == 2 * len(thrifty.blocks), "nothing was computed again"


@every_model
def test_state_dict_makes_the_same_model_again(name):
    model = perturb(make_tiny(name)).eval()
    x = example(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = make_tiny(name).eval()
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), model(x))
    tensors = list(model.state_dict().values())
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors), "a weight is stored under two names"


@every_model
def test_model_builds_and_runs_on_the_meta_device(name):
    with torch.device("meta"):
        model = make_tiny(name)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    lost = {key for key, _ in model.named_buffers()} - set(model.state_dict())
    assert not lost, "a buffer that is not saved would be lost between the meta device and a real one"
    assert model(example(model).to("meta")).is_meta


@every_name
def test_parameter_count_is_the_published_one(name):
    with torch.device("meta"):
        model = tost.create_model(name)
    assert model.num_parameters() == PARAMETERS[name]
    total = sum(math.prod(parameter.shape) for parameter in model.parameters())
    assert model.num_parameters(positions=True) == total


@every_model
def test_options_describe_the_model_completely(name):
    model = make_tiny(name)
    again = type(model)(model.options)
    assert model.options == again.options == model_options(name, model.options.model_dump())
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in again.state_dict().items()}


@every_model
def test_initial_weights_follow_the_seed(name):
    torch.manual_seed(5)
    first = make_tiny(name).state_dict()
    torch.manual_seed(5)
    second = make_tiny(name).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


@every_model
def test_reduced_precision_runs_and_stays_near(name):
    model = perturb(make_tiny(name), 0.1).eval()
    x = example(model)
    expected = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(x)
    assert (cast.float() - expected).norm() < 0.1 * expected.norm()
    half = model.to(torch.bfloat16)
    logits = half(x.to(torch.bfloat16) if x.is_floating_point() else x)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() < 0.1 * expected.norm()


@every_model
def test_dropout_acts_in_training_only(name):
    model = perturb(make_tiny(name, dropout=0.5))
    x = example(model)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("tost_lm_base", "aot_eager"),
        ("tost_lm_base_plus", "aot_eager"),
        ("lra_listops", "aot_eager"),
        pytest.param("gpt2_base", "aot_eager", marks=pytest.mark.slow),
        pytest.param("tost_lm_base_plus", "inductor", marks=pytest.mark.slow),
        pytest.param("tost_lm_base", "inductor", marks=pytest.mark.slow),
    ],
)
def test_model_compiles_without_a_break(name, backend):
    model = perturb(make_tiny(name, depth=1)).eval()
    x = example(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    expected = gradients_of(model, x)
    for parameter, gradient in gradients_of(compiled, x).items():
        key = parameter.removeprefix("_orig_mod.")
        torch.testing.assert_close(gradient, expected[key], rtol=1e-3, atol=1e-5)
