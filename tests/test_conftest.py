"""The safety nets of conftest.py, tested: a net with a hole is worse than none."""

from __future__ import annotations

import os
import socket

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

SHAPE = (3, 4)
ALLOCATIONS = {
    "empty": "torch.empty(3, 4)",
    "empty with a dtype": "torch.empty((3, 4), dtype=torch.bfloat16)",
    "empty_like": "torch.empty_like(x)",
    "empty_strided": "torch.empty_strided((3, 4), (4, 1))",
    "empty_permuted": "torch.empty_permuted((3, 4), (1, 0))",
    "new_empty": "x.new_empty((3, 4))",
    "new_empty_strided": "x.new_empty_strided((3, 4), (4, 1))",
    "complex": "torch.empty(3, 4, dtype=torch.complex64)",
}


def run_as(module: str, expression: str) -> torch.Tensor:
    """Evaluate `expression` as if it stood in `module`."""
    result = eval(expression, {"__name__": module, "torch": torch, "x": torch.zeros(SHAPE)})
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("expression", ALLOCATIONS.values(), ids=ALLOCATIONS.keys())
def test_poison_fills_memory_requested_by_tost(expression):
    out = run_as("tost.ops.something", expression)
    assert out.shape == SHAPE
    assert out.isnan().all()


@pytest.mark.usefixtures("poisoned_empty")
def test_poison_keeps_out_of_other_code_and_other_dtypes():
    assert run_as("tost.ops.something", "torch.empty(3, dtype=torch.int64)").dtype == torch.int64
    marked = torch.full(SHAPE, 7.0)
    # Same memory, seen through the allocator's `out=`: foreign callers get it back untouched.
    assert run_as("tostada", "torch.empty_like(x)").shape == SHAPE
    kept = eval("torch.empty(3, 4, out=marked)", {"__name__": "elsewhere", "torch": torch, "marked": marked})
    assert (kept == 7.0).all()


@pytest.mark.usefixtures("poisoned_empty")
def test_poison_catches_a_cell_that_nobody_wrote():
    source = "out = torch.empty_like(x)\nout[:-1] = 0.0"
    namespace = {"__name__": "tost.ops.forgetful", "torch": torch, "x": torch.ones(SHAPE)}
    exec(source, namespace)
    assert namespace["out"].isnan().any()


@pytest.mark.usefixtures("poisoned_empty")
def test_poison_does_not_break_a_traced_graph():
    torch.compiler.reset()

    def square(x):
        out = torch.empty_like(x)
        out.copy_(x * x)
        return out

    compiled = torch.compile(square, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.full(SHAPE, 3.0)), torch.full(SHAPE, 9.0))


def test_poison_is_off_outside_the_operator_folders():
    assert torch.empty.__name__ == "empty"


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("2001:db8::1", 80), ("example.org", 443)])
def test_network_is_refused_by_name_of_the_address(address):
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as connection, pytest.raises(OSError, match=r"must not use the network.*" + address[0]):
        connection.connect(address)
    with pytest.raises(OSError, match="must not use the network"):
        socket.getaddrinfo(*address)


def test_network_leaves_loopback_alone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname(), timeout=5) as client:
            client.sendall(b"x")
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b"x"


class TestIsolation:
    """Each pair of tests runs in file order: the first leaves a mess, the second must not see it."""

    def test_leave_a_mess(self):
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_grad_enabled(False)
        os.environ["TOST_BACKEND"] = "reference"

    def test_see_no_mess(self):
        assert torch.get_default_dtype() == torch.float32
        assert torch.is_grad_enabled()
        assert not [name for name in os.environ if name.startswith("TOST_")]

    @pytest.mark.parametrize("_", range(2))
    def test_random_numbers_repeat(self, _):
        assert torch.rand(()).item() == pytest.approx(0.4962566)


@hypothesis.given(st.integers())
def test_fixtures_agree_with_hypothesis(value):
    assert isinstance(value, int)
