"""The attention classes of other libraries that can be replaced. Loads none of them."""

from __future__ import annotations

TIMM = {
    ("timm.layers.attention", "Attention"): "ViT",
    ("timm.models.beit", "Attention"): "BEiT",
    ("timm.models.swin_transformer", "WindowAttention"): "Swin",
}
"""By module and name: the models that they are from."""

BERT = ("query", "key", "value", None)
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj")
TRANSFORMERS: dict[str, tuple[str | None, ...]] = {
    "BertSelfAttention": BERT,
    "RobertaSelfAttention": BERT,
    "XLMRobertaSelfAttention": BERT,
    "CamembertSelfAttention": BERT,
    "ElectraSelfAttention": BERT,
    "DistilBertSelfAttention": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "ViTAttention": LLAMA,
    "GPT2Attention": ("c_attn", "c_proj"),
    "LlamaAttention": LLAMA,
    "MistralAttention": LLAMA,
    "Qwen2Attention": LLAMA,
    "Qwen3Attention": LLAMA,
}
"""By name: the projections to queries, keys and values, or one for all three; the output projection, if it has one."""
