from __future__ import annotations

import pytest

from tost.bench.ops.cases import BENCHMARK, Case, Dtype, Mode, Op, OpsScale
from tost.errors import ConfigError


def test_standard_cases_are_the_published_grid():
    shapes = {(case.op, case.batch, case.tokens, case.width, case.heads) for case in OpsScale().cases}
    assert shapes == {
        *(("tssa", 1, tokens, 384, 8) for tokens in (1024, 4096, 10240, 65536)),
        ("tssa", 8, 196, 384, 8),
        *(("causal_tssa", 1, tokens, 768, 12) for tokens in (1024, 4096, 8192)),
    }
    assert len(OpsScale().cases) == 2 * len(shapes)
    assert {case.dtype for case in OpsScale().cases} == {Dtype.FLOAT32}


def test_options_replace_parts_of_the_standard_shapes():
    cases = OpsScale(op=(Op.TSSA,), mode=(Mode.FWD,), tokens=(7, 9, 7), batch=3, width=20, heads=5).cases
    assert [(case.batch, case.tokens, case.width, case.heads) for case in cases] == [(3, 7, 20, 5), (3, 9, 20, 5)]
    assert {case.batch for case in OpsScale(batch=2).cases} == {2}
    assert {case.batch for case in OpsScale(tokens=(64,)).cases} == {1}


def test_quick_cases_are_short():
    assert max(case.tokens for case in OpsScale.quick().cases) <= 1024


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 10, "heads": 3}, r"width=10 does not divide into heads=3; .* for example 192"),
        ({"tokens": 0}, "tokens=0 cannot be measured; tokens must be at least 1"),
        ({"batch": -1}, "batch=-1 cannot be measured"),
    ],
)
def test_impossible_cases_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Case(**{"op": Op.TSSA, "batch": 1, "tokens": 4, "width": 8, "heads": 2, **sizes})


@pytest.mark.parametrize("name", ["batch", "width", "heads"])
def test_zero_is_refused_rather_than_taken_for_the_standard(name):
    with pytest.raises(ConfigError, match=f"{name}=0 cannot be measured"):
        OpsScale(**{name: 0})


def test_a_selection_does_not_replace_the_standard_measurement():
    assert BENCHMARK.theme(OpsScale()) == BENCHMARK.theme(OpsScale(repeats=9, compile=False)) == "ops"
    assert BENCHMARK.theme(OpsScale(tokens=(64,))) == "ops-selection"
    assert BENCHMARK.theme(OpsScale.quick(), quick=True) == "ops-quick"
