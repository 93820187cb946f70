"""Stores what can be known about the Triton kernels without a GPU, in benchmarks/results/kernels.json.

python scripts/measure_kernels.py                  everything
python scripts/measure_kernels.py 24x64 bfloat16   of what is compiled, only what has all these words in its name

Bytes and launches are counted under Triton's interpreter; registers and stack come from compiling ahead of time for
four targets. What the file has already is not measured again, unless the code of the kernels or the version of triton
is another: then everything is. Takes about half an hour, and may be interrupted. `scripts/update_gpu.py` makes
docs/gpu.md from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tokenize

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from pathlib import Path
from typing import Any

import torch
import triton
from page_file import MEASUREMENTS, ROOT

import tost.ops.triton

sys.path.insert(0, str(ROOT))

from tests.ops.triton.interpreter import metered_calls, speed_up
from tests.ops.triton.limits import DTYPES, SHAPES
from tost.ops.triton.tiles import TARGET_NAMES

__all__ = ["FILE", "fingerprint", "main"]

FILE = MEASUREMENTS / "kernels.json"
FOLDER = Path(tost.ops.triton.__file__).parent
TOKENS = 512


def fingerprint() -> str:
    """Return a hash of the code of kernels, tiles and launches, without comments and docstrings."""
    found = hashlib.sha256()
    for path in (*sorted(FOLDER.glob("kernels/*.py")), FOLDER / "launch.py", FOLDER / "tiles.py"):
        with path.open("rb") as file:
            for kind, text, *_ in tokenize.tokenize(file.readline):
                if kind not in (tokenize.COMMENT, tokenize.NL) and not text.startswith('"""'):
                    found.update(f"{tokenize.tok_name[kind]} {text}\n".encode())
    return found.hexdigest()[:16]


def traffic(shape: str) -> dict[str, Any]:
    """Return launches and bytes of every call on one sequence in bfloat16, by kernel."""
    H, D = map(int, shape.split("x"))
    return {
        name: {
            "tokens_bytes": size,
            "launches": [{"kernel": x.kernel, "programs": x.programs, "bytes": x.bytes} for x in launches],
        }
        for name, (launches, size) in metered_calls(H, D, TOKENS).items()
    }


def resources(target: str, shape: str, dtype: str) -> dict[str, dict[str, int]]:
    """Return the most that every kernel needs on a target in any form, from a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tost.ops.triton.ahead", target, shape, dtype]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found: dict[str, dict[str, int]] = {}
    for each in map(json.loads, said.splitlines()):
        most = found.setdefault(each["kernel"], {"registers": 0, "stack": 0, "shared": 0})
        for name in most:
            most[name] = max(most[name], each[name])
    return found


def store(path: Path, found: dict[str, Any]) -> None:
    """Write what was found so far."""
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def main(*words: str, path: Path = FILE) -> None:
    """Measure what the file does not have yet; of what is compiled, what has all the words in its name."""
    versions = {"torch": torch.__version__, "triton": triton.__version__, "tost": tost.__version__}
    found: dict[str, Any] = {"kernels": fingerprint(), "versions": versions, "traffic": {}, "resources": {}}
    if path.exists():
        before = json.loads(path.read_text())
        if (before.get("kernels"), before["versions"]["triton"]) == (found["kernels"], versions["triton"]):
            found = before | {"versions": versions}
    speed_up()
    for shape in SHAPES:
        if shape not in found["traffic"]:
            found["traffic"][shape] = traffic(shape)
            store(path, found)
    for dtype in DTYPES:
        for shape in SHAPES:
            for target in TARGET_NAMES:
                key = f"{target} {shape} {dtype}"
                if key not in found["resources"] and set(words) <= set(key.split()):
                    print(key, flush=True)
                    found["resources"][key] = resources(target, shape, dtype)
                    store(path, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
