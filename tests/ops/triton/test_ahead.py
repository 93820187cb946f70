"""The kernels compiled for devices that are not here: nothing spills, and loads are wide."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton has no packages for this platform")

SHAPES = ["4x48", "6x64", "8x48", "12x64", "16x64", "20x64", "24x64"]
WIDE = ("tssa.moments", "causal.memberships", "causal.gradient")
CALLS = {"tssa forward", "tssa backward", "short tssa forward", "causal forward", "causal backward", "causal step"}


def resources(cache, *arguments):
    """What `tost.ops.triton.ahead` prints. In its own process: this one interprets kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tost.ops.triton.ahead", *arguments]
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found, target):
    for each in found:
        assert each["registers"] <= 192, each
        assert each["stack"] <= (0 if target == "gfx942" else 16), each
        # As much as one program may have on all targets.
        assert each["shared"] <= 48 * 1024, each
    if target != "gfx942":
        wide = [each for each in found if each["kernel"] in WIDE]
        assert wide
        assert all(each["widest_load"] == 128 for each in wide)


@pytest.mark.parametrize(("shape", "name"), [("8x48", "tssa forward"), ("6x64", "causal backward")])
def test_plain_forms_compile_for_sm90(tmp_path, shape, name):
    found = resources(tmp_path, "sm90", shape, "bfloat16", name)
    assert len(found) >= 5
    check(found, "sm90")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
def test_every_kernel_compiles_without_spilling(tmp_path, target, shape, dtype):
    found = resources(tmp_path, target, shape, dtype)
    assert {each["call"] for each in found} == CALLS | {f"{name}, all options" for name in CALLS}
    check(found, target)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["1x1", "3x5", "2x128", "1x256", "64x64"])
def test_other_shapes_compile(tmp_path, shape):
    assert resources(tmp_path, "sm90", shape, "float16")
