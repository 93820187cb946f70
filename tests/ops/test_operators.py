"""The registered operators: the checks of torch, and bad arguments, none of which may end the process."""

import subprocess
import sys

import pytest
import torch

import tost
from tests.ops.cases import make_case
from tost.ops._inputs import causal_form, causal_inputs
from tost.ops._operators import causal_arguments
from tost.ops.form import FLAGS, Form

OPS = torch.ops.tost
EVERY = {"masked": True, "bias": True, "state": True}
FORMS = {
    "plain": {},
    "every option": EVERY | {"count_scaled": True, "decay": True},
    "blocks": EVERY | {"block_size": 2, "count_scaled": True, "decay": True},
    "centered": EVERY | {"centered": True, "decay": True},
    "decays of heads": EVERY | {"decay": "head", "count_scaled": True},
    "decays of channels": EVERY | {"decay": "channel", "block_size": 2, "centered": True},
}


def causal_call(size=(2, 70, 2, 6), packing=None, **options):
    """Arguments of ``causal_tssa``."""
    case = make_case(size, torch.float32, **options)
    form = causal_form(case.decay, **{name: getattr(case, name) for name in ("count_scaled", "block_size", "centered")})
    given = (case.w, case.temperature, case.bias, case.mask, case.state, case.decay)
    return list(causal_arguments(causal_inputs(form, packing, *given), form))


def backward_calls(tssa, causal):
    """Arguments of both backward operators for those of the forward ones."""
    _, *saved = OPS.tssa(*tssa)
    y, pi, starts, *sums = OPS.causal_tssa(*causal)
    dy = torch.randn_like(y)
    w, t, bias, mask, *_, scale, decay, cu_seqlens, form = causal
    return (
        [dy, *tssa[:3], *saved, *tssa[3:]],
        [dy, *sums, w, t, bias, mask, pi, starts, scale, decay, cu_seqlens, form],
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_operators_pass_opcheck(form, packed):
    options = dict(FORMS[form])
    packing = None
    if packed:
        options.pop("state", None)
        packing = tost.Packing.from_cu_seqlens(torch.tensor([0, 3, 3, 70]), 70)
    causal = causal_call((1 if packed else 2, 70, 2, 6), packing, **options)
    plain = Form(**{name: getattr(Form.from_flags(causal[-1]), name) for name in ("block_size", "centered")})
    tssa = [causal[0], causal[1], causal[3], causal[9], plain.flags()]
    backward, causal_backward = backward_calls(tssa, causal)
    tests = ("test_schema", "test_faketensor")
    for name, arguments in {
        "tssa": tssa,
        "tssa_": [tssa[0].clone(), *tssa[1:]],
        "tssa_backward": backward,
        "causal_tssa": causal,
        "causal_tssa_": [causal[0].clone(), *causal[1:]],
        "causal_tssa_backward": causal_backward,
    }.items():
        torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=tests)


def flags(**changes):
    """A change of the last argument."""
    return lambda a: [*a[:-1], tuple(changes.get(name, x) for name, x in zip(FLAGS, a[-1], strict=True))]


def at(index, change):
    """A change of one argument; a tensor, or a function of it."""
    return lambda a: [
        change(x) if i == index and callable(change) else change if i == index else x for i, x in enumerate(a)
    ]


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def bounds(*numbers):
    """Packed sequences in one row of 70 tokens."""
    cu_seqlens = torch.tensor(numbers)
    return lambda a: [a[0][:1], a[1], None, cu_seqlens, a[-1]]


