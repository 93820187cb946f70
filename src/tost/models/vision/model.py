"""The vision model of the paper: XCiT's stem, positions and class attention, with TSSA blocks between them.

Shapes: images [B, channels, height, width], tokens [B, N, C] (batch, tokens, width), logits [B, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

import tost._torchvision  # noqa: F401  timm imports torchvision, which a CPU build of torch has to be prepared for

# isort: split
from timm.models.xcit import PositionalEncodingFourier

from tost.models._common import build_convolutions, build_mixer
from tost.models.vision.base import Grid, ImageModel
from tost.models.vision.options import VisionOptions
from tost.models.vision.parts import ClassBlock, ConvStem
from tost.nn import ISTA, MLP, Block, GridConvolution, TSSAttention, run_blocks
from tost.ops import Packing

NORM_EPS = 1e-6


class VisionToST(ImageModel):
    """An image classifier in linear time.

    .. code-block:: text

        x = patch_embed(images) + pos_embed(grid)                                       N tokens, one per patch
        x = x + gamma1 * attention(norm1(x)),  x = x + gamma2 * mlp(norm2(x))           for every block
        token, x = class_attention(token, x)                                            for every class block
        logits = head(norm(token))

    With its defaults it is the authors' network. Any image size and aspect will do, as the positions are Fourier
    features of the place within the image. The class token enters after the blocks. Linear layers start as truncated
    normal with deviation 0.02 and biases as 0; convolutions as in PyTorch.

    Other token mixers and the sparsifying feed-forward of CRATE are options: the same network for fair comparison.

    Args:
        options: Sizes and choices, kept as ``model.options``.

    Example:
        >>> import torch, tost
        >>> model = tost.create_model("tost_tiny_patch16_224", num_classes=10)
        >>> model(torch.randn(2, 3, 96, 64)).shape
        torch.Size([2, 10])
    """

    options: VisionOptions

    def __init__(self, options: VisionOptions) -> None:
        super().__init__(options)
        o, C = options, options.embed_dim
        self.patch_embed = ConvStem(o.patch_size, o.in_chans, C)
        self.pos_embed = PositionalEncodingFourier(dim=C)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, C))
        self.pos_drop = nn.Dropout(o.dropout)
        self.blocks = nn.ModuleList(self._new_block(rate) for rate in o.drop_paths())
        self.cls_attn_blocks = nn.ModuleList(self._new_class_block() for _ in range(o.class_depth))
        self.norm = nn.LayerNorm(C, eps=NORM_EPS)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images; see `ImageModel.forward`."""
        if self.global_pool != "token":
            return super().forward(images)
        # Only the class token is wanted, so the last class block need not return the patches.
        x, grid = self._start(images)
        for block in self.blocks:
            x = self._block(block, x, grid)
        token, _ = self._look(x, keep_patches=False)
        return self.forward_head(self.norm(token))

    def forward_packed(self, images: Sequence[Tensor]) -> Tensor:
        """Classify images of different sizes at once, without padding or resizing, as NaViT does.

        The patches of all images lie in one row, and each image is a sequence of its own. In training the batch norms
        of the stem see the images of one size together.

        Args:
            images: Normalized images, ``[channels, height, width]`` each.

        Returns:
            Logits ``[len(images), K]``, or features without a head: what each image gives alone.

        Raises:
            ValueError: There is no image, one is not of this form, or the model returns tokens (``global_pool=""``).
            ConfigError: The blocks have convolutions over the grid of an image.
        """
        if not images or not self.global_pool:
            raise ValueError(
                f"{len(images)} images with global_pool={self.global_pool!r} give no row each; pass at least one image "
                "to a model with global_pool='token' or 'avg'."
            )
        parts: dict[int, Tensor] = {}
        for size in dict.fromkeys(image.shape for image in images):
            members = [i for i, image in enumerate(images) if image.shape == size]
            tokens, _ = self._start(torch.stack([images[i] for i in members]))
            parts |= dict(zip(members, torch.split(tokens, 1), strict=True))
        lengths = [parts[i].shape[1] for i in range(len(images))]
        row = torch.cat([parts[i] for i in range(len(images))], dim=1)
        bounds = torch.tensor([0, *lengths], device=row.device).cumsum(0)
        packing = Packing.from_cu_seqlens(bounds, row.shape[1])
        row = run_blocks(self.blocks, row, packing=packing, recompute=self.grad_checkpointing)
        return torch.cat([self.forward_head(self._close(part)) for part in torch.split(row, lengths, dim=1)])

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that are exempt from weight decay though they are no vectors: the class token.

        The temperatures are vectors here, and so exempt wherever vectors are. The authors' training decays them: its
        optimizer takes them for matrices. This package's own optimizer has the switch ``optim.decay_statistics``.
        """
        return {"cls_token"}

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what `forward_intermediates` does not need; see `ImageModel.prune_intermediate_layers`."""
        if prune_head:
            self.cls_attn_blocks = nn.ModuleList()
        return super().prune_intermediate_layers(indices, prune_norm, prune_head)

    def _embed(self, images: Tensor) -> tuple[Tensor, Grid]:
        x, grid = self.patch_embed(images)
        # One map for all images: it depends on the grid alone.
        positions = self.pos_embed(1, grid[0], grid[1]).flatten(2).transpose(1, 2)
        return self.pos_drop(x + positions), grid

    def _block(self, block: nn.Module, x: Tensor, grid: Grid) -> Tensor:
        return self._call(block, x, None, grid)

    def _close(self, x: Tensor) -> Tensor:
        token, patches = self._look(x, keep_patches=True)
        return self.norm(torch.cat((token, patches), dim=1))

    def _look(self, patches: Tensor, *, keep_patches: bool) -> tuple[Tensor, Tensor]:
        """Run the class blocks; without `keep_patches` the patches that come back are of no use."""
        # A copy, as torch's own counters and hooks take a view of a parameter for a parameter.
        token = self.cls_token.to(patches.dtype).repeat(patches.shape[0], 1, 1)
        for i, block in enumerate(self.cls_attn_blocks, 1):
            keep = keep_patches or i < len(self.cls_attn_blocks)
            token, changed = self._call(block, token, patches, keep)
            patches = patches if changed is None else changed
        return token, patches

    def _new_block(self, drop_path: float) -> Block:
        o, C = self.options, self.options.embed_dim
        convs = build_convolutions(o, GridConvolution)
        return Block(
            build_mixer(o, value_conv=convs.pop("value_conv")),
            ISTA(C) if o.feed_forward == "ista" else MLP(C, o.hidden_dim, drop=o.dropout),
            C,
            norm_eps=NORM_EPS,
            layer_scale=o.layer_scale,
            drop_path=drop_path,
            **convs,
        )

    def _new_class_block(self) -> ClassBlock:
        o = self.options
        return ClassBlock(
            o.embed_dim,
            o.num_heads,
            mlp_ratio=(o.hidden_dim + 0.5) / o.embed_dim,  # timm rounds down
            qkv_bias=True,
            proj_drop=o.dropout,
            attn_drop=o.dropout,
            norm_layer=partial(nn.LayerNorm, eps=NORM_EPS),  # type: ignore[arg-type]
            eta=o.layer_scale,
            tokens_norm=o.tokens_norm,
        )

    def _new_head(self, num_classes: int) -> nn.Module:
        head = super()._new_head(num_classes)
        _initialize(head)
        return head


def _initialize(module: nn.Module) -> None:
    """Start a linear layer as all of them start, then attention as its extensions ask; leave everything else alone."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, TSSAttention):
        module.reset_scale()
