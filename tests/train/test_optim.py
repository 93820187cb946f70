"""Which parameters decay: matrices, and nothing else unless asked."""

import pytest
import torch

import tost
from tost.train.config import OptimConfig
from tost.train.optim import build_optimizer, parameter_groups, set_rate


def model():
    return torch.nn.Sequential(
        torch.nn.Embedding(5, 8), tost.CausalTSSAttention(8, 2, 16, in_bias=True), torch.nn.LayerNorm(8)
    )


def names(module, groups, decay):
    by_id = {id(p): name for name, p in module.named_parameters()}
    return {by_id[id(p)] for group in groups if bool(group["weight_decay"]) == decay for p in group["params"]}


def test_temperature_bias_and_vectors_do_not_decay():
    module = model()
    groups = parameter_groups(module, OptimConfig(lr=1e-3, weight_decay=0.1))
    assert names(module, groups, True) == {"0.weight", "1.proj_in.weight", "1.proj_out.weight"}
    assert "1.temperature" in names(module, groups, False)
    assert "1.position_bias" in names(module, groups, False)
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))


def test_the_authors_vision_training_decays_them():
    module = model()
    groups = parameter_groups(module, OptimConfig(lr=1e-3, weight_decay=0.1, decay_statistics=True))
    assert {"1.temperature", "1.position_bias"} <= names(module, groups, True)


def test_frozen_parameters_are_left_out_and_no_group_is_empty():
    module = torch.nn.LayerNorm(4)
    module.bias.requires_grad_(False)
    groups = parameter_groups(module, OptimConfig(lr=1e-3))
    assert [len(group["params"]) for group in groups] == [1]


def test_optimizer_is_adamw_with_the_given_numbers():
    optimizer = build_optimizer(model(), OptimConfig(lr=3e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    assert optimizer.defaults["eps"] == pytest.approx(1e-6)


class Exempting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 4))
        self.inner = torch.nn.Linear(4, 4)
        self.inner.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 4))
        self.temperature = torch.nn.Parameter(torch.ones(2))

    def no_weight_decay(self):
        return {"cls_token", "temperature"}


def test_the_model_can_exempt_parameters_by_their_full_name():
    module = Exempting()
    groups = parameter_groups(module, OptimConfig(lr=1e-3, weight_decay=0.1))
    assert names(module, groups, True) == {"inner.weight", "inner.cls_token"}
    groups = parameter_groups(module, OptimConfig(lr=1e-3, weight_decay=0.1, decay_statistics=True))
    assert names(module, groups, True) == {"inner.weight", "inner.cls_token", "temperature"}


def test_everything_can_decay():
    module = Exempting()
    (group,) = parameter_groups(module, OptimConfig(lr=1e-3, weight_decay=0.1, decay_all=True))
    assert group["weight_decay"] == 0.1
    assert len(group["params"]) == len(list(module.parameters()))


def test_image_models_spare_tokens_positions_and_vectors():
    for name in ("tost_mini", "vit_mini", "crate_mini"):
        with torch.device("meta"):
            module = tost.create_model(name, num_classes=10)
        groups = parameter_groups(module, OptimConfig(lr=1e-3, weight_decay=0.1))
        spared = names(module, groups, False)
        assert "cls_token" in spared
        assert {n for n, p in module.named_parameters() if p.dim() < 2} <= spared
        assert "head.weight" in names(module, groups, True)


def test_what_learns_slowly_has_its_own_rate_only_if_one_is_given():
    module = tost.create_model("lra_image_s4", embed_dim=16, depth=1, max_length=16)
    kernels = {id(p) for name, p in module.named_parameters() if name in module.slow_parameters()}
    assert kernels
    plain = parameter_groups(module, OptimConfig(lr=1e-2, weight_decay=0.1))
    assert all("scale" not in group for group in plain)
    optimizer = build_optimizer(module, OptimConfig(lr=1e-2, weight_decay=0.1, slow_lr=1e-3))
    set_rate(optimizer, 5e-3)
    for group in optimizer.param_groups:
        slow = {id(p) in kernels for p in group["params"]}
        assert len(slow) == 1
        assert group["lr"] == pytest.approx(5e-4 if slow.pop() else 5e-3)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(module.parameters()))
