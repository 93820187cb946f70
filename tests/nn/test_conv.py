"""Convolutions of sequences and grids: what they compute, alone, in pieces, around padding, and between processes."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.parallel.ranks import run_ranks
from tost.nn import CausalConvolution, GridConvolution, SequenceConvolution
from tost.nn.mixers.base import mix
from tost.parallel import ContextParallel
from tost.parallel.window import last_tokens
from tost.testing import assert_close

B, C = 2, 6
# Pieces of 9 tokens: windows of 3 reach over short pieces, over empty ones, and over the beginning.
LENGTHS = ((3, 3, 3), (1, 0, 8), (7, 1, 1), (0, 9, 0))


def make(width=4, dtype=torch.float64, embed_dim=C):
    torch.manual_seed(0)
    conv = CausalConvolution(embed_dim, width=width, dtype=dtype)
    with torch.no_grad():
        conv.weight.normal_()
    return conv


def tokens(length, dtype=torch.float64, embed_dim=C):
    return torch.randn(B, length, embed_dim, dtype=dtype)


def written_out(conv, x):
    """The sum over taps, token by token."""
    K, y = conv.width, torch.zeros_like(x)
    for n, k in itertools.product(range(x.shape[1]), range(K)):
        if n - k >= 0:
            y[:, n] += conv.weight[:, K - 1 - k].detach() * x[:, n - k]
    return y


@pytest.mark.parametrize("width", [2, 3, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 30])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_each_token_gets_a_weighted_sum_of_the_last_ones(width, length, dtype, bound):
    conv, x = make(width, dtype), tokens(length, dtype)
    assert_close("y", conv(x), written_out(conv, x), bound)
    assert conv(x).dtype == dtype


@pytest.mark.parametrize("length", [1, 5, 40, 3000])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_gradients_are_those_of_a_plain_convolution(length, dtype, bound):
    conv, x, window = make(4, dtype, 48), tokens(length, dtype, 48), tokens(3, dtype, 48)
    cotangent = tokens(length, dtype, 48)
    found, expected = [], []
    for leaves, exact in ((found, False), (expected, True)):
        wide = torch.float64 if exact else dtype
        arguments = [a.detach().to(wide).requires_grad_() for a in (x, window, conv.weight)]
        if exact:
            image = torch.cat((arguments[1], arguments[0]), dim=1).transpose(1, 2)
            y = F.conv1d(image, arguments[2].unsqueeze(1), groups=48).transpose(1, 2)
        else:
            fresh = make(4, dtype, 48)
            fresh.weight = torch.nn.Parameter(arguments[2])
            arguments[2] = fresh.weight
            y, _ = fresh.forward_with_state(arguments[0], arguments[1])
        y.backward(cotangent.to(wide))
        leaves += [a.grad for a in arguments]
    for name, a, b in zip(("x", "window", "weight"), found, expected, strict=True):
        assert_close(name, a, b, bound)


@given(st.integers(2, 5), st.lists(st.booleans(), min_size=1, max_size=14), st.lists(st.integers(0, 14), max_size=3))
@settings(max_examples=60)
def test_padding_anywhere_is_deletion_in_one_piece_and_in_many(width, real, cuts):
    conv, length = make(width), len(real)
    x = tokens(length)
    mask = torch.stack((torch.tensor(real), torch.tensor(real).flip(0)))
    x = x.masked_fill(~mask.unsqueeze(-1), float("nan"))
    whole, last = conv.forward_with_state(x, mask=mask)
    assert not whole[~mask].any()
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    window, pieces = None, []
    for begin, end in itertools.pairwise(edges):
        y, window = conv.forward_with_state(x[:, begin:end], window, mask[:, begin:end])
        pieces.append(y)
    assert_close("pieces", torch.cat(pieces, dim=1), whole, 1e-14)
    assert torch.equal(window, last)
    for row in range(B):
        alone, kept = conv.forward_with_state(x[row, mask[row]][None])
        assert_close("alone", whole[row, mask[row]], alone[0], 1e-14)
        assert torch.equal(last[row], kept[0])


@pytest.mark.parametrize("masked", [False, True])
def test_compiles_without_a_break(masked):
    conv, x = make(dtype=torch.float32), tokens(11, torch.float32)
    mask = torch.rand(B, 11) > 0.3 if masked else None
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    assert_close("y", compiled(x, mask), conv(x, mask), 1e-6)
    compiled(x, mask).square().sum().backward()
    found, conv.weight.grad = conv.weight.grad, None
    conv(x, mask).square().sum().backward()
    assert_close("weight", found, conv.weight.grad, 1e-5)


def test_autocast_and_a_window_of_another_dtype_change_little():
    conv, x = make(dtype=torch.float32), tokens(20, torch.float32)
    expected = conv(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = conv(x)
    assert y.dtype == torch.float32
    assert_close("autocast", y, expected, 1e-2)
    _, window = conv.forward_with_state(x[:, :10])
    y, _ = conv.forward_with_state(x[:, 10:], window.to(torch.bfloat16))
    assert_close("window", y, expected[:, 10:], 1e-2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CausalConvolution(C, width=1), "width=1 reaches no other token; use at least 2"),
        (lambda: CausalConvolution(C, start="next"), "start='next' is not known; it takes 'random' or 'previous'"),
        (lambda: GridConvolution(C, width=4), "width=4 has no centre; use an odd number"),
        (lambda: GridConvolution(C, width=-1), "width=-1 has no centre"),
        (lambda: GridConvolution(C)(torch.zeros(1, 6, C), (2, 2)), r"grid=\(2, 2\) does not hold the 6 tokens"),
        (lambda: GridConvolution(C)(torch.zeros(1, 6, C), None), r"grid=None does not hold.*rows \* columns = N"),
        (lambda: GridConvolution(C)(torch.zeros(1, 6, C + 1), (2, 3)), r"needs \[B, N, 6\]"),
        (lambda: SequenceConvolution(C, width=4), "width=4 has no centre; use an odd number"),
        (lambda: make_centred()(torch.zeros(2, 3, 7)), r"shape \(2, 3, 7\); this module needs \[B, N, 6\]"),
        (lambda: make()(torch.zeros(2, 3, 7)), r"shape \(2, 3, 7\); this module needs \[B, N, 6\]"),
        (lambda: make()(tokens(3), torch.ones(2, 4) > 0), r"mask has shape \(2, 4\)"),
        (
            lambda: make().forward_with_state(tokens(3), tokens(2)),
            r"window .* has shape \(2, 2, 6\), but x with shape \(2, 3, 6\) needs \(2, 3, 6\)",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def case(lengths, masked):
    """A module, nine tokens with what came before, and a cotangent of each result."""
    conv = make()
    torch.manual_seed(1)
    x, start, dy, dlast = tokens(9).requires_grad_(), tokens(3).requires_grad_(), tokens(9), tokens(3)
    mask = torch.rand(B, 9) > 0.5 if masked else None
    return conv, x, start, dy, dlast, mask


def results(lengths, masked, context=None):
    conv, x, start, dy, dlast, mask = case(lengths, masked)
    pieces, size = [x, dy], 1
    if context is not None:
        pieces, size = [context.split(tensor, lengths=lengths) for tensor in pieces], context.size
        mask = None if mask is None else context.split(mask, lengths=lengths)
    y, last = conv.forward_with_state(pieces[0], start, mask)
    # The window at the end is on every rank; together they have its loss once.
    ((y * pieces[1]).sum() + (last * dlast).sum() / size).backward()
    return {"y": y.detach(), "last": last.detach(), "x": x.grad, "start": start.grad, "weight": conv.weight.grad}


def picked(lengths, context):
    """What `last_tokens` finds for tokens that are numbers; where a rank has fewer than three there is junk."""
    own = context.split(torch.arange(1.0, 10.0), 0, lengths=lengths)[-3:]
    tail = torch.full((1, 3, 1), 99.0)
    tail[0, 3 - len(own) :, 0] = own
    start = torch.tensor([-2.0, -1.0, 0.0]).view(1, 3, 1)
    return [window.flatten().tolist() for window in last_tokens(tail, torch.tensor([lengths[context.rank]]), start)]


def shared():
    found = {}
    for lengths, masked in itertools.product(LENGTHS, (False, True)):
        with ContextParallel() as context:
            before = context.bytes_exchanged, context.num_collectives
            found[lengths, masked] = results(lengths, masked, context)
            exchanged = context.bytes_exchanged - before[0], context.num_collectives - before[1]
            found[lengths, masked]["exchanged"] = exchanged
            found[lengths, masked]["picked"] = picked(lengths, context)
    return found


@pytest.mark.slow
def test_shared_sequence_is_the_whole(tmp_path):
    ranks = run_ranks(3, tmp_path, shared)
    numbers = 8 * B * 3 * C
    for key in itertools.product(LENGTHS, (False, True)):
        expected = results(*key)
        assert_close("y", torch.cat([rank[key]["y"] for rank in ranks], dim=1), expected["y"], 1e-14)
        for number, rank in enumerate(ranks):
            begin = sum(key[0][:number])
            assert rank[key]["picked"] == [[begin - 2.0, begin - 1.0, float(begin)], [7.0, 8.0, 9.0]]
            assert torch.equal(rank[key]["last"], expected["last"])
            # Forward once, backward once for each result: nothing that depends on the length.
            assert rank[key]["exchanged"] == (3 * numbers + 8 * B, 3)
        for name in ("x", "start", "weight"):
            assert_close(f"{key} {name}", sum(rank[key][name] for rank in ranks), expected[name], 1e-13)


@pytest.mark.parametrize("width", [2, 4])
def test_a_kernel_may_start_with_the_token_before(width):
    torch.manual_seed(0)
    random = CausalConvolution(C, width=width).weight
    torch.manual_seed(0)
    previous = CausalConvolution(C, width=width, start="previous").weight
    before = torch.zeros(width)
    before[-2] = 1
    torch.testing.assert_close(previous, 0.3 * random + before)


def make_centred(width=3, dtype=torch.float64, embed_dim=C):
    torch.manual_seed(0)
    conv = SequenceConvolution(embed_dim, width=width, dtype=dtype)
    with torch.no_grad():
        conv.weight.normal_()
    return conv


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 30])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_both_sides_are_a_plain_convolution_with_its_gradients(width, length, dtype, bound):
    conv, x, cotangent = make_centred(width, dtype), tokens(length, dtype), tokens(length, dtype)
    wide = [a.detach().double().requires_grad_() for a in (x, conv.weight)]
    expected = torch.zeros_like(wide[0])
    if length:
        rows = F.conv1d(wide[0].transpose(1, 2), wide[1].unsqueeze(1), padding=width // 2, groups=C)
        expected = rows.transpose(1, 2) + 0 * wide[1].sum() + 0 * wide[0]
    else:
        expected = expected + 0 * wide[1].sum() + 0 * wide[0]
    expected.backward(cotangent.double())
    x.requires_grad_()
    y = conv(x)
    assert y.dtype == dtype
    y.backward(cotangent)
    for name, a, b in (("y", y, expected), ("x", x.grad, wide[0].grad), ("weight", conv.weight.grad, wide[1].grad)):
        assert_close(name, a, b, bound)


@given(st.sampled_from([1, 3, 5]), st.lists(st.booleans(), min_size=1, max_size=14))
@settings(max_examples=60)
def test_padding_anywhere_is_deletion_on_both_sides(width, real):
    conv, x = make_centred(width), tokens(len(real))
    mask = torch.stack((torch.tensor(real), torch.tensor(real).flip(0)))
    y = conv(x.masked_fill(~mask.unsqueeze(-1), float("nan")), mask)
    assert not y[~mask].any()
    for row in range(B):
        assert_close("alone", y[row, mask[row]], conv(x[row, mask[row]][None])[0], 1e-14)


def test_packed_sequences_do_not_see_each_other():
    conv, row = make_centred(5), torch.randn(1, 12, C, dtype=torch.float64)
    packing = tost.Packing.from_cu_seqlens(torch.tensor([0, 4, 4, 5, 12]), 12)
    alone = [conv(row[:, begin:end]) for begin, end in ((0, 4), (4, 5), (5, 12))]
    assert_close("packed", mix(conv, row, None, packing), torch.cat(alone, dim=1), 1e-14)


def convolved(x, weight, rows, columns):
    """Sum over the window of each token, written out."""
    reach, y = weight.shape[-1] // 2, torch.zeros_like(x)
    for r in range(rows):
        for c in range(columns):
            for dr in range(-reach, reach + 1):
                for dc in range(-reach, reach + 1):
                    if 0 <= r + dr < rows and 0 <= c + dc < columns:
                        kernel = weight[:, 0, dr + reach, dc + reach]
                        y[:, r * columns + c] += kernel * x[:, (r + dr) * columns + c + dc]
    return y


@pytest.mark.parametrize("width", [1, 3, 5])
@pytest.mark.parametrize("grid", [(1, 1), (1, 6), (4, 3), (5, 5)])
def test_grid_mixer_is_a_depthwise_convolution(width, grid):
    module, x = GridConvolution(C, width=width, dtype=torch.float64), tokens(grid[0] * grid[1])
    assert_close("y", module(x, grid), convolved(x, module.weight.detach(), *grid), 1e-13)


def test_grid_mixer_treats_padding_as_beyond_the_edge():
    module, x = GridConvolution(C, dtype=torch.float64), tokens(12)
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[:2, :2] = True
    x[:, ~mask.flatten()] = float("nan")
    y = module(x, (4, 3), mask.flatten().expand(B, -1))
    assert_close("y", y[:, mask.flatten()], module(x[:, mask.flatten()], (2, 2)), 1e-13)
