"""The mixers against their definitions, written out with matrices of all pairs."""

import math

import pytest
import torch
import torch.nn.functional as F

import tost._torchvision  # noqa: F401 - before timm, which imports torchvision

# isort: split
from timm.models.xcit import XCA

from tests.nn.mixers.long_mixers import MIXERS, C, D, H, finish, heads, make, perturb, tokens
from tost.nn.mixers import bigbird_pattern, hash_buckets, orthogonal_directions, positive_features
from tost.testing import assert_close


def with_gradients(module, x, definition, bound=1e-10):
    """Compare the output for a batch, and all gradients, with a definition for one sequence [N, C]."""
    x = x.requires_grad_()
    variables = (x, *module.parameters())
    expected = torch.stack([definition(sequence) for sequence in x])
    actual, cotangent = module(x), torch.randn_like(expected)
    assert_close("y", actual, expected, bound)
    wanted = torch.autograd.grad(expected, variables, cotangent)
    for got, want in zip(torch.autograd.grad(actual, variables, cotangent), wanted, strict=True):
        assert want.abs().max() > 0
        assert_close("gradient", got, want, 10 * bound)


def softmax(module, q, k, v):
    return (q @ k.mT / math.sqrt(D)).softmax(-1) @ v


def cross_covariance(module, q, k, v):
    q, k = (part / part.square().sum(1, keepdim=True).sqrt().clamp_min(1e-12) for part in (q, k))
    return v @ (module.temperature[:, None, None] * (q.mT @ k)).softmax(-1).mT


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("name", "form"), [("softmax", softmax), ("mssa", softmax), ("xca", cross_covariance)])
def test_attention_to_all_is_its_definition(name, form, biased):
    module = make(name, in_bias=biased, out_bias=biased)
    assert (module.proj_in.bias is not None) == (module.proj_out.bias is not None) == biased

    def definition(x):
        parts = heads(module, x, module.parts)
        return finish(module, form(module, *(parts if len(parts) == 3 else 3 * parts)))

    with_gradients(module, tokens(), definition, 1e-12)


def test_xca_is_that_of_timm():
    theirs, ours, x = perturb(XCA(C, H, qkv_bias=True)).double(), make("xca"), tokens()
    state = {name.replace("qkv", "proj_in"): value for name, value in theirs.state_dict().items()}
    state = {name.replace("proj.", "proj_out."): value for name, value in state.items()}
    ours.load_state_dict(state | {"temperature": state["temperature"].flatten()})
    assert_close("y", ours(x), theirs(x), 1e-14)


def by_features(module, phi_q, phi_k, eps):
    def definition(x):
        q, k, v = heads(module, x, 3)
        weights = phi_q(q) @ phi_k(k).mT  # [H, N, N]
        return finish(module, weights @ v / (weights.sum(dim=-1, keepdim=True) + eps))

    return definition


def test_linear_attention_is_its_quadratic_form():
    def phi(x):
        return torch.where(x > 0, x + 1, x.exp())

    module = make("linear")
    with_gradients(module, tokens(), by_features(module, phi, phi, 1e-6))


def test_performer_is_the_quadratic_form_of_its_features():
    module = make("performer", eps=0.0)
    scale = D**-0.25

    def phi(x):
        return positive_features(scale * x, module.directions)

    with_gradients(module, tokens(), by_features(module, phi, phi, 0.0))


def test_performer_with_eps_is_the_quadratic_form_of_shifted_features():
    module, x = make("performer", eps=1e-2), tokens(1)
    q, k, v = heads(module, x[0], 3)
    exponents = [D**-0.25 * y @ module.directions.T - D**-0.5 * y.square().sum(-1, keepdim=True) / 2 for y in (q, k)]
    phi_q = (exponents[0] - exponents[0].amax(-1, keepdim=True)).exp() + 1e-2
    phi_k = (exponents[1] - exponents[1].amax((-2, -1), keepdim=True)).exp() + 1e-2
    weights = phi_q @ phi_k.mT
    expected = finish(module, weights @ v / weights.sum(-1, keepdim=True))
    assert_close("y", module(x)[0], expected, 1e-12)


