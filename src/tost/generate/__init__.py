"""Generation: a prompt is read into a state of constant size, then every token costs the same.

The package itself can be called: ``tost.generate(model, ids, max_new_tokens=20)`` is ``tost.generate.generate(...)``.
Importing it loads no torch.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tost.generate.decode import context_limit, decode_step, prefill, state_bytes
    from tost.generate.run import Generation, generate, generate_with_state
    from tost.generate.sampling import Sampling
    from tost.generate.state_file import load_state, save_state
    from tost.generate.stream import ENDED, Continuation, TokenStream, stream_tokens
    from tost.generate.tokenizer import ByteTokenizer, TextStream, TokenDecoder, Tokenizer

__all__ = [
    "ENDED",
    "ByteTokenizer",
    "Continuation",
    "Generation",
    "Sampling",
    "TextStream",
    "TokenDecoder",
    "TokenStream",
    "Tokenizer",
    "context_limit",
    "decode_step",
    "generate",
    "generate_with_state",
    "load_state",
    "prefill",
    "save_state",
    "state_bytes",
    "stream_tokens",
]

_HOME = {
    "ENDED": "stream",
    "ByteTokenizer": "tokenizer",
    "Continuation": "stream",
    "Generation": "run",
    "Sampling": "sampling",
    "TextStream": "tokenizer",
    "TokenDecoder": "tokenizer",
    "TokenStream": "stream",
    "Tokenizer": "tokenizer",
    "context_limit": "decode",
    "decode_step": "decode",
    "generate": "run",
    "generate_with_state": "run",
    "load_state": "state_file",
    "prefill": "decode",
    "save_state": "state_file",
    "state_bytes": "decode",
    "stream_tokens": "stream",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tost.generate' has no attribute {name!r}")
    value = getattr(import_module(f"tost.generate.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Makes ``tost.generate(...)`` work next to ``from tost.generate import ...``.

    The import system binds a package to its name in the parent package, so a function of the same name could not stay
    there.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.generate(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.generate)


sys.modules[__name__].__class__ = _Package
