"""CRATE and the vision transformer, the networks that ToST is compared with.

Shapes: images [B, channels, height, width], tokens [B, 1 + N, C] (batch, class token and patches, width), logits
[B, K].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tost._torchvision  # noqa: F401  timm imports torchvision, which a CPU build of torch has to be prepared for

# isort: split
from timm.models.vision_transformer import VisionTransformer

from tost.models.options import CrateOptions, VitOptions
from tost.models.vision.base import CountedModel, Grid, ImageModel
from tost.nn import ISTA, Block, SubspaceAttention


class CRATE(ImageModel):
    """A white-box image classifier with softmax attention inside the subspaces.

    .. code-block:: text

        x = [token, patch_embed(patches)] + pos_embed
        x = x + attention(norm1(x)),  x = ista(norm2(x))         for every block
        logits = head(norm(x[0]))

    Patches go through a norm, a linear layer and a norm. Class token and positions are learned and start as N(0, 1);
    everything else starts as in PyTorch. Images of another size than the model was made for get its positions by
    bicubic interpolation, as is usual for learned positions; height and width have to be multiples of the patch.

    Example:
        >>> import torch, tost
        >>> model = tost.create_model("crate_mini", num_classes=10)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    options: CrateOptions
    _leading = 1

    def __init__(self, options: CrateOptions) -> None:
        super().__init__(options)
        o, C, pixels = options, options.embed_dim, options.patch_size**2 * options.in_chans
        self.grid: Grid = (o.image_shape[0] // o.patch_size, o.image_shape[1] // o.patch_size)
        self.patch_embed = nn.Sequential(nn.LayerNorm(pixels), nn.Linear(pixels, C), nn.LayerNorm(C))
        self.cls_token = nn.Parameter(torch.randn(1, 1, C))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + self.grid[0] * self.grid[1], C))
        self.pos_drop = nn.Dropout(o.dropout)
        self.blocks = nn.ModuleList(self._new_block(rate) for rate in o.drop_paths())
        self.norm = nn.LayerNorm(C)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that are exempt from weight decay though they are no vectors.

        They are the class token and the positions, as in every timm model. CRATE's own training decays everything.
        """
        return {"cls_token", "pos_embed"}

    def _embed(self, images: Tensor) -> tuple[Tensor, Grid]:
        pixels = _patches(images, self.options.patch_size)
        grid = (pixels.shape[1], pixels.shape[2])
        x = self.patch_embed(pixels.flatten(3).flatten(1, 2))
        x = torch.cat((self.cls_token.to(x.dtype).expand(x.shape[0], -1, -1), x), dim=1)
        return self.pos_drop(x + _positions(self.pos_embed, self.grid, grid).to(x.dtype)), grid

    def _resize(self, image: Grid) -> None:
        P = self.options.patch_size
        _check_size(image, P)
        grid = (image[0] // P, image[1] // P)
        self.pos_embed = nn.Parameter(_positions(self.pos_embed.detach(), self.grid, grid))
        self.grid = grid
        self.options = self.options.model_copy(update={"image_size": image[0] if image[0] == image[1] else image})

    def _close(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def _new_block(self, drop_path: float) -> Block:
        o, C = self.options, self.options.embed_dim
        return Block(
            SubspaceAttention(C, o.num_heads, attn_drop=o.dropout, out_drop=o.dropout),
            ISTA(C, step_size=o.step_size, threshold=o.threshold),
            C,
            drop_path=drop_path,
        )


def _check_size(image: Grid, patch: int) -> None:
    if image[0] % patch or image[1] % patch:
        raise ValueError(
            f"images of {image[0]} x {image[1]} pixels are not made of whole patches of {patch} x {patch}. "
            f"Resize or crop them to multiples of {patch}."
        )


# These depend on the size of the images: for torch.fx each is one step.
@torch.fx.wrap
def _patches(images: Tensor, patch: int) -> Tensor:
    """Return the pixels of every patch, ``[B, rows, columns, patch, patch, channels]``."""
    B, channels, height, width = images.shape
    _check_size((height, width), patch)
    rows, columns = height // patch, width // patch
    return images.reshape(B, channels, rows, patch, columns, patch).permute(0, 2, 4, 3, 5, 1)


@torch.fx.wrap
def _positions(table: Tensor, own: Grid, grid: Grid) -> Tensor:
    """Return the positions ``[1, 1 + N, C]`` of another grid than their own, by interpolation."""
    if grid == own:
        return table
    token, patches = table[:, :1], table[:, 1:]
    image = patches.transpose(1, 2).reshape(1, -1, *own)
    # Antialiasing exists for float32 and float64 only.
    wide = image.to(torch.promote_types(image.dtype, torch.float32))
    resized = F.interpolate(wide, size=grid, mode="bicubic", antialias=True).to(image.dtype)
    return torch.cat((token, resized.flatten(2).transpose(1, 2)), dim=1)


class ViT(CountedModel, VisionTransformer):
    """timm's VisionTransformer as it is: patches by one convolution, learned positions, a class token.

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
