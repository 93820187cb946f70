"""Write the small transformers folders beside this file; run once, with the version whose format is to stay readable.

They were written by version 0.1.0, whose model class was a shell around `LanguageToST` with the output layer inside,
before there was a base model. `test_transformers.py` loads them with today's code. The decays of ``tied``, which were
removed since, were taken out by hand, and its logits computed at revision 1ae0fcd.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent / "transformers"
SIZES = {"embed_dim": 16, "depth": 2, "num_heads": 2, "vocab_size": 32, "max_position_embeddings": 12}
MODELS = {"tied": {"conv_width": 3}, "free": {"tie_head": False, "bias": True, "eos_token_id": 3}}


def example() -> torch.Tensor:
    """Return the inputs of a model, the same on every machine."""
    return (torch.arange(20).reshape(2, 10) * 7) % 15


def main() -> None:
    """Write every folder, and beside it its logits."""
    from tost.integrations.transformers import TostConfig, TostForCausalLM

    for kind, options in MODELS.items():
        torch.manual_seed(0)
        model = TostForCausalLM(TostConfig(**SIZES, **options)).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # fresh biases and scales hide mistakes
                parameter.add_(0.1 * torch.randn_like(parameter))
            logits = model(example()).logits
        model.save_pretrained(HERE / kind)
        save_file({"logits": logits}, HERE / f"{kind}.safetensors")


if __name__ == "__main__":
    main()
