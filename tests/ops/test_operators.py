"""The registered operators: the checks of torch, and bad arguments, none of which may end the process."""

import subprocess
import sys

import pytest
import torch

import tost
from tests.ops.cases import make_case
from tost.ops._inputs import causal_inputs
from tost.ops._operators import SCHEMAS, argument_names, causal_arguments
from tost.ops.form import Form

OPS = torch.ops.tost
BOUNDS = torch.tensor([0, 3, 3, 70])


def calls(*, full, g=1, packed=False):
    """Arguments of every operator by its name: as few as there can be, or all; `g` is the size of blocks."""
    B, S = (1, 3) if packed else (2, 2)
    case = make_case((B, 70, 2, 6), torch.float32, masked=full, bias=full)
    states = make_case((S, 1, 2, 6), torch.float32, state=full)
    packing = tost.Packing.from_cu_seqlens(BOUNDS, 70) if packed else None
    tssa = [case.w, case.temperature, case.mask, BOUNDS if packed else None, Form(block_size=g).flags()]
    causal = list(
        causal_arguments(causal_inputs(packing, case.w, case.temperature, case.bias, case.mask, states.state))
    )
    gated = [case.w, torch.rand(B, 70, 2, 6 // g), case.mask, None, None, tssa[3]]
    if full:
        gated[3:5] = torch.randn(S, 2, 6), torch.cat((torch.ones(S, 2, 6), torch.zeros(S, 2, 3 * (g - 1))), dim=-1)
    _, *saved = OPS.tssa(*tssa)
    y, pi, starts, *sums = OPS.causal_tssa(*causal)
    dy, (_, *dstate) = torch.randn_like(y), OPS.gated_tssa(*gated)
    w, t, bias, mask, *_, cu_seqlens = causal
    return {
        "tssa": tssa,
        "tssa_": [case.w.clone(), *tssa[1:]],
        "tssa_backward": [dy, *tssa[:3], *saved, *tssa[3:]],
        "causal_tssa": causal,
        "causal_tssa_": [case.w.clone(), *causal[1:]],
        "causal_tssa_backward": [dy, *sums, w, t, bias, mask, pi, starts, cu_seqlens],
        "gated_tssa": gated,
        "gated_tssa_backward": [dy, *dstate, *gated],
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("full", "g"), [(False, 1), (True, 1), (True, 2), (False, 6)])
def test_operators_pass_opcheck(full, g, packed):
    for name, arguments in calls(full=full, g=g, packed=packed).items():
        operator = getattr(OPS, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def bounds(*numbers):
    """Packed sequences, and nothing else, in the one row that is left."""
    return {"cu_seqlens": torch.tensor(numbers), "w": lambda w: w[:1], "mask": None}


def short(x):
    return x[:, :3]


def narrow(x):
    return x[..., :2]


# What is done to a call: other arguments by name, as they are or as functions of those of a good call.
TOKENS = {
    "tokens of three dimensions": {"w": lambda w: w[0]},
    "no tokens": {"w": torch.ones(0)},
    "no heads": {"w": torch.ones(2, 70, 0, 6)},
    "no features": {"w": torch.ones(2, 70, 2, 0)},
    "integer tokens": {"w": lambda w: w.long()},
    "complex tokens": {"w": lambda w: torch.complex(w, w)},
    "boolean tokens": {"w": lambda w: w > 0},
    "sparse tokens": {"w": lambda w: w.to_sparse()},
    "quantized tokens": {"w": lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8)},
    "nested tokens": {"w": lambda w: torch.nested.nested_tensor([w[0], w[1]])},
    "freed tokens": {"w": freed},
    "short mask": {"mask": short},
    "mask of one row": {"mask": lambda x: x[:1]},
    "float mask": {"mask": lambda x: x.float()},
    "freed mask": {"mask": freed},
    "bounds for several rows": {"cu_seqlens": BOUNDS},
}
TEMPERATURE = {
    "short temperature": {"temperature": torch.ones(1)},
    "long temperature": {"temperature": torch.ones(9)},
    "no temperature": {"temperature": torch.ones(0)},
    "temperature in float64": {"temperature": lambda t: t.double()},
    "temperature as a matrix": {"temperature": lambda t: t[None]},
    "integer temperature": {"temperature": lambda t: t.long()},
    "temperature on meta": {"temperature": lambda t: t.to("meta")},
    "freed temperature": {"temperature": freed},
}
PACKED = {
    "bounds beyond the row": bounds(0, 3, 71),
    "bounds that do not begin with 0": bounds(1, 70),
    "bounds that decrease": bounds(0, 50, 20, 70),
    "negative bounds": bounds(0, -5, 70),
    "empty bounds": bounds(),
    "bounds in int32": bounds() | {"cu_seqlens": torch.tensor([0, 70], dtype=torch.int32)},
    "bounds as a matrix": bounds([0, 70]),
    "freed bounds": bounds() | {"cu_seqlens": freed(torch.tensor([0, 70]))},
}
FORMS = {
    "no form": {"form": []},
    "short form": {"form": [1]},
    "long form": {"form": [1, 1, 1]},
    **{f"block_size {g}": {"form": [g, 1]} for g in (0, -1, 4, 12, 2**40)},
    "normalize 2": {"form": [1, 2]},
    "normalize -1": {"form": [1, -1]},
}
STATE = {
    "short bias": {"bias": short},
    "bias as a table": {"bias": lambda x: x[0].T},
    "bias in float64": {"bias": lambda x: x.double()},
    "short squares": {"squares": lambda x: x[:1]},
    "squares only": {"weighted": None, "mass": None},
    "no squares": {"squares": None},
    "narrow products": {"weighted": narrow},
    "mass in float64": {"mass": lambda x: x.double()},
    "freed mass": {"mass": freed},
}
GATES = {
    "short gates": {"write": short},
    "gates of one row": {"write": lambda x: x[:1]},
    "gates of four blocks": {"write": torch.rand(2, 70, 2, 4)},
    "gates of no block": {"write": torch.rand(2, 70, 2, 0)},
    "gates of more blocks than features": {"write": torch.rand(2, 70, 2, 12)},
    "gates of three dimensions": {"write": torch.rand(2, 70, 3)},
    "gate as a number": {"write": torch.tensor(0.5)},
    "no gates": {"write": torch.ones(0)},
    "gates in float64": {"write": lambda x: x.double()},
    "gates in bfloat16": {"write": lambda x: x.bfloat16()},
    "gates on meta": {"write": lambda x: x.to("meta")},
    "freed gates": {"write": freed},
    "tokens in bfloat16": {"w": lambda w: w.bfloat16()},
    "mean only": {"covariance": None},
    "covariance only": {"mean": None},
    "narrow mean": {"mean": narrow},
    "mean of one sequence": {"mean": lambda x: x[:1]},
    "mean in float64": {"mean": lambda x: x.double()},
    "freed mean": {"mean": freed},
    "narrow covariance": {"covariance": narrow},
    "covariance of other blocks": {"covariance": torch.zeros(2, 2, 12)},
    "covariance in bfloat16": {"covariance": lambda x: x.bfloat16()},
    "freed covariance": {"covariance": freed},
    "packed gates of other sequences": bounds(0, 70) | {"write": torch.rand(1, 70, 2, 3)},
}
BACKWARD = {
    "short dy": {"dy": short},
    "dy in float64": {"dy": lambda x: x.double()},
    "freed dy": {"dy": freed},
}
SAVED = {"short pi": {"pi": short}, "pi in float64": {"pi": lambda x: x.double()}}
ABUSES = {
    "tssa": TOKENS | TEMPERATURE | FORMS | PACKED,
    "tssa_": TOKENS | TEMPERATURE | FORMS | PACKED,
    "tssa_backward": TOKENS | TEMPERATURE | FORMS | BACKWARD | SAVED | STATE,
    "causal_tssa": TOKENS | TEMPERATURE | PACKED | STATE,
    "causal_tssa_": TOKENS | TEMPERATURE | PACKED | STATE,
    "causal_tssa_backward": TOKENS
    | TEMPERATURE
    | BACKWARD
    | SAVED
    | {
        "narrow gradient of squares": {"dsquares": narrow},
        "short starts": {"starts": lambda x: x[:, :1]},
        "starts in float64": {"starts": lambda x: x.double()},
    },
    "gated_tssa": TOKENS | GATES | PACKED,
    "gated_tssa_backward": TOKENS
    | GATES
    | BACKWARD
    | {
        "narrow gradient of the mean": {"dmean_out": narrow},
        "gradient of the mean in float64": {"dmean_out": lambda x: x.double()},
        "gradient of one covariance": {"dcovariance_out": lambda x: x[:1]},
        "freed gradient of the covariance": {"dcovariance_out": freed},
    },
}


def abused(names, arguments, changes):
    """The arguments with some of them changed; None if the operator does not have what is changed."""
    given = dict(zip(names, arguments, strict=True))
    if not changes.keys() & given.keys():
        return None
    for name, change in changes.items():
        if name in given:
            given[name] = change(given[name]) if callable(change) else change
    return list(given.values())


def main():
    """Print what every abuse leads to; a crash ends the list early."""
    good = calls(full=True, g=2)
    for name, table in ABUSES.items():
        names = argument_names(SCHEMAS[name])
        required = [each for each in names if f"Tensor? {each}" not in SCHEMAS[name]]
        for abuse, changes in (table | {f"{each} is None": {each: None} for each in required}).items():
            arguments = abused(names, good[name], changes)
            if arguments is None:
                continue
            sys.stdout.write(f"\n{name}: {abuse} -> ")
            sys.stdout.flush()
            try:
                getattr(OPS, name)(*arguments)
            except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
                sys.stdout.write(type(error).__name__)
            else:
                sys.stdout.write("accepted")


def test_no_abuse_of_an_operator_ends_the_process_or_is_accepted():
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=False)
    lines = done.stdout.split("\n")[1:]
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-2000:])
    assert [line for line in lines if line.endswith("-> accepted")] == []
    assert len(lines) > 250


@pytest.mark.parametrize("name", ["tssa", "causal_tssa", "gated_tssa"])
def test_bad_bounds_of_packed_sequences_are_named(name):
    """They are looked at by the kernel, as the message says; anything else would be refused for another reason."""
    for numbers in ([0, 3, 71], [1, 70], [0, 50, 20, 70], [0, -5, 70]):
        arguments = abused(argument_names(SCHEMAS[name]), calls(full=False)[name], bounds(*numbers))
        if name == "gated_tssa":
            arguments[1] = arguments[1][:1]
        with pytest.raises(ValueError, match="cu_seqlens has to begin with 0, end with the number of tokens and never"):
            getattr(OPS, name)(*arguments)


def test_a_packing_with_other_numbers_than_announced_is_refused():
    w, t = torch.randn(1, 5, 2, 4), torch.ones(2)
    for cu_seqlens in (torch.tensor([0, 9]), torch.tensor([0, 5], dtype=torch.int32)):
        for run in (tost.tssa, tost.causal_tssa):
            with pytest.raises(ValueError, match="cu_seqlens"):
                run(w, t, cu_seqlens=tost.Packing(cu_seqlens, (1, 5)), backend="native")


if __name__ == "__main__":
    main()
