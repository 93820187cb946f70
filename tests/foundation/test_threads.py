"""Threads: how many by default, how they wait, and what a forked process does."""

import os
import subprocess
import sys

import pytest

from tost import _threads

OPENMP = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def run(code, **environment):
    """Run Python in a new process without OpenMP's variables, and return what it printed."""
    kept = {name: value for name, value in os.environ.items() if name not in OPENMP}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def fresh(monkeypatch):
    """A process in which torch is not loaded and OpenMP's variables are not set."""
    monkeypatch.delitem(sys.modules, "torch")
    for name in OPENMP:
        monkeypatch.setenv(name, "")  # remembered, so that what is set later goes with the test
        monkeypatch.delenv(name)
    return monkeypatch


def test_importing_the_package_keeps_threads_from_spinning():
    code = "import os, tost, sys; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    assert run(code) == [_threads.WAITING["GOMP_SPINCOUNT"], "False"]


@pytest.mark.skipif(_threads.time_slice() is None, reason="processes cannot ask for time slices here")
def test_threads_get_short_time_slices():
    # First it takes back what importing the package did, there or in the process that runs the tests.
    code = """
import os, threading
from tost import _threads
_threads.set_time_slice(0)
print(_threads.time_slice() > _threads.TIME_SLICE)
del os.environ["GOMP_SPINCOUNT"], os.environ["KMP_BLOCKTIME"]  # set by the import, and not chosen by the user
_threads.prepare()
print(_threads.time_slice())
thread = threading.Thread(target=lambda: print(_threads.time_slice()))
thread.start(), thread.join()
print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) == os.SCHED_OTHER)
"""
    nice, slice_ = str(os.getpriority(os.PRIO_PROCESS, 0)), str(_threads.TIME_SLICE)
    assert run(code) == ["True", slice_, slice_, nice, "True"]


def test_systems_without_time_slices_are_left_alone(fresh):
    for name, value in (("platform", "darwin"), ("platform", "linux")):
        fresh.setattr(sys, name, value)
        fresh.setattr("platform.machine", lambda: "riscv64")
        assert _threads.time_slice() is None
        _threads.prepare()


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"])
def test_what_the_user_chose_stays(fresh, name):
    fresh.setenv(name, "7")
    fresh.setattr(_threads, "set_time_slice", lambda _: pytest.fail("the user chose how threads wait"))
    _threads.prepare()
    assert os.environ[name] == "7"
    assert [other for other in _threads.WAITING if other in os.environ] == [name] * (name != "OMP_WAIT_POLICY")


def test_nothing_changes_once_torch_is_loaded(monkeypatch):
    for name in OPENMP:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", sys)
    _threads.prepare()
    assert not [name for name in OPENMP if name in os.environ]


def make_groups(folder, monkeypatch, own, limits):
    """Pretend to be in control groups: the content of /proc/self/cgroup, and files with limits."""
    (folder / "own").write_text(own)
    for name, content in limits.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(_threads, "_OWN_CGROUPS", folder / "own")
    monkeypatch.setattr(_threads, "_CGROUPS", folder / "groups")
    monkeypatch.setattr(_threads, "_allowed_cpus", lambda: 16)


V1 = {"cpu/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 16),
        # That of the group around it counts, too, and one that cannot be seen from inside does not matter.
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "max 100000\n"}, 2),
        ("0::/outside\n", {"cpu.max": "200000 100000\n"}, 2),
        # Version 1.
        ("3:cpu,cpuacct:/\n2:memory:/\n", {**V1, "cpu/cpu.cfs_quota_us": "-1\n"}, 16),
        ("3:cpu,cpuacct:/\n2:memory:/\n", {**V1, "cpu/cpu.cfs_quota_us": "300000\n"}, 3),
        # Nothing to read, or nothing that can be read.
        ("0::/\n", {}, 16),
        ("0::/\n", {"cpu.max": "lots\n"}, 16),
    ],
)
def test_containers_limit_the_number_of_processors(tmp_path, monkeypatch, own, limits, expected):
    make_groups(tmp_path, monkeypatch, own, limits)
    assert _threads.available_cpus() == expected


def test_a_container_limits_the_threads_of_torch(tmp_path, fresh):
    make_groups(tmp_path, fresh, "0::/\n", {"cpu.max": "300000 100000\n"})
    _threads.prepare()
    assert os.environ["OMP_NUM_THREADS"] == "3"
    fresh.setenv("OMP_NUM_THREADS", "5")
    _threads.prepare()
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_all_processors_need_no_limit(tmp_path, fresh):
    make_groups(tmp_path, fresh, "0::/\n", {"cpu.max": "max 100000\n"})
    _threads.prepare()
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to a processor here")
def test_a_process_on_one_processor_uses_one_thread():
    code = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
import tost
from tost.ops._library import num_threads
print(num_threads())
"""
    assert run(code) == ["1"]
