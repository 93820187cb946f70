"""The threads of the native kernels: how many, after a fork, and whether their number shows in a result."""

import os
import subprocess
import sys

import pytest
import torch

import tost
from tests.ops.cases import OPERATORS, make_case
from tost.ops import _library

pytestmark = pytest.mark.skipif(bool(_library.unavailable()), reason="without the native library there are no threads")


def test_the_number_of_threads_is_torchs_unless_the_process_gets_less(monkeypatch):
    monkeypatch.setattr(_library, "_TORCH_DEFAULT", 8)
    monkeypatch.setattr(_library, "_OUR_DEFAULT", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert _library.num_threads() == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)  # somebody chose
    assert _library.num_threads() == 5
    assert _library.native_info()["threads"] == "5"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_a_forked_process_does_not_wait_for_threads_that_it_does_not_have():
    code = """
import os, warnings
import torch, tost
from tost.ops import _library
torch.set_num_threads(4)
w, t = torch.randn(2, 2048, 8, 48), torch.ones(8)
expected = tost.causal_tssa(w, t)
assert torch.equal(tost.tssa(w, t), tost.tssa(w, t))
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    threads, y = _library.num_threads(), tost.causal_tssa(w, t)
    torch.set_num_threads(1)  # torch's own operators would wait
    os._exit(0 if threads == 1 and torch.equal(y, expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), _library.num_threads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0", "4"], done.stderr


@pytest.mark.parametrize("run", OPERATORS.values(), ids=OPERATORS)
def test_native_results_do_not_depend_on_the_number_of_threads(run):
    case, results = make_case((2, 1500, 4, 12), torch.float32, masked=True), []
    w, t = case.w.requires_grad_(), case.temperature.requires_grad_()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        y = run(w, t, mask=case.mask, backend="native")
        results.append((y, *torch.autograd.grad(y, (w, t), case.dy)))
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


@pytest.mark.parametrize("width", [64, 512])
def test_the_number_of_threads_does_not_show_in_generated_text(width):
    # One model is too small for threads, the other is not; four of them on fewer processors have to wait asleep.
    model = tost.create_model("tost_lm_base", embed_dim=width, depth=2, num_heads=4, vocab_size=256, max_length=64)
    ids, texts = torch.randint(256, (2, 5)), []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        texts.append(tost.generate(model.eval(), ids, max_new_tokens=20, generator=generator))
    assert torch.equal(*texts)
