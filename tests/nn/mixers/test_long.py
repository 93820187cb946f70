"""What every mixer of sequences keeps to, whatever its definition.

A mask is a deletion for all of them, with one exception that cannot be avoided:

| mixer | where not | why |
|---|---|---|
| Reformer | `num_buckets` not given, or ``form="lra"`` | buckets, or chunks, are counted by the length with padding |
"""

import io

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nn.mixers.long_mixers import LONGEST, MIXERS, C, H, make, tokens
from tost.errors import BackendError
from tost.testing import assert_close

every_mixer = pytest.mark.parametrize("name", MIXERS)
DELETES = [name for name in MIXERS if name not in ("reformer_lra",)]
N = 20


@pytest.mark.parametrize("name", DELETES)
@settings(max_examples=8)
@given(
    real=st.lists(st.booleans(), min_size=N, max_size=N).filter(lambda real: sum(real) > 3),
    filler=st.sampled_from([7.0, float("nan"), float("inf")]),
)
def test_mask_is_deletion(name, real, filler):
    torch.manual_seed(0)
    module, x, mask = make(name), tokens(length=N), torch.tensor([real, sorted(real, reverse=True)])
    x[~mask] = filler
    with torch.no_grad():
        y = module(x, mask)
    for sequence, row, out in zip(x, mask, y, strict=True):
        assert_close("real tokens", out[row], module(sequence[row].unsqueeze(0))[0], 1e-10)


@every_mixer
def test_content_of_padding_changes_nothing_and_gets_no_gradient(name):
    module, x = make(name), tokens(length=N).requires_grad_()
    mask = torch.rand(2, N) < 0.6
    with torch.no_grad():
        other = torch.where(mask.unsqueeze(-1), x, 1e3 * torch.randn_like(x))
    y = module(x, mask)
    assert torch.equal(y[mask], module(other, mask)[mask])
    assert torch.equal(y[~mask], y[~mask][:1].expand(int((~mask).sum()), C)), "padding gets what no token had a part in"
    y[mask].square().sum().backward()
    assert not x.grad[~mask].any()
    assert x.grad[mask].any()


@every_mixer
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 9, 31, 50, LONGEST])
def test_every_length_runs_forward_and_backward(name, length):
    module, x = make(name), tokens(length=length).requires_grad_()
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length // 2 :] = False
    for chosen in (None, mask):
        y = module(x, chosen)
        assert y.shape == x.shape
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        assert y.isfinite().all()
        assert gradient.isfinite().all()


@every_mixer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sequence_of_padding_only_gives_finite_results(name, dtype):
    module, x = make(name, dtype), tokens(dtype=dtype).requires_grad_()
    mask = torch.tensor([[False] * N, [True] * N])
    y = module(x, mask)
    assert y.isfinite().all()
    y.float().square().sum().backward()
    assert all(variable.grad.isfinite().all() for variable in (x, *module.parameters()))
    assert not x.grad[0].any()
    assert x.grad[1].any()


@every_mixer
def test_gradients_are_those_of_finite_differences(name):
    torch.manual_seed(3)
    options = {"eps": 0.0} if name == "performer" else {}
    module, x = make(name, **options), tokens(1, 6).requires_grad_()
    mask = torch.tensor([[True, True, False, True, True, True]])
    names = [key for key, parameter in module.named_parameters() if parameter.numel() <= 400]

    def run(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x, mask))

    assert torch.autograd.gradcheck(run, (x, *(module.get_parameter(key) for key in names)), fast_mode=True)


@every_mixer
def test_every_parameter_gets_a_gradient(name):
    module = MIXERS[name](C, H)
    module(tokens(2, LONGEST, torch.float32)).square().sum().backward()
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@every_mixer
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.06), (torch.float32, 1e-4)])
def test_every_dtype_follows_float64(name, dtype, bound):
    torch.manual_seed(1)
    # The same weights, as the short dtype has them; hashes and features of inputs that it can hold.
    short, x = make(name, torch.float32).to(dtype), tokens().to(dtype)
    exact = MIXERS[name](C, H, dtype=torch.float64)
    exact.load_state_dict(short.state_dict())
    y = short(x.clone().requires_grad_())
    assert y.dtype == dtype
    if not name.startswith("reformer"):  # a bucket may change with the last digit
        assert_close("y", y, exact(x.double()), bound)
    y.float().sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in short.parameters())


@every_mixer
def test_autocast_gives_gradients_of_the_parameters_dtype(name):
    module = make(name, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(tokens(dtype=torch.float32))
    assert y.isfinite().all()
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())


@every_mixer
def test_seed_decides_everything_and_the_file_keeps_it(name):
    def build(seed):
        torch.manual_seed(seed)
        return MIXERS[name](C, H)

    first, second, other, x = build(5), build(5), build(6), tokens(dtype=torch.float32)
    assert torch.equal(first(x), first(x))
    assert torch.equal(first(x), second(x))
    assert not torch.equal(first(x), other(x))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(first(x), other(x))


@every_mixer
def test_mixer_can_be_made_on_the_meta_device(name):
    with torch.device("meta"):
        module = MIXERS[name](C, H)
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    assert {key for key, _ in module.named_buffers()} <= set(module.state_dict())
    assert module(torch.empty(2, 9, C, device="meta")).is_meta


