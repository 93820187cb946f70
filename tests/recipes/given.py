"""What a built-in configuration has to be given, by the ``run`` line of its header."""

from __future__ import annotations

import re

from tost.recipes import find_config


def given(name: str) -> list[str]:
    """Overrides, such as ``data.path=somewhere``, without which the configuration cannot be used."""
    line = re.search(r"^#   run      tost train \S+(.*)$", find_config(name).read_text(), flags=re.MULTILINE)
    assert line
    return [f"{word.partition('=')[0]}=somewhere" for word in line[1].split()]
