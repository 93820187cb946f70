"""Models whose sequence is shared by several processes: each sees a piece, together they compute the whole."""

import pytest
import torch

from tests.models.tiny import example, make_tiny, padded, perturb
from tests.parallel.ranks import run_ranks
from tost.parallel import ContextParallel
from tost.testing import assert_close

CASES = {
    "language": ("tost_lm_base", {}),
    "plus": ("tost_lm_base_plus", {"position": "none"}),
    "plus, recomputed": ("tost_lm_base_plus", {"position": "learned", "gradient_checkpointing": True}),
    "sinusoidal": ("tost_lm_base", {"position": "sinusoidal", "conv_width": 3, "conv_at": "mlp"}),
    "minGRU": ("tost_lm_base", {"mixer": "mingru", "position": "none"}),
    "mean, pre": ("lra_listops", {"dropout": 0.0}),
    "cls, post, learned": ("lra_image", {"pooling": "cls", "norm": "post", "position": "learned"}),
    "recomputed": ("lra_image", {"gradient_checkpointing": True}),
}


def build(name, overrides):
    torch.manual_seed(0)
    model = perturb(make_tiny(name, **overrides).double())
    return model, *padded(example(model, length=10, dtype=torch.float64), 3, 1)


def whole(case, with_mask):
    """Logits and gradients of one process."""
    model, x, mask = build(*CASES[case])
    arguments = (x, mask) if with_mask else (x[:, 3:13],)
    logits = model(*arguments)
    (logits[mask] if with_mask and logits.dim() == 3 else logits).square().sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def piece(case, with_mask):
    """The same on this rank's piece; a classifier's loss is the same on every rank and counts once."""
    model, x, mask = build(*CASES[case])
    with ContextParallel() as context:
        arguments = (x, mask) if with_mask else (x[:, 3:13],)
        arguments = tuple(context.split(tensor) for tensor in arguments)
        logits = model(*arguments)
        shared = logits.dim() == 2
        loss = (logits[arguments[1]] if with_mask and not shared else logits).square().sum()
        (loss / context.size if shared else loss).backward()
        logits = logits if shared else context.unsplit(logits)
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def too_long():
    """What each rank says of a sequence that only the last one sees the end of."""
    model, *_ = build(*CASES["language"])
    with ContextParallel() as context:
        try:
            model(context.split(torch.zeros(1, 25, dtype=torch.int64)))
        except ValueError as error:
            return str(error)
    return ""


def continued():
    """Logits and position of a shared sequence that continues a prompt which every rank has seen."""
    model, x, _ = build(*CASES["language"])
    ids = x[:, 3:13]
    with torch.no_grad():
        _, state = model.forward_with_state(ids[:, :4])
        with ContextParallel() as context:
            logits, state = model.forward_with_state(context.split(ids[:, 4:]), state)
            logits = context.unsplit(logits)
    return logits - model(ids)[:, 4:], state.position


def job():
    shared = {(case, with_mask): piece(case, with_mask) for case in CASES for with_mask in (False, True)}
    return shared, too_long(), continued()


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_shared_sequence_gives_the_logits_and_gradients_of_the_whole(size, tmp_path):
    ranks = run_ranks(size, tmp_path, job)
    for key in ranks[0][0]:
        logits, gradients = whole(*key)
        real = build(*CASES[key[0]])[2] if key[1] and logits.dim() == 3 else ...
        for shared, *_ in ranks:
            assert_close(f"{key} logits", shared[key][0][real], logits[real], 1e-10)
        for name, expected in gradients.items():
            parts = [shared[key][1][name] for shared, *_ in ranks]
            assert_close(f"{key} {name}", sum(part for part in parts if part is not None), expected, 1e-10)
    for _, message, (difference, position) in ranks:
        assert "reaches position 25, but this model has 24 positions" in message
        assert difference.abs().max() < 1e-12
        assert position.tolist() == [10, 10]
