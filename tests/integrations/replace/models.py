"""Tiny models of timm and transformers, one of each family, with what they take as input."""

from __future__ import annotations

import warnings

import torch
from torch import nn

import tost._torchvision  # noqa: F401

# isort: split
import timm
import tokenizers
import transformers

WIDTH, VOCABULARY, LENGTH = 32, 61, 12
ENCODER = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
DISTIL = {"dim": WIDTH, "n_layers": 3, "n_heads": 4, "hidden_dim": 40, "vocab_size": VOCABULARY}
GPT2 = {"n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": 40, "vocab_size": VOCABULARY}
IDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
PIXELS = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "depth": 3, "num_heads": 4, "num_classes": 7}

TIMM = {
    "vit": ("vit_tiny_patch16_224", VIT),
    "deit": ("deit_tiny_patch16_224", VIT),
    "beit": ("beit_base_patch16_224", VIT),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4},
    ),
}
ENCODERS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**ENCODER)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**ENCODER)),
    "distilbert": lambda: transformers.DistilBertModel(transformers.DistilBertConfig(**DISTIL)),
    "electra": lambda: transformers.ElectraModel(transformers.ElectraConfig(**ENCODER, embedding_size=WIDTH)),
}
DECODERS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **IDS)),
    "bert": lambda: transformers.BertLMHeadModel(transformers.BertConfig(**ENCODER, is_decoder=True)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=5)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=12)),
}
IMAGES = {"hf_vit": lambda: transformers.ViTModel(transformers.ViTConfig(**PIXELS, image_size=32, patch_size=8))}
ALL = [*TIMM, *(f"encoder_{name}" for name in ENCODERS), *(f"decoder_{name}" for name in DECODERS), *IMAGES]


def make(name: str) -> nn.Module:
    """A model in evaluation mode; every parameter is random, those that start as constants too."""
    torch.manual_seed(0)
    kind, _, family = name.rpartition("_")
    if name in TIMM:
        model = timm.create_model(TIMM[name][0], **TIMM[name][1])
    elif name in IMAGES:
        model = IMAGES[name]()
    else:
        model = {"encoder": ENCODERS, "decoder": DECODERS}[kind][family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def example(name: str, batch: int = 2) -> torch.Tensor:
    """What the model takes: images or tokens."""
    torch.manual_seed(1)
    if name in TIMM or name in IMAGES:
        return torch.randn(batch, 3, 32, 32)
    return torch.randint(1, VOCABULARY, (batch, LENGTH))


def letters_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of letters."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz ", 2)}
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="[PAD]", unk_token="[UNK]")


def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The first of the model's results."""
    found = model(x)
    return found if isinstance(found, torch.Tensor) else found[0]


def quietly(function, *args, **kwargs):
    """Call a function whose warnings are not the subject."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)
