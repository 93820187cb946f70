"""The vision model of the paper: XCiT's stem, positions and class attention, with TSSA blocks between them.

Shapes: images [B, channels, height, width], tokens [B, N, C] (batch, tokens, width), class token [B, 1, C], logits
[B, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tost._torchvision  # noqa: F401  timm imports torchvision, which a CPU build of torch has to be prepared for

# isort: split
from timm.models._features_fx import register_notrace_module
from timm.models.xcit import ClassAttentionBlock, PositionalEncodingFourier, conv3x3

from tost.models.common import build_convolutions, build_mixer
from tost.models.options import VisionOptions
from tost.models.vision.base import Grid, ImageModel
from tost.nn import ISTA, MLP, Block, BlockTSSAttention, GridConvolution, run_blocks
from tost.nn._checks import is_plain_linear
from tost.nn.recompute import is_recomputing, recompute
from tost.ops import Packing
from tost.ops._transforms import is_transformed

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
        self.cls_attn_blocks = nn.ModuleList(
            ClassBlock(
                C,
                o.num_heads,
                mlp_ratio=(o.hidden_dim + 0.5) / C,  # timm rounds down
                qkv_bias=True,
                proj_drop=o.dropout,
                attn_drop=o.dropout,
                norm_layer=partial(nn.LayerNorm, eps=NORM_EPS),  # type: ignore[arg-type]
                eta=o.layer_scale,
                tokens_norm=o.tokens_norm,
            )
            for _ in range(o.class_depth)
        )
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
        """Remove the parts that `forward_intermediates` does not need; see `ImageModel.prune_intermediate_layers`."""
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

    def _new_head(self, num_classes: int) -> nn.Module:
        head = super()._new_head(num_classes)
        _initialize(head)
        return head


def _initialize(module: nn.Module) -> None:
    """Initialize a linear layer or an attention in blocks; other modules stay as they are."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, BlockTSSAttention):
        module.reset_scale()


@register_notrace_module
class ConvStem(nn.Module):
    """The stem of XCiT: convolutions of stride 2 with batch norm, and GELUs between them.

    There is one convolution per factor of two in the patch size; the width doubles from one to the next. With patches
    of 8 and 16 pixels this is timm's ``ConvPatchEmbed``, with the same names of parameters; 2 and 4 continue it to
    small images. Any image size will do: the grid of tokens is that of the image divided by the patch size, rounded up.

    In training, norms and GELUs are computed again in the backward pass. They are cheap, and their outputs would be the
    largest tensors of the whole model: a fifth of all that is kept, for images of any size.

    Args:
        patch_size: 2, 4, 8 or 16.
        in_chans: Channels of the images.
        embed_dim: Width of the tokens, C.
    """

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        steps = patch_size.bit_length() - 1
        widths = [in_chans, *(embed_dim >> i for i in reversed(range(steps)))]
        layers: list[nn.Module] = []
        for narrow, wide in pairwise(widths):
            layers += [conv3x3(narrow, wide, 2), nn.GELU()]  # type: ignore[no-untyped-call]
        self.patch_size = patch_size
        self.proj = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Turn images into tokens.

        Args:
            images: ``[B, channels, height, width]``.

        Returns:
            Tokens ``[B, N, C]``, row by row, and their grid (rows, columns).
        """
        # With channels last in memory the result already is a matrix of tokens; otherwise it would be transposed here.
        # `torch.vmap` has no such layout.
        x = images if is_transformed() else images.contiguous(memory_format=torch.channels_last)
        if is_transformed() and not self.training:
            for layer in self.proj:
                x = _fixed_norm(layer[1], layer[0](x)) if isinstance(layer, nn.Sequential) else layer(x)
        else:
            x = self._forget_and_recompute(x) if self._may_recompute() else self.proj(x)
        return x.flatten(2).transpose(1, 2), (x.shape[2], x.shape[3])

    def _may_recompute(self) -> bool:
        # Norms over several processes would exchange their sums again; a compiler decides by itself what to keep.
        plain = all(type(layer[1]) is nn.BatchNorm2d for layer in self._convolutions())
        seen = torch.compiler.is_compiling() or is_transformed()
        return self.training and torch.is_grad_enabled() and plain and not seen

    def _convolutions(self) -> list[nn.Sequential]:
        return [layer for layer in self.proj if isinstance(layer, nn.Sequential)]

    def _forget_and_recompute(self, x: Tensor) -> Tensor:
        """Run `proj`, keeping only the outputs of the convolutions."""
        layers = self._convolutions()
        x = layers[0][0](x)
        for (_, norm), (conv, _) in pairwise(layers):
            x = recompute(partial(_step, norm, self.proj[1], conv), x, preserve_rng_state=False)
        return layers[-1][1](x)


def _fixed_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a norm that does not learn from x, step by step: vmap of torch's own returns wrong gradients (2.13)."""
    if type(norm) is not nn.BatchNorm2d or norm.running_var is None or norm.running_mean is None:
        return norm(x)
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    shift = norm.bias - norm.running_mean * scale
    return x * scale.to(x.dtype)[:, None, None] + shift.to(x.dtype)[:, None, None]