def test_performer_of_the_arena_has_rectified_features():
    module = make("performer_relu")
    assert module.directions is None
    with_gradients(
        module, tokens(), by_features(module, lambda q: q.relu() + 1e-3, lambda k: k.relu() + 1e-3, 0.0), 1e-9
    )


@pytest.mark.parametrize("num_features", [3, 4, 10])
def test_random_features_estimate_the_exponential_without_bias(num_features):
    generator = torch.Generator().manual_seed(0)
    x, y = 0.4 * torch.randn(2, 5, 4, dtype=torch.float64, generator=generator)
    count = 1500
    estimates = torch.zeros(count, 5, 5, dtype=torch.float64)
    for i in range(count):
        drawn = orthogonal_directions(num_features, 4, dtype=torch.float64, generator=generator)
        estimates[i] = positive_features(x, drawn) @ positive_features(y, drawn).T
    error = estimates.mean(dim=0) - (x @ y.T).exp()
    assert (error.abs() < 4.5 * estimates.std(dim=0) / math.sqrt(count)).all()


def test_directions_are_orthogonal_in_blocks_and_as_long_as_gaussian_vectors():
    directions = orthogonal_directions(10, 4, dtype=torch.float64)
    for block in directions.split(4):
        gram = block @ block.T
        assert_close("gram", gram, gram.diagonal().diag(), 1e-12)
    many = orthogonal_directions(4000, 4, generator=torch.Generator().manual_seed(0))
    assert abs(many.square().sum(1).mean() - 4) < 0.2
    assert abs(many.square().sum(1).var() - 8) < 1.5  # of a chi-square distribution
    assert many.mean(dim=0).abs().max() < 0.06
    # In one dimension there are but two directions, and both must occur.
    assert {float(orthogonal_directions(1, 1).sign()) for _ in range(30)} == {-1.0, 1.0}


@pytest.mark.parametrize("share", ["kv", "heads", "none"])
def test_linformer_is_its_low_rank_form(share):
    module = make("linformer", share=share)
    assert module.mixtures.shape == (1 if share == "kv" else 2, H if share == "none" else 1, 64, 5)
    module = make("linformer", share=share, max_length=20)

    def definition(x):
        q, k, v = heads(module, x, 3)
        mixed = []
        for h in range(H):
            e, f = (module.mixtures[i, h if share == "none" else 0] for i in (0, -1))
            mixed.append((q[h] @ (e.T @ k[h]).T / math.sqrt(D)).softmax(-1) @ (f.T @ v[h]))
        return finish(module, torch.stack(mixed))

    with_gradients(module, tokens(), definition)


def stated_pattern(draws, count, limit=None):
    """Check the pattern of `count` blocks against what it is said to be, and return it."""
    pattern = bigbird_pattern(draws, count, random_blocks=limit)
    for head in pattern:
        for i in range(count):
            seen = set(head[i].nonzero().flatten().tolist())
            if i in (0, count - 1):
                assert seen == set(range(count))
                continue
            fixed = {0, i - 1, i, i + 1, count - 1}
            others = set(range(count if limit is None else min(limit, count))) - fixed
            assert fixed <= seen
            assert seen - fixed <= others
            assert len(seen - fixed) == min(draws.shape[2], len(others))
    return pattern


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 30])
@pytest.mark.parametrize("limit", [None, 4])
def test_bigbird_pattern_is_the_stated_one(count, limit):
    stated_pattern(torch.randint(2**31, (2, 256, 3)), count, limit)


def test_bigbird_draws_all_blocks_alike_and_heads_apart():
    pattern = bigbird_pattern(torch.randint(2**31, (4000, 256, 2), generator=torch.Generator().manual_seed(0)), 10)
    shares = pattern[:, 5].double().mean(dim=0)
    assert torch.equal(shares[[0, 4, 5, 6, 9]], torch.ones(5, dtype=torch.float64))
    assert (shares[[1, 2, 3, 7, 8]] - 2 / 5).abs().max() < 0.04
    assert not torch.equal(pattern[0], pattern[1])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 14, 20, 26])
