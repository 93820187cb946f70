"""What a process knows about its device."""

from types import SimpleNamespace

import pytest
import torch

from tost.ops import backends_on, operators
from tost.train.distributed import Distributed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_backends_are_those_of_the_device(device):
    """The native kernels run on CPUs; on a graphics card nothing says "native"."""
    text = Distributed.describe_backends(SimpleNamespace(device=torch.device(device)))
    for op in operators():
        ready = [name for name, status in backends_on(device, op).items() if status == "ready"]
        assert f"{op} by {ready[0]}" in text
    assert device == "cpu" or "native" not in text
