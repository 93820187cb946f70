"""Files that somebody else wrote: every wrapping is understood, nothing in them ever runs, no damage is a traceback."""

from __future__ import annotations

import argparse
import os
import pathlib
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tost
from tests.integrations.official.networks import language_state, vision_state
from tests.integrations.official.test_parity import same
from tost.errors import CheckpointError
from tost.integrations.official import to_official


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return vision_state(depth=1, class_depth=1)


@pytest.fixture(autouse=True)
def no_trace_in_the_allow_list():
    yield
    allowed = [entry[1] for entry in torch.serialization.get_safe_globals() if isinstance(entry, tuple)]
    assert "argparse.Namespace" not in allowed


def prefixed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


SETTINGS = argparse.Namespace(
    model="tost_cab_tiny_12_p16",
    lr=5e-4,
    betas=[0.9, None],
    output_dir=pathlib.PosixPath("some/where"),
    nested=argparse.Namespace(distributed=True),
)
WRAPPINGS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "bare": lambda state: state,
    "ordered": OrderedDict,
    "parameters": lambda state: {
        name: torch.nn.Parameter(tensor) if tensor.is_floating_point() else tensor for name, tensor in state.items()
    },
    "vision training": lambda state: {
        "model": state,
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "lr_scheduler": {"base_values": [0.1], "warmup_steps": (1, 2)},
        "epoch": 3,
        "args": SETTINGS,
        "scaler": {"scale": 65536.0},
        "model_ema": {name: tensor * 0 for name, tensor in state.items()},
    },
    "language training": lambda state: {
        **{"model": state, "optimizer": {}, "model_args": {"n_layer": 12, "bias": False, "dropout": 0.0}},
        **{"iter_num": 1000, "best_val_loss": torch.tensor(2.84), "config": {"dataset": "openwebtext", "TSSA": True}},
    },
    "numbers of numpy": lambda state: {"model": state, "loss": np.float32(2.84), "n": np.int64(3), "x": np.arange(4.0)},
    "timm": lambda state: {"state_dict": state, "state_dict_ema": state, "metric": 1.0},
    "fine-tuning": lambda state: {"net": state, "acc": 91.0},
    "data parallel": lambda state: {"model": prefixed(state, "module.")},
    "compiled": lambda state: {"model": prefixed(state, "_orig_mod.")},
    "compiled and parallel": lambda state: prefixed(state, "module._orig_mod."),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_every_wrapping_gives_the_same_model(wrapping, state, tmp_path):
    content = WRAPPINGS[wrapping](state)
    assert same(to_official(tost.load_official(content)), state)
    for new_format in (True, False):
        file = tmp_path / f"{new_format}.any_suffix"
        torch.save(content, file, _use_new_zipfile_serialization=new_format)
        assert same(to_official(tost.load_official(file)), state)
        assert same(to_official(tost.load_official(str(file))), state)


def test_safetensors_file(state, tmp_path):
    save_file(state, tmp_path / "model.safetensors")
    assert same(to_official(tost.load_official(tmp_path / "model.safetensors")), state)
    language = language_state()
    save_file({name: tensor.clone() for name, tensor in language.items()}, tmp_path / "language")
    model = tost.load_official(tmp_path / "language")
    assert model.options.tie_head
    assert same(to_official(model), language)


def test_moving_averages(state, tmp_path):
    average = {name: tensor * 2 for name, tensor in state.items()}
    torch.save({"model": state, "model_ema": prefixed(average, "module.")}, tmp_path / "both.pth")
    assert same(to_official(tost.load_official(tmp_path / "both.pth", weights="ema")), average)
    assert same(to_official(tost.load_official(tmp_path / "both.pth", weights="model")), state)
    with pytest.raises(CheckpointError, match=r"no entry 'model_ema'.*weights='ema'.*it holds model, epoch"):
        tost.load_official({"model": state, "epoch": 3}, weights="ema")
    with pytest.raises(CheckpointError, match=r"no entry 'model'.*it holds model_ema"):
        tost.load_official({"model_ema": state})
    with pytest.raises(CheckpointError, match="weights='best' is not known"):
        tost.load_official(state, weights="best")


