"""Train a language model with the Trainer of transformers, save it and generate from the saved folder.

Texts are read as bytes, so no tokenizer is needed: id 0 is padding, byte b is id b + 1.

python examples/hf_trainer.py --text README.md --steps 200
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tost.integrations.transformers import TostConfig, TostForCausalLM  # before transformers itself

# isort: split
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", type=Path, default=Path(__file__), help="file to learn from")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--out", type=Path, default=Path("bytes-model"), help="folder to write to")
options = parser.parse_args()

length, prompt = 64, b"import "
ids = torch.tensor(list(options.text.read_bytes())) + 1
windows = [{"input_ids": window, "labels": window} for window in ids.unfold(0, length, length // 2)]

config = TostConfig(
    embed_dim=64, depth=2, num_heads=4, vocab_size=257, pad_token_id=0, position="none", conv_width=4, layer_scale=1.0
)
model = TostForCausalLM(config)
arguments = TrainingArguments(
    output_dir=str(options.out),
    max_steps=options.steps,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    logging_steps=max(1, options.steps // 5),
    save_strategy="no",
    report_to=[],
    use_cpu=not torch.accelerator.is_available(),  # several processes on CPUs find each other only if it is said
)
trainer = Trainer(model, arguments, train_dataset=windows)
trainer.train()
trainer.save_model()

if trainer.is_world_process_zero():  # the process that wrote the folder
    trained = AutoModelForCausalLM.from_pretrained(options.out)
    start = torch.tensor([list(prompt)]) + 1
    text = trained.generate(start, max_new_tokens=60, do_sample=False)[0] - 1
    print("continuation:", bytes(text[text >= 0].tolist()))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
