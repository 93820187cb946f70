"""The kernels compiled for devices that are not here: nothing spills, and loads are wide."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton has no packages for this platform")

from tests.ops.triton.limits import DTYPES, SHAPES, check_resources
from tost.ops.triton.tiles import TARGET_NAMES

WIDE = ("tssa.moments", "causal.memberships", "causal.gradient")
CALLS = {"tssa forward", "tssa backward", "short tssa forward", "causal forward", "causal backward", "causal step"}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Triton's cache, for many shapes and types have kernels in common: that of the environment, or one of these tests.

    What is compiled is found in it by the text of the kernel, its constants, the target and the version of triton.
    """
    return os.environ.get("TRITON_CACHE_DIR") or str(tmp_path_factory.mktemp("triton"))


def resources(cache, *arguments):
    """What `tests.ops.triton.ahead` prints. In its own process: this one interprets kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton.ahead", *arguments]
    environment["TRITON_CACHE_DIR"] = cache
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found, target):
    for each in found:
        check_resources(each, target)
    if target != "gfx942":
        wide = [each for each in found if each["kernel"] in WIDE]
        assert wide
        assert all(each["widest_load"] == 128 for each in wide)


@pytest.mark.parametrize(
    ("shape", "name"), [("8x48", "tssa forward"), pytest.param("6x64", "causal backward", marks=pytest.mark.slow)]
)
def test_plain_forms_compile_for_sm90(cache, shape, name):
    found = resources(cache, "sm90", shape, "bfloat16", name)
    assert len(found) >= 5
    check(found, "sm90")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", TARGET_NAMES)
def test_every_kernel_compiles_without_spilling(cache, target, shape, dtype):
    found = resources(cache, target, shape, dtype)
    assert {each["call"] for each in found} == CALLS | {f"{name}, all options" for name in CALLS}
    check(found, target)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["1x1", "3x5", "2x128", "1x256", "64x64"])
def test_other_shapes_compile(cache, shape):
    assert resources(cache, "sm90", shape, "float16")
