"""`tost info`: installed packages, backends with reasons where one cannot run, environment variables."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tost._env import VARIABLES
from tost.cli import _console
from tost.cli._arguments import Json

_PACKAGES = ("torch", "triton", "numpy", "timm", "torchvision", "transformers", "accelerate", "datasets", "matplotlib")


def info(json: Json = False) -> None:
    """Show what is installed, what can run here and why not."""
    found = collect()
    versions = {**found["versions"], **{name: text or "not installed" for name, text in found["packages"].items()}}
    machine = {"devices": ", ".join(found["devices"]), "threads": str(found["threads"])}
    machine |= {"train.precision=auto": found["precision"]}
    backends = [(op, name, status) for op, statuses in found["backends"].items() for name, status in statuses.items()]
    _console.show_table(("package", "version"), list(versions.items()), title="Versions")
    _console.show_table(("machine", ""), list(machine.items()))
    _console.show_table(("op", "backend", "status"), backends, title="Backends, fastest first")
    for title in ("native", "triton"):
        _console.show_table((f"{title} kernels", ""), list(found[title].items()))
    variables = [tuple(entry.values()) for entry in found["variables"]]
    _console.show_table(("variable", "value", "source", "takes", "meaning"), variables, title="Environment variables")
    if _package_version("tost"):
        _console.log("another distribution called tost is installed and may shadow this one; run: pip uninstall tost")
    if json:
        _console.show_json(found)


def collect() -> dict[str, Any]:
    """Return what `tost info` shows. Optional packages are not imported, so a broken one cannot break this command."""
    import torch

    import tost
    from tost._machine import choose_device, cpu_model, fast_precision
    from tost.ops import native_info, operators
    from tost.ops.triton.tiles import TARGET_NAMES

    devices = [f"cpu ({cpu_model()})"]
    devices += [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    return {
        "versions": {"tost": tost.__version__, "python": platform.python_version()},
        "packages": {name: _package_version(name) for name in _PACKAGES},
        "devices": devices,
        "threads": torch.get_num_threads(),
        "precision": fast_precision(choose_device("auto")),
        "backends": {op: dict(tost.available_backends(op)) for op in operators()},
        "native": native_info(),
        "triton": {"compiled in tests for": ", ".join(TARGET_NAMES), "run on a GPU by us": "never; experimental"},
        "variables": [
            {
                **{"name": variable.name, "value": variable.get()},
                **{"source": "set" if variable.name in os.environ else "default"},
                **{"values": ", ".join(variable.values) or "any text", "help": variable.help},
            }
            for variable in VARIABLES
        ],
    }


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