W, T, MASK = range(3)
FORM_ABUSES = {
    "no form": lambda a: [*a[:-1], []],
    "short form": lambda a: [*a[:-1], a[-1][:3]],
    "long form": lambda a: [*a[:-1], (*a[-1], 1)],
    "block_size 0": flags(block_size=0),
    "block_size -1": flags(block_size=-1),
    "block_size that does not divide": flags(block_size=4),
    "block_size above D": flags(block_size=12),
    "block_size 2^40": flags(block_size=2**40),
    "centered 2": flags(centered=2),
    "count_scaled -1": flags(count_scaled=-1),
    "decay of tokens that is not given": flags(token_decay=1),
    "decay of channels only": flags(channel_decay=1),
    "both decays": flags(token_decay=1, channel_decay=1),
}
TSSA_ABUSES = FORM_ABUSES | {
    "short temperature": at(T, torch.ones(1)),
    "long temperature": at(T, torch.ones(9)),
    "no temperature": at(T, torch.ones(0)),
    "temperature in float64": at(T, lambda t: t.double()),
    "temperature as a matrix": at(T, lambda t: t[None]),
    "integer temperature": at(T, lambda t: t.long()),
    "temperature on meta": at(T, lambda t: t.to("meta")),
    "freed temperature": at(T, freed),
    "short mask": at(MASK, torch.ones(2, 3, dtype=torch.bool)),
    "mask of one row": at(MASK, torch.ones(1, 70, dtype=torch.bool)),
    "float mask": at(MASK, torch.zeros(2, 70)),
    "freed mask": at(MASK, freed),
    "tokens of three dimensions": at(W, lambda w: w[0]),
    "no tokens": at(W, torch.ones(0)),
    "no heads": at(W, torch.ones(2, 70, 0, 6)),
    "no features": at(W, torch.ones(2, 70, 2, 0)),
    "integer tokens": at(W, lambda w: w.long()),
    "complex tokens": at(W, lambda w: torch.complex(w, w)),
    "boolean tokens": at(W, lambda w: w > 0),
    "sparse tokens": at(W, lambda w: w.to_sparse()),
    "quantized tokens": at(W, lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8)),
    "nested tokens": at(W, lambda w: torch.nested.nested_tensor([w[0], w[1]])),
    "freed tokens": at(W, freed),
    "bounds beyond the row": bounds(0, 3, 71),
    "bounds that do not begin with 0": bounds(1, 70),
    "bounds that decrease": bounds(0, 50, 20, 70),
    "negative bounds": bounds(0, -5, 70),
    "no bounds": lambda a: [a[0][:1], a[1], None, torch.zeros(0, dtype=torch.int64), a[-1]],
    "bounds in int32": lambda a: [a[0][:1], a[1], None, torch.tensor([0, 70], dtype=torch.int32), a[-1]],
    "bounds as a matrix": lambda a: [a[0][:1], a[1], None, torch.tensor([[0, 70]]), a[-1]],
    "bounds for several rows": at(3, torch.tensor([0, 3, 70])),
}
BIAS, SQUARES, WEIGHTED, MASS, SCALE, DECAY = 2, 4, 5, 6, 7, 8
CAUSAL_ABUSES = FORM_ABUSES | {
    "short bias": at(BIAS, lambda x: x[:, :3]),
    "bias as a table": at(BIAS, lambda x: x[0].T),
    "short squares": at(SQUARES, lambda x: x[:1]),
    "squares only": lambda a: [*a[:5], None, None, *a[7:]],
    "narrow products": at(WEIGHTED, lambda x: x[..., :2]),
    "mass in float64": at(MASS, lambda x: x.double()),
    "short scale": at(SCALE, lambda x: x[:, :3]),
    "short decay": at(DECAY, torch.ones(1)),
    "decay of tokens without the form": at(DECAY, torch.ones(2, 70, 2)),
    "short temperature": at(T, torch.ones(1)),
    "short mask": at(3, torch.ones(2, 3, dtype=torch.bool)),
}
BACKWARD_ABUSES = FORM_ABUSES | {
    "short dy": at(0, lambda x: x[:, :3]),
    "dy in float64": at(0, lambda x: x.double()),
    "short pi": at(4, lambda x: x[:, :3]),
    "short saved squares": at(5, lambda x: x[:1]),
    "narrow saved products": at(6, lambda x: x[..., :2]),
    "saved mass as a number": at(7, torch.ones(())),
}
CAUSAL_BACKWARD_ABUSES = {
    "narrow gradient of squares": at(1, lambda x: x[..., :2]),
    "short pi in the causal form": at(8, lambda x: x[:, :3]),
    "short starts": at(9, lambda x: x[:, :1]),
    "starts in float64": at(9, lambda x: x.double()),
    "decay in another form": at(11, torch.ones(2, 70, 2, 6)),
}


def abuses():
    """Every abuse as its name, the operator and the arguments."""
    case = make_case((2, 70, 2, 6), torch.float32, masked=True)
    tssa = [case.w, case.temperature, case.mask, None, Form().flags()]
    causal = causal_call(**FORMS["every option"])
    backward, causal_backward = backward_calls(tssa, causal)
    for table, names, arguments in (
        (TSSA_ABUSES, ("tssa", "tssa_"), tssa),
        (CAUSAL_ABUSES, ("causal_tssa", "causal_tssa_"), causal),
        (BACKWARD_ABUSES, ("tssa_backward",), backward),
        (CAUSAL_BACKWARD_ABUSES, ("causal_tssa_backward",), causal_backward),
    ):
        for abuse, change in table.items():
            for name in names:
                yield f"{name}: {abuse}", getattr(OPS, name), change(list(arguments))


def main():
    """Print what every abuse leads to; a crash ends the list early."""
    for name, operator, arguments in abuses():
        sys.stdout.write(f"\n{name} -> ")
        sys.stdout.flush()
        try:
            operator(*arguments)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            sys.stdout.write(type(error).__name__)
        else:
            sys.stdout.write("accepted")


def test_no_abuse_of_an_operator_ends_the_process_or_is_accepted():
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=False)
    lines = done.stdout.split("\n")[1:]
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-2000:])
    assert [line for line in lines if line.endswith("-> accepted")] == []
    assert len(lines) > 150


def test_a_packing_with_other_numbers_than_announced_is_refused():
    w, t = torch.randn(1, 5, 2, 4), torch.ones(2)
    for cu_seqlens in (torch.tensor([0, 9]), torch.tensor([0, 5], dtype=torch.int32)):
        for run in (tost.tssa, tost.causal_tssa):
            with pytest.raises(ValueError, match="cu_seqlens"):
                run(w, t, cu_seqlens=tost.Packing(cu_seqlens, (1, 5)), backend="native")


if __name__ == "__main__":
    main()
