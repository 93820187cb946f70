"""Steps of models on a GPU that is not there: its tensors have a device and a shape, but no numbers.

    python -m tests.models.fake_gpu [WORD ...]

prints one line for each case that fails; only cases with all the words in their names run. Tensors may be on the CPU as
well, as in a real run, and mixing them fails as it would there. So does waiting for the device: looking at a number,
or copying to the CPU. A device is registered with torch for good, hence the process of its own.
"""

import sys
from functools import partial
from types import ModuleType
from unittest.mock import patch

import torch
from torch import nn
from torch._C import _acc
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

import tost
from tests.models.tiny import LANGUAGE_VARIANTS, VISION_VARIANTS, distinct, example, make_tiny
from tost.generation import decode_step, prefill
from tost.models.mixers import list_mixers

DEVICE = "gpu"
LENGTHS = [5, 1, 18]


class Hooks(_acc.PrivateUse1Hooks):
    """What torch asks about a device."""

    def is_available(self):
        return True

    def has_primary_context(self, index):
        return True

    def is_built(self):
        return True


class Guard(_acc.DeviceGuard):
    """What makes a device the current one: there is nothing to do."""

    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


HOOKS, GUARD = Hooks(), Guard()


def register():
    """Tell torch about the device."""
    torch.utils.rename_privateuse1_backend(DEVICE)
    _acc.register_python_privateuseone_hook(HOOKS)
    _acc.register_python_privateuseone_device_guard(GUARD)
    module = ModuleType(DEVICE)
    module.is_initialized = module.is_available = lambda: True
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch._register_device_module(DEVICE, module)


class NoWaiting(TorchDispatchMode):
    """Fails where something is copied to the CPU. Looking at numbers fails without it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source = args[0] if func.overloadpacket is torch.ops.aten._to_copy else args[1]
            assert out.device.type == source.device.type or out.device.type != "cpu", "a copy waits for the device"
        return out


def make_tensor(make, data, *, device=None, **keywords):
    """``torch.tensor``, which would fill memory of the device."""
    made = make(data, **keywords)
    return made if device is None else torch.empty(made.shape, dtype=made.dtype, device=device)


def placed(name, **options):
    """A model on the device. Made without numbers, since initial values are looked at."""
    with unset_fake_temporarily(), torch.device("meta"):
        model = make_tiny(name, **options)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, x in tensors.items():
                if x is not None:
                    empty = torch.empty(x.shape, dtype=x.dtype, device=DEVICE)
                    tensors[key] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
    return model


def train(model, loss):
    """The end of a step of training; torch's optimizers count their steps on the CPU, which is looked at."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(p.grad is None or p.grad.device.type == DEVICE for p in model.parameters())


def step(name, **options):
    model = placed(name, **options)
    with torch.device(DEVICE):
        x = example(model, length=24)
    with NoWaiting():
        train(model, model(x).square().mean())


def language_step(name, **options):
    model = placed(name, **options)
    with torch.device(DEVICE):
        ids = example(model, length=24)
        mask = torch.ones(2, 24, dtype=torch.bool)
    with NoWaiting():
        train(model, model.loss(ids, ids, mask))
        if not hasattr(model.blocks[0].attention, "forward_with_state"):
            return
        train(model, model.loss(ids, ids, chunk=7))
        state = prefill(model, ids[:, :5])
        _, state = decode_step(model, ids[:, 5], state)
        decode_step(model, ids[:, 6], state, mask=mask[:, 6])


def packed_step(name, **options):
    """Sequences of different lengths in one row. Some backends need the lengths on the CPU: they ask for them once."""
    model = placed(name, **options)
    ids = torch.empty(1, sum(LENGTHS), dtype=torch.int64, device=DEVICE)
    packing = tost.Packing(torch.empty(len(LENGTHS) + 1, dtype=torch.int64, device=DEVICE), tuple(ids.shape))
    vars(packing)["lengths"] = LENGTHS
    with NoWaiting():
        train(model, model.loss(ids, ids, cu_seqlens=packing))
        if hasattr(model.blocks[0].attention, "forward_with_state") and model.options.mixer != "softmax":
            train(model, model.loss(ids, ids, cu_seqlens=packing, chunk=5))


def cases():
    """All cases by name."""
    found = {f"model {name}": partial(step, name) for name in distinct()}
    for mixer in list_mixers(place="sequence"):
        found[f"sequence mixer {mixer}"] = partial(step, "lra_listops", mixer=mixer, num_heads=2)
    for name, options in VISION_VARIANTS.items():
        found[f"vision {name}"] = partial(step, "tost_small_patch16_224", **options)
    mixers = {f"mixer {name}": {"mixer": name, "num_heads": 2} for name in list_mixers(place="language")}
    for name, options in {**LANGUAGE_VARIANTS, **mixers}.items():
        found[f"language {name}"] = partial(language_step, "tost_lm_base", **options)
        found[f"packed {name}"] = partial(packed_step, "tost_lm_base", **options)
    return found


MISTAKES = {
    "tensors of two devices": lambda x: x + torch.ones(3),
    "a number that is looked at": lambda x: x.sum().item(),
    "as many numbers as there are": lambda x: x[x > 0],
    "a copy to the CPU": lambda x: x.cpu(),
}


def notice_mistakes():
    """Fail unless mistakes do."""
    for name, call in MISTAKES.items():
        x = torch.ones(3, device=DEVICE)
        try:
            with NoWaiting():
                call(x)
        except (AssertionError, RuntimeError):
            continue
        raise AssertionError(f"not noticed: {name}")


def place_of(error):
    """The last line of the package that an error went through."""
    lines, where = [], error.__traceback__
    while where is not None:
        lines.append(f"{where.tb_frame.f_globals.get('__name__')}, line {where.tb_lineno}")
        where = where.tb_next
    return next((line for line in reversed(lines) if line.startswith("tost.")), lines[-1])


def main(*words):
    """Run cases, and write what fails; return how many ran."""
    register()
    chosen = {name: run for name, run in cases().items() if set(words) <= set(name.split())}
    for name, run in {"mistakes": notice_mistakes, **chosen}.items():
        try:
            with FakeTensorMode(), patch.object(torch, "tensor", partial(make_tensor, torch.tensor)):
                run()
        except Exception as error:
            message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            sys.stdout.write(f"{name}: {place_of(error)}: {message}\n")
    return len(chosen)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) == 0)