def _step(norm: nn.Module, activation: nn.Module, conv: nn.Module, x: Tensor) -> Tensor:
    """Apply a norm and the layers up to the next one; a batch enters the running statistics once."""
    if is_recomputing():
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        unused = (norm.running_mean.clone(), norm.running_var.clone())
        x = F.batch_norm(x, *unused, norm.weight, norm.bias, training=True, eps=norm.eps)
    else:
        x = norm(x)
    return conv(activation(x))


@register_notrace_module
class ClassBlock(ClassAttentionBlock):
    """timm's class-attention block of XCiT, with class token and patches apart.

    The parameters and the result are timm's; the work is less. There is a single query, so keys and values need not be
    computed: ``q . (W_k x) = (W_k^T q) . x`` asks each patch directly, and the values' matrix acts on the average of
    the patches instead of on every patch. That leaves N * C * H products in place of N * C * C. Nothing is
    concatenated, and the patches, which a classifier does not use after its last block, are left out there.
    """

    def forward(  # type: ignore[override]
        self, token: Tensor, patches: Tensor, keep_patches: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Let the class token look at the patches.

        Args:
            token: Class token, ``[B, 1, C]``.
            patches: ``[B, N, C]``.
            keep_patches: Return what becomes of the patches, too.

        Returns:
            The class token and the patches, or None in their place. XCiT's blocks change the patches as well: they are
            added their own norm, normalized again with `tokens_norm`, and doubled.
        """
        seen, normed = self.norm1(token), self.norm1(patches)
        token = self.norm2(token + self.gamma1 * self._attend(seen, normed))
        token = token + self.gamma2 * self.mlp(token)
        if not keep_patches:
            return token, None
        patches = patches + self.gamma1 * normed
        patches = self.norm2(patches) if self.tokens_norm else patches
        return token, patches + patches

    def weights(self, token: Tensor, patches: Tensor) -> Tensor:
        """Return where the class token looks: ``[B, H, 1 + N]`` over itself and the patches, rows adding up to 1."""
        return self._scores(self.norm1(token), self.norm1(patches)).softmax(dim=-1)

    def _attend(self, token: Tensor, patches: Tensor) -> Tensor:
        attn = self.attn
        if not (is_plain_linear(attn.k) and is_plain_linear(attn.v)):
            return attn(torch.cat((token, patches), dim=1))
        B, _, C = token.shape
        H, D = attn.num_heads, C // attn.num_heads
        weights = attn.attn_drop(self._scores(token, patches).softmax(dim=-1))
        mean = weights[..., :1] * token + weights[..., 1:] @ patches
        # Dropout changes the sum of the weights, and with it the share of the values' bias.
        values = torch.einsum("bhc,hdc->bhd", mean, attn.v.weight.view(H, D, C))
        values = values + weights.sum(dim=-1, keepdim=True) * attn.v.bias.view(H, D)
        return attn.proj_drop(attn.proj(values.reshape(B, 1, C)))

    def _scores(self, token: Tensor, patches: Tensor) -> Tensor:
        attn = self.attn
        B, _, C = token.shape
        H, D = attn.num_heads, C // attn.num_heads
        query = attn.q(token).view(B, H, D) * attn.scale
        if not is_plain_linear(attn.k):
            keys = attn.k(torch.cat((token, patches), dim=1)).unflatten(-1, (H, D))
            return torch.einsum("bhd,bnhd->bhn", query, keys)
        asked = torch.einsum("bhd,hdc->bhc", query, attn.k.weight.view(H, D, C))
        scores: Tensor = torch.cat((asked @ token.transpose(1, 2), asked @ patches.transpose(1, 2)), dim=-1)
        # The keys' bias moves all scores of a head alike. It changes nothing, but it is a parameter with a gradient.
        same: Tensor = (query * attn.k.bias.view(H, D)).sum(dim=-1, keepdim=True)
        return scores + same
