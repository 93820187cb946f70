"""The two ends of a vision model: the convolutions that make tokens, and the attention of the class token.

Shapes: images [B, channels, height, width], tokens [B, N, C] (batch, tokens, width), class token [B, 1, C].
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import tost._torchvision  # noqa: F401  timm imports torchvision, which a CPU build of torch has to be prepared for

# isort: split
from timm.models._features_fx import register_notrace_module
from timm.models.xcit import ClassAttentionBlock, conv3x3

from tost.nn.recompute import is_recomputing, recompute
from tost.ops._transforms import is_transformed


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
        """Do what `proj` does, keeping only what the convolutions return."""
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
    """Apply a norm and what follows it up to the next one; a batch enters the running statistics once."""
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
        if not (_is_plain(attn.k) and _is_plain(attn.v)):
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
        if not _is_plain(attn.k):
            keys = attn.k(torch.cat((token, patches), dim=1)).unflatten(-1, (H, D))
            return torch.einsum("bhd,bnhd->bhn", query, keys)
        asked = torch.einsum("bhd,hdc->bhc", query, attn.k.weight.view(H, D, C))
        scores: Tensor = torch.cat((asked @ token.transpose(1, 2), asked @ patches.transpose(1, 2)), dim=-1)
        # The keys' bias moves all scores of a head alike. It changes nothing, but it is a parameter with a gradient.
        same: Tensor = (query * attn.k.bias.view(H, D)).sum(dim=-1, keepdim=True)
        return scores + same


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is no more than its weight and bias.

    One that was exchanged, is listened to, or has a weight in a form of its own, such as torchao's integers, has to be
    called.
    """
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    return not is_traceable_wrapper_subclass(layer.weight)
