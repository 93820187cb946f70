"""Devices that this machine does not have: what a run arranges for them, and where commands compute."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from tests.train.runs import TINY, run
from tost._machine import choose_device
from tost.data import make_evaluation_loader, make_loader
from tost.errors import ConfigError
from tost.ops import backends_on, operators
from tost.recipes import load_config
from tost.train import distributed, loop
from tost.train.distributed import Distributed


@pytest.fixture
def gpu(monkeypatch):
    """A machine that claims to have a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_gpu_is_taken_if_there_is_one_and_the_cpu_if_it_is_asked_for(gpu):
    assert choose_device("auto").type == choose_device("cuda").type == "cuda"
    assert choose_device("cpu").type == "cpu"
    with Distributed.join(load_config("demo/digits", list(TINY)), device="cpu") as processes:
        assert processes.device.type == "cpu"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="--device cuda was given, but torch finds no CUDA device"):
        choose_device("cuda")


@pytest.mark.parametrize(("deterministic", "given", "kept"), [
    ("true", None, ":4096:8"), ("true", ":16:8", ":16:8"), ("false", None, None),
])  # fmt: skip
def test_matrix_products_on_a_gpu_are_deterministic(gpu, monkeypatch, deterministic, given, kept):
    """Without the variable torch refuses each of them in deterministic mode, the default of a run."""

    class ReachedError(Exception):
        pass

    def accelerator(**kwargs):
        assert kwargs["cpu"] is False
        raise ReachedError

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given or "")
    if given is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(distributed, "Accelerator", accelerator)
    config = load_config("demo/digits", [*TINY, f"train.deterministic={deterministic}"])
    with pytest.raises(ReachedError), Distributed.join(config):
        pass
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == kept


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_for_a_gpu_are_pinned(monkeypatch, tmp_path, pinned):
    asked = []

    def without_pinning(*args, pin_memory, **kwargs):
        asked.append(pin_memory)
        return make_loader(*args, **kwargs)

    monkeypatch.setattr(loop, "make_loader", without_pinning)
    monkeypatch.setattr("tost.train.evaluate.metrics.make_evaluation_loader", lambda *args, pin_memory=None, **kwargs: (
        asked.append(pin_memory), make_evaluation_loader(*args, **kwargs))[1])  # fmt: skip
    monkeypatch.setattr(Distributed, "pin_memory", pinned)
    run(tmp_path, "train.steps=2", "evaluate.every=1", "evaluate.telemetry=false")
    assert asked == [pinned] * 3


def test_flags_of_processes_on_gpus_do_not_wait_for_them(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: f"group of {backend}")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: seen.append((x.device.type, group)))
    gpus = SimpleNamespace(num_processes=2, process_index=0, device=torch.device("cuda", 0))
    processes = Distributed(gpus, load_config("demo/digits", []))
    assert (processes.any(True), processes.any(False)) == (True, False)
    assert seen == [("cpu", "group of gloo")] * 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_backends_are_those_of_the_device(device):
    """The native kernels run on CPUs; on a graphics card nothing says "native"."""
    text = Distributed.describe_backends(SimpleNamespace(device=torch.device(device)))
    for op in operators():
        ready = [name for name, status in backends_on(device, op).items() if status == "ready"]
        assert f"{op} by {ready[0]}" in text
    assert device == "cpu" or "native" not in text


def test_freed_memory_is_returned_when_it_has_grown(monkeypatch):
    config, trimmed = load_config("demo/digits", []), []
    processes = Distributed(SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu")), config)
    gigabytes = iter([1.0, 1.0, 1.5, 2.5, 1.25])  # two of them after a call of the C library
    monkeypatch.setattr(processes, "memory_bytes", lambda: int(next(gigabytes) * 2**30))
    monkeypatch.setattr(distributed, "_TRIM", trimmed.append)
    for calls in (1, 1, 2):
        processes.trim_memory()
        assert len(trimmed) == calls
