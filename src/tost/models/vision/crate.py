"""CRATE, the white-box transformer that ToST is compared with: subspace attention and a sparsifying step.

Shapes: images [B, channels, height, width], tokens [B, 1 + N, C] (batch, class token and patches, width), logits
[B, K].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.models.vision.base import Grid, ImageModel
from tost.models.vision.options import CrateOptions
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
