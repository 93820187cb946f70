"""The vision transformer with softmax attention, from timm, with the options and counts of this package's models."""

from __future__ import annotations

import tost._torchvision  # noqa: F401  timm imports torchvision, which a CPU build of torch has to be prepared for

# isort: split
from timm.models.vision_transformer import VisionTransformer

from tost.models.vision.base import CountedModel
from tost.models.vision.options import VitOptions


class ViT(CountedModel, VisionTransformer):
    """timm's VisionTransformer, nothing else: patches by one convolution, learned positions, a class token.

    Its parameters have timm's names, so that timm's weights load as they are. It takes images of the size that it was
    made for.

    Example:
        >>> import torch, tost
        >>> model = tost.create_model("vit_mini", num_classes=10)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, options: VitOptions) -> None:
        o, same = options, ("patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "depth", "num_heads")
        super().__init__(
            img_size=o.image_shape,
            **{name: getattr(o, name) for name in same},
            mlp_ratio=(o.hidden_dim + 0.5) / o.embed_dim,  # timm rounds down
            drop_rate=o.head_dropout,
            pos_drop_rate=o.dropout,
            proj_drop_rate=o.dropout,
            attn_drop_rate=o.dropout,
            drop_path_rate=o.drop_path,
        )
        self.options = options
        self.set_grad_checkpointing(o.gradient_checkpointing)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a fresh one; see `ImageModel.reset_classifier`."""
        changes = {"num_classes": num_classes} | ({} if global_pool is None else {"global_pool": global_pool})
        super().reset_classifier(num_classes, global_pool)
        self.options = VitOptions.model_validate({**self.options.model_dump(), **changes})
