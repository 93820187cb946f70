"""The repair of torchvision, each time in a fresh interpreter: imports cannot be undone."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEALTHY = """
import sys, types
import torch
fake = types.ModuleType("torchvision")
sys.modules["torchvision"] = fake
import tost._torchvision
assert sys.modules["torchvision"] is fake
assert not tost._torchvision._libraries
"""
ABSENT = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name == "torchvision" else find(name, *rest))
import tost._torchvision
assert "torchvision" not in sys.modules
"""
IMPORTS = """
import tost._torchvision
import torch, torchvision, timm
from torchvision import transforms
image = transforms.Resize(4)(torch.rand(3, 8, 8))
assert image.shape == (3, 4, 4)
assert timm.create_model("test_vit")(torch.rand(1, 3, 160, 160)).shape == (1, 1000)
"""


@pytest.mark.parametrize("program", [HEALTHY, ABSENT, IMPORTS], ids=["healthy", "absent", "imports"])
def test_torchvision_is_repaired_only_where_it_must_be(program):
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
