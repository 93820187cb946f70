"""Keeps what is slow to make in build/site, until the package or the file it is made from changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

__all__ = ["ROOT", "kept"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "site"
SUFFIXES = (".cpp", ".h", ".json", ".png", ".py", ".safetensors", ".toml", ".yaml")


def kept(source: Path, make: Callable[[], str]) -> str:
    """Return what `make` returns, from the last time if nothing has changed since.

    Args:
        source: The file that it is made from, besides the package.
        make: Makes it.
    """
    found = hashlib.sha256(source.read_bytes())
    for file in sorted((ROOT / "src" / "tost").rglob("*")):
        if file.suffix in SUFFIXES:
            found.update(file.read_bytes())
    path = FOLDER / f"{source.stem}-{found.hexdigest()[:16]}.json"
    if not path.exists():
        text = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")