class Payload:
    """Calls a function with arguments as soon as it is unpickled by the ordinary reader."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Sleeper:
    """Does its harm in ``__setstate__``."""

    def __setstate__(self, state: Any) -> None:
        Path(state["path"]).touch()

    def __getstate__(self) -> Any:
        return self.__dict__


def attacks(path: Path) -> dict[str, tuple[Any, str]]:
    code = f"open({str(path)!r}, 'w').close()"
    sleeper = Sleeper()
    sleeper.path = str(path)
    return {
        "system": (Payload(os.system, f"touch {path}"), "posix.system"),
        "exec": (Payload(exec, code), "exec"),
        "eval": (Payload(eval, code), "eval"),
        "touch": (Payload(Path.touch, path), "getattr"),
        "open": (Payload(open, str(path), "w"), "io.open"),
        "state": (sleeper, "Sleeper"),
        "in settings": (argparse.Namespace(lr=Payload(exec, code)), "exec"),
        "getattr": (Payload(getattr, argparse.Namespace(), "x"), "getattr"),
        "module": (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    }


@pytest.mark.parametrize("kind", attacks(Path("x")))
@pytest.mark.parametrize("place", ["beside", "among", "alone"])
@pytest.mark.parametrize("new_format", [True, False])
def test_nothing_in_a_file_is_ever_run(kind, place, new_format, state, tmp_path):
    harm = tmp_path / "harm"
    payload, name = attacks(harm)[kind]
    content = {"beside": {"model": state, "args": payload}, "among": {**state, "x": payload}, "alone": payload}[place]
    torch.save(content, tmp_path / "bad.pth", _use_new_zipfile_serialization=new_format)
    with pytest.raises(CheckpointError, match=r"refused and no code in the file was run") as caught:
        tost.load_official(tmp_path / "bad.pth")
    assert name in str(caught.value)
    assert not harm.exists()


@pytest.mark.parametrize("name", ["zip", "legacy", "safetensors"])
def test_no_damage_is_a_traceback(name, state, tmp_path):
    file, damaged = tmp_path / "good", tmp_path / "damaged"
    if name == "safetensors":
        save_file(state, file)
    else:
        torch.save({"model": state, "args": SETTINGS}, file, _use_new_zipfile_serialization=name == "zip")
    content = file.read_bytes()
    random = np.random.default_rng(0)
    for length in [0, 1, 7, 8, 9, 15, 16, 100, 1000, len(content) // 2, len(content) - 1]:
        damaged.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            tost.load_official(damaged)
    refused = 0
    for _ in range(60):
        changed = bytearray(content)
        for place in random.integers(0, min(len(content), 6000), size=3):
            changed[place] = random.integers(256)
        damaged.write_bytes(changed)
        try:
            tost.load_official(damaged)  # a changed weight is a weight all the same
        except CheckpointError:
            refused += 1
    assert refused > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "neither a PyTorch checkpoint nor a safetensors file"),
        (b"<html>404</html>", "starts with b'<html>40'.*an error page"),
        (b"PK", "damaged or not a PyTorch checkpoint"),
        (b"\x80\x02}.", "damaged or not a PyTorch checkpoint"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path):
    file = tmp_path / "file.pth"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        tost.load_official(file)
    with pytest.raises(CheckpointError, match=r"is a folder.*tost.load_model"):
        tost.load_official(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        tost.load_official(tmp_path / "nothing")


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
def test_a_small_file_does_not_become_a_large_model(state, tmp_path, new_format):
    path = tmp_path / "small.pth"
    repeated = {name: torch.zeros(()).expand(2**20 if x.dim() == 1 else x.shape) for name, x in state.items()}
    torch.save(repeated, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(CheckpointError, match=r"has [\d,]+ bytes, but its tensors would take .* repeat their values"):
        tost.load_official(path)


def test_a_packed_archive_is_refused(state, tmp_path):
    plain, packed = tmp_path / "plain.pth", tmp_path / "packed.pth"
    torch.save({name: torch.zeros_like(tensor) for name, tensor in state.items()}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert packed.stat().st_size < plain.stat().st_size // 5
    tost.load_official(plain)
    with pytest.raises(CheckpointError, match=r"has [\d,]+ bytes and unpacks to"):
        tost.load_official(packed)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list; a dictionary of tensors is needed"),
        (torch.zeros(2), "holds a Tensor"),
        ({"epoch": 1}, "holds no weights; it holds epoch"),
        ({}, "holds no weights; it holds nothing"),
        ({"cls_token": torch.zeros(1), "depth": 3}, r"not plain tensors: depth \(int\)"),
        ({"model": {}}, "neither"),
    ],
)
def test_other_content_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "file.pth")
    with pytest.raises(CheckpointError, match=message):
        tost.load_official(tmp_path / "file.pth")