@pytest.mark.parametrize("options", [{}, {"num_random": 3}, {"num_random": 0}, {"random_length": 7}])
def test_bigbird_is_softmax_attention_under_its_pattern(length, options):
    module = make("bigbird", **options)
    blocks = -(-length // 3)
    limit = -(-options["random_length"] // 3) if "random_length" in options else None
    pattern = stated_pattern(module.draws, blocks, limit)
    seen = pattern.repeat_interleave(3, 1).repeat_interleave(3, 2)[:, :length, :length]

    def definition(x):
        q, k, v = heads(module, x, 3)
        scores = (q @ k.mT / math.sqrt(D)).masked_fill(~seen, -math.inf)
        return finish(module, scores.softmax(-1) @ v)

    if length > 1:
        with_gradients(module, tokens(length=length), definition)
    else:
        assert_close("y", module(x := tokens(length=1))[0], definition(x[0]), 1e-12)


def lsh(module, q, v, visible):
    """Attention of the paper's form over pairs that are visible, [H, N, N], with its log-sum-exp."""
    scores = q @ F.normalize(q, dim=-1).mT
    alone = visible.sum(-1, keepdim=True) == 1
    visible = torch.where(alone, visible, visible & ~torch.eye(q.shape[1], dtype=torch.bool))
    scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_lsh_attention_in_one_chunk_and_one_bucket_is_exact():
    module = make("reformer", chunk_size=32, num_hashes=1)
    module.rotations.zero_()  # everything ties, so everything goes to the first bucket
    everything = torch.ones(H, 20, 20, dtype=torch.bool)

    def definition(x):
        q, v = heads(module, x, 2)
        return finish(module, lsh(module, q, v, everything)[0])

    with_gradients(module, tokens(), definition)


@pytest.mark.parametrize("rounds", [1, 3])
def test_lsh_attention_sees_its_bucket_in_two_chunks(rounds):
    module = make("reformer", num_hashes=rounds)
    N = 18

    def definition(x):
        q, v = heads(module, x, 2)
        buckets = hash_buckets(q[None], module.rotations)[0]  # [H, R, N]
        outputs, weights = [], []
        for r in range(rounds):
            visible = torch.zeros(H, N, N, dtype=torch.bool)
            for h in range(H):
                order = sorted(range(N), key=lambda n, h=h, r=r: (int(buckets[h, r, n]), n))
                chunk = {n: i // 4 for i, n in enumerate(order)}
                for n in range(N):
                    for m in range(N):
                        near = chunk[n] - chunk[m] in (0, 1)
                        visible[h, n, m] = near and buckets[h, r, n] == buckets[h, r, m]
            o, z = lsh(module, q, v, visible)
            alone = visible.sum(-1) == 1
            outputs.append(o)
            weights.append(torch.where(alone, -5e4, z))
        shares = torch.stack(weights).softmax(0)
        return finish(module, (shares.unsqueeze(-1) * torch.stack(outputs)).sum(0))

    with_gradients(module, tokens(length=N), definition)


def test_lsh_of_the_arena_is_its_ten_chunks():
    module, N = make("reformer_lra"), 23
    assert module.proj_in.bias is None
    assert isinstance(module.proj_out, torch.nn.Identity)
    assert module.rotations.shape == (1, 1, D, 5)

    def definition(x):
        q, v = heads(module, x, 2)
        buckets = hash_buckets(q[None], module.rotations)[0, :, 0]
        mixed = []
        for h in range(H):
            order = [*sorted(range(N), key=lambda n, h=h: (int(buckets[h, n]), n)), *[-1] * 7]
            chunk = {n: i // 3 for i, n in enumerate(order)}
            seen = torch.tensor([[(chunk[n] - chunk[m]) % 10 in (0, 1) for m in range(N)] for n in range(N)])
            scores = (q[h] @ q[h].T * math.sqrt(D)).masked_fill(~seen, -math.inf)
            mixed.append(scores.softmax(-1) @ v[h])
        return torch.stack(mixed).transpose(0, 1).flatten(1)

    with_gradients(module, tokens(length=N), definition)


def test_number_of_buckets_follows_the_length():
    module = MIXERS["reformer"](C, H, chunk_size=64, num_buckets=None)
    lengths = (1, 64, 100, 128, 1000, 1024, 2000, 4000, 16_384, 10**6)
    assert [module.buckets_for(n) for n in lengths] == [2, 2, 2, 4, 16, 32, 32, 64, 512, 1024]
