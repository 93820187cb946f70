"""What every test can rely on: fixed seeds, restored global state, no network, no TOST_* variables, no lucky memory."""

from __future__ import annotations

import ipaddress
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Triton kernels run on CPU tensors, in Python. Triton, which torch imports, reads the variable when it is imported.
if find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import numpy as np
import pytest
import torch
import torch._dynamo.trace_rules

TESTS = Path(__file__).parent
# Folders whose subject writes into uninitialized memory.
POISONED_FOLDERS = ("ops", "nn", "parallel")
# Everything in torch that hands out memory without writing it.
ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)

# Some variables are read when the package is imported, which happens before the first fixture runs.
for variable in [name for name in os.environ if name.startswith("TOST_")]:
    del os.environ[variable]

# The default replays the same examples on every machine; `--hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile("tost", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("tost")


def pytest_configure(config: pytest.Config) -> None:
    from tost.ops import available_backends

    # Without a compiler the operators say once that a faster way exists. They are right, and no test should fail of it.
    if available_backends("tssa")["native"] != "ready":
        config.addinivalue_line("filterwarnings", "ignore:.*is faster but cannot be used:RuntimeWarning")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def restored_torch_state() -> Iterator[None]:
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def cleared_environment() -> Iterator[None]:
    def take() -> dict[str, str]:
        return {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TOST_")}

    before = take()
    yield
    take()
    os.environ.update(before)


def is_local(family: int, host: str) -> bool:
    """Whether an address stays on this machine: a Unix socket, `localhost`, or a loopback number."""
    if family == getattr(socket, "AF_UNIX", None) or host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Refuse to look up or reach other machines; the message names the address."""

    def refuse(host: object) -> None:
        raise OSError(f"tests must not use the network, but this one wanted {host!r}; embed the data instead")

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        def connect(self: socket.socket, address: Any) -> Any:
            host = address[0] if isinstance(address, tuple) else ""
            if not is_local(self.family, host):
                refuse(host)
            return original(self, address)

        return connect

    lookup = socket.getaddrinfo

    def guarded_lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name is not None and not is_local(socket.AF_INET, name):
            refuse(name)
        return lookup(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
        patch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))
        patch.setattr(socket, "getaddrinfo", guarded_lookup)
        yield


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap an allocator so that floating-point memory handed to tost's own Python code is full of NaN."""

    def allocate_nan(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = allocate(*args, **kwargs)
        # A traced call only describes memory: there is nothing to fill, and the frame below would stop the tracer.
        if torch.compiler.is_compiling():
            return out
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "tost" and (out.is_floating_point() or out.is_complex()):
            with torch.no_grad():
                out.fill_(float("nan"))
        return out

    return allocate_nan


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """Make a cell that an operator forgets to write come out as NaN, never as a lucky zero."""
    # The compiler lists torch's functions once, on first use: it must find the originals, not the wrappers.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    torch.utils._device._device_constructors()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ALLOCATORS:
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True)
def poison_operator_tests(request: pytest.FixtureRequest) -> None:
    path = Path(str(request.node.path))
    if path.is_relative_to(TESTS) and path.relative_to(TESTS).parts[0] in POISONED_FOLDERS:
        request.getfixturevalue("poisoned_empty")
