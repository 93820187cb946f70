"""Read a text of any length piece by piece, then continue it: the state never grows.

The model is untrained, so what it writes is noise; `tost.load_model("runs/bytes")` gives a trained one.

python examples/stream_text.py --text README.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import tost

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", type=Path, default=Path(__file__), help="file to read")
parser.add_argument("--piece", type=int, default=256, help="bytes that are read at once")
options = parser.parse_args()

torch.manual_seed(0)
size = {"embed_dim": 64, "depth": 2, "num_heads": 4, "vocab_size": 256}
model = tost.create_model("tost_lm_base", **size, position="none", layer_scale=None)  # no limit on the length
ids = torch.tensor([list(options.text.read_bytes())])

with torch.inference_mode():
    state = None
    for piece in ids.split(options.piece, dim=1):
        logits, state = model.forward_with_state(piece, state)
        numbers = sum(part.numel() for layer in state.layers for part in layer)
        print(f"{int(state.layers[0].position):>8} bytes read, {numbers} numbers of state")
    difference = (logits[:, -1] - model(ids)[:, -1]).abs().max()
    print(f"largest difference from reading all at once: {difference:.1e}")

seed = torch.Generator().manual_seed(0)
text = tost.generate(model, ids, max_new_tokens=40, temperature=0.8, generator=seed)
print("continuation:", bytes(text[0, ids.shape[1] :].tolist()))
