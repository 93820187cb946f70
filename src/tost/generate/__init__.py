"""Generation: a prompt is read into a state of constant size, then every token costs the same.

The package itself can be called: ``tost.generate(model, ids, max_new_tokens=20)`` is ``tost.generate.generate(...)``.
Importing it loads no torch.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tost._lazy import lazy

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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "decode": ("context_limit", "decode_step", "prefill", "state_bytes"),
        "run": ("Generation", "generate", "generate_with_state"),
        "sampling": ("Sampling",),
        "state_file": ("load_state", "save_state"),
        "stream": ("Continuation", "ENDED", "TokenStream", "stream_tokens"),
        "tokenizer": ("ByteTokenizer", "TextStream", "TokenDecoder", "Tokenizer"),
    },
)


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
