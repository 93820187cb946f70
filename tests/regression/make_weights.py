"""Write the small model folders beside this file; run once, with the version whose format is to stay readable.

The folder `sequence` was written at revision be43f5d from weights of an earlier one, the others at 1ae0fcd, before most
options of the models were removed. They are kept as they are: `test_weights.py` loads them with today's code.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

import tost

HERE = Path(__file__).parent / "weights"
MODELS = {
    "language": (
        "tost_lm_base",
        {"embed_dim": 16, "depth": 2, "num_heads": 2, "vocab_size": 32, "max_length": 12}
        | {"conv_width": 4, "conv_at": "both"},
    ),
    "vision": ("tost_mini", {"embed_dim": 16, "depth": 2, "num_heads": 2, "conv_width": 3}),
    "sequence": (
        "lra_listops",
        {"embed_dim": 16, "depth": 2, "num_heads": 2, "max_length": 12, "mixer": "reformer"}
        | {"mixer_options": {"chunk_size": 4}},
    ),
}


def example(kind: str) -> torch.Tensor:
    """Return the inputs of a model, the same on every machine."""
    if kind == "vision":
        return (torch.arange(2 * 3 * 16 * 16).reshape(2, 3, 16, 16) % 17).float() / 17
    return (torch.arange(20).reshape(2, 10) * 7) % 15


def main() -> None:
    """Write every folder, and beside it its outputs in evaluation."""
    from tost.train.checkpoint.model import save_model

    for kind, (name, options) in MODELS.items():
        torch.manual_seed(0)
        model = tost.create_model(name, **options).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # fresh biases and scales hide mistakes
                parameter.add_(0.1 * torch.randn_like(parameter))
            outputs = model(example(kind))
        save_model(model, HERE / kind, name=name)
        save_file({"outputs": outputs}, HERE / f"{kind}.safetensors")


if __name__ == "__main__":
    main()