# In the fast tests one of two that share their code stands for both.
_SIBLINGS = ("performer_relu", "reformer_lra", "s4d")
COMPILED = [
    pytest.param(name, backend, marks=[pytest.mark.slow] if backend == "aot_eager" or name in _SIBLINGS else [])
    for name in MIXERS
    if name not in ("tssa", "softmax")
    for backend in ("eager", "aot_eager")
]


@pytest.mark.parametrize(("name", "backend"), COMPILED)
def test_mixers_compile_without_a_break(name, backend):
    torch.compiler.reset()  # the code of a forward is compiled anew for every kind of mixer, up to a limit
    module, x = make(name, torch.float32), tokens(dtype=torch.float32)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    # With a mask: what looks at it in eager mode must not do so here.
    masks = [torch.rand(2, N) < 0.7, None] if backend == "aot_eager" else [torch.rand(2, N) < 0.7]
    for mask in masks:
        y = compiled(x, mask)
        assert_close("y", y, module(x, mask), 1e-5)
        y.sum().backward()


@pytest.mark.parametrize("name", ["performer", "reformer"])
def test_redrawing_happens_in_training_only_and_follows_the_seed(name):
    module, x = make(name, torch.float32, redraw=True), tokens(dtype=torch.float32)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    before = module(x)
    draw = module.redraw_directions if name == "performer" else module.redraw_rotations
    draw(torch.Generator().manual_seed(1))
    first = module(x)
    draw(torch.Generator().manual_seed(2))
    assert not torch.equal(first, before)
    draw(torch.Generator().manual_seed(1))
    assert torch.equal(module(x), first)


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "tssa"])
def test_dropout_acts_in_training_only(name):
    option = "drop" if name.startswith("s4") else "out_drop"
    module, x = make(name, torch.float32, **{option: 0.5}), tokens(dtype=torch.float32)
    assert not torch.equal(module(x), module(x))
    plain = MIXERS[name](C, H)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module.eval()(x), plain(x))


@pytest.mark.parametrize("name", ["linformer", "bigbird", "reformer"])
def test_dropout_of_weights_acts_in_training_only(name):
    module, x = make(name, torch.float32, attn_drop=0.5), tokens(dtype=torch.float32)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


@every_mixer
def test_bad_arguments_are_refused(name):
    with pytest.raises(ValueError, match=r"embed_dim \(10\) must be divisible by num_heads \(3\)"):
        MIXERS[name](10, 3)
    module = make(name)
    with pytest.raises(ValueError, match=r"mask has dtype torch\.int64; it must be torch\.bool"):
        module(tokens(), torch.ones(2, N, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("performer", {"num_features": 0}, "num_features=0 is not possible"),
        ("performer", {"kernel": "cosine"}, "kernel='cosine' is not known"),
        ("linformer", {"share": "all"}, "share='all' is not known"),
        ("linformer", {"rank": 0}, "max_length=64 and rank=0 must both be at least 1"),
        ("bigbird", {"block_size": 0}, "block_size=0, num_random=1"),
        ("reformer", {"num_buckets": 3}, "num_buckets=3 is not an even number from 2 to 1024"),
        ("reformer", {"form": "trax"}, "form='trax' is not known"),
        ("reformer", {"num_hashes": 0}, "num_hashes=0 and chunk_size=4 must both be at least 1"),
        ("s4", {"state_size": 3}, "state_size=3 is not possible: states come in pairs"),
        ("s4", {"max_length": None}, "kernel='s4' needs max_length"),
        ("s4d", {"step": (0.1, 0.01)}, r"step=\(0.1, 0.01\) is not a range of positive numbers"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        MIXERS[name](C, H, **options)


@pytest.mark.parametrize("name", ["linformer", "s4"])
def test_sequences_end_at_max_length(name):
    with pytest.raises(ValueError, match=f"has {LONGEST + 1} tokens, but .* for max_length={LONGEST}"):
        make(name)(tokens(length=LONGEST + 1))


@pytest.mark.parametrize("name", ["s4", "bigbird"])
def test_half_a_sequence_is_refused(name, monkeypatch):
    monkeypatch.setattr("tost.parallel.active", lambda: object())
    with pytest.raises(BackendError, match="needs whole sequences"):
        make(name)(tokens())


@pytest.mark.parametrize("name", ["softmax", "mssa"])
def test_kernel_always_has_something_to_attend_to(name, monkeypatch):
    # Not every implementation of the softmax, nor every exported graph, survives a row without a single entry.
    masks, kernel = [], F.scaled_dot_product_attention

    def watched(*arguments, attn_mask, **options):
        masks.append(attn_mask)
        return kernel(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    make(name)(tokens(), torch.tensor([[False] * N, [True] + [False] * (N - 1)]))
    assert masks[0].sum(dim=-1).flatten().tolist() == [N, 1]


@pytest.mark.parametrize("name", ["tssa", "softmax", "xca", "mssa", "linear", "performer", "performer_relu"])
def test_order_of_tokens_carries_over(name):
    module, x, order = make(name), tokens(), torch.randperm(N)
    assert_close("y", module(x[:, order]), module(x)[:, order], 1e-12)


@pytest.mark.parametrize("name", ["softmax", "xca", "mssa"])
def test_half_precision_has_room_for_features_that_are_zero_or_large(name):
    module = MIXERS[name](C, H, in_bias=False, dtype=torch.float16)
    assert module(torch.zeros(1, 4, C, dtype=torch.float16)).isfinite().all()
    assert module(torch.full((1, 64, C), 200.0, dtype=torch.float16)).isfinite().all()
