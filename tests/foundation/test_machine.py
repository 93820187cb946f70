"""The host process stays as it is; the command line limits its own threads."""

import os
import subprocess
import sys

import pytest
import torch

from tost import _machine
from tost.errors import ConfigError

OPENMP = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
HOST = """
import ctypes, os, signal, sys, threading
def host():
    attributes = (ctypes.c_char * 128)()
    number = {"x86_64": 315, "aarch64": 275}.get(os.uname().machine)
    number and ctypes.CDLL(None).syscall(number, 0, attributes, 128, 0)
    return (dict(os.environ), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0),
            bytes(attributes), [signal.getsignal(n) for n in signal.valid_signals()], threading.active_count(),
            sys.getrecursionlimit())
before = host()
import tost
assert host() == before, "import tost"
tost.tssa, tost.TSSAttention, tost.create_model, tost.generate, tost.train, tost.data
assert host()[0] == before[0] and host()[1:5] == before[1:5], "names of tost"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the scheduling of a thread")
def test_importing_the_package_leaves_environment_and_scheduling_alone():
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP}
    done = subprocess.run([sys.executable, "-c", HOST], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Sixteen processors without limits; call it with /proc/self/cgroup and the files of limits."""
    for name in OPENMP:
        monkeypatch.setenv(name, "")  # restored after the test, with what it sets
        monkeypatch.delenv(name)

    def make(own, limits):
        (tmp_path / "own").write_text(own)
        for name, content in limits.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    monkeypatch.setattr(_machine, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(_machine, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(_machine, "_allowed_cpus", lambda: 16)
    return make


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 16),
        # Limits of the group around it count; those that are not visible from inside do not.
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "max 100000\n"}, 2),
        ("0::/outside\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {}, 16),
        ("0::/\n", {"cpu.max": "lots\n"}, 16),
    ],
)
def test_containers_limit_the_number_of_processors(groups, own, limits, expected):
    groups(own, limits)
    assert _machine.available_cpus() == expected
    _machine.limit_threads()
    assert os.environ.get("OMP_NUM_THREADS") == (None if expected == 16 else str(expected))


@pytest.mark.parametrize("name", OPENMP)
def test_the_command_line_keeps_what_the_user_chose(groups, monkeypatch, name):
    groups("0::/\n", {"cpu.max": "300000 100000\n"})
    monkeypatch.setenv(name, "7")
    _machine.limit_threads()
    assert os.environ[name] == "7"
    assert ("GOMP_SPINCOUNT" in os.environ) == (name in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS"))


@pytest.mark.parametrize(("number", "expected"), [("", "5"), ("2", "2")])
def test_the_number_of_threads_of_a_command_can_be_chosen(groups, monkeypatch, number, expected):
    groups("0::/\n", {"cpu.max": "300000 100000\n"})
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    _machine.limit_threads(number)
    assert os.environ["OMP_NUM_THREADS"] == expected


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5", "1 "])
def test_a_wrong_number_of_threads_is_an_error(groups, number):
    groups("0::/\n", {})
    with pytest.raises(ConfigError, match="TOST_NUM_THREADS="):
        _machine.limit_threads(number)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to a processor here")
def test_a_process_on_one_processor_uses_one_thread():
    code = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
import tost
from tost.ops._library import num_threads
print(num_threads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("flags", "mkldnn", "expected"),
    [
        ("fpu avx512f avx512_bf16 sse2", True, "bf16"),
        ("fpu amx_tile amx_bf16", True, "bf16"),
        ("fpu avx2 avx512f avx512bw", True, "fp32"),
        ("", True, "fp32"),
        ("avx512_bf16", False, "fp32"),
    ],
)
def test_auto_is_bf16_where_the_processor_has_instructions_for_it(monkeypatch, flags, mkldnn, expected):
    monkeypatch.setattr(_machine, "_cpuinfo", {"flags": flags}.__getitem__)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)
    assert _machine.fast_precision(torch.device("cpu")) == expected


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_auto_is_bf16_on_graphics_cards_from_ampere_on(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert _machine.fast_precision(torch.device("cuda")) == expected
