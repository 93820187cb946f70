"""Base of the image models, with the interface that timm's tools expect.

Shapes: images [B, channels, height, width], tokens [B, N, C] (batch, tokens, width), logits [B, K].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

import tost._torchvision  # noqa: F401  timm imports torchvision, which a CPU build of torch has to be prepared for

# isort: split
from timm.models._features import feature_take_indices
from timm.models._features_fx import register_notrace_module

from tost.errors import BackendError
from tost.models.common import count_parameters
from tost.models.flops import image_flops
from tost.models.options import ImageOptions
from tost.nn import Block
from tost.nn.recompute import recompute
from tost.parallel import active

Grid = tuple[int, int]
# To timm's feature extraction by torch.fx, a block is one step: tracing ends at checks of shapes and at the operators.
register_notrace_module(Block)


Intermediate = Tensor | tuple[Tensor, Tensor]
"""Patches after a block, or a pair of them and the class token."""


class CountedModel(nn.Module):
    """What this package's and timm's image models share: counts of parameters and operations."""

    options: ImageOptions

    def num_parameters(self, *, positions: bool = True) -> int:
        """Count the trainable parameters.

        Args:
            positions: Count learned positions too, as published sizes of image models do.
        """
        return count_parameters(self, positions=positions)

    def flops_per_image(self, height: int, width: int) -> int:
        """Count the operations of a forward pass for one image; see `tost.models.image_flops`."""
        return image_flops(self.options, height, width).total


class ImageModel(CountedModel):
    """An image classifier made of a stem, blocks of tokens, a class token and a head.

    A subclass makes `blocks` and `norm` and defines how images become tokens (`_embed`), how a block is called
    (`_block`) and what follows the blocks (`_close`); this class builds timm's interface on them.

    Args:
        options: Sizes and choices, kept as ``model.options``.
    """

    blocks: nn.ModuleList
    norm: nn.Module
    num_prefix_tokens = 1
    """Tokens in front of the patches in the output of `forward_features`: the class token."""
    _leading = 0
    """Tokens in front of the patches inside the blocks."""

    def __init__(self, options: ImageOptions) -> None:
        super().__init__()
        self.options = options
        self.embed_dim = self.num_features = self.head_hidden_size = options.embed_dim
        self.in_chans = options.in_chans
        self.grad_checkpointing = options.gradient_checkpointing
        self.feature_info = [
            {"num_chs": options.embed_dim, "reduction": options.patch_size, "module": f"blocks.{i}"}
            for i in range(options.depth)
        ]
        self.head_drop = nn.Dropout(options.head_dropout)
        self.head = self._new_head(options.num_classes)

    @property
    def num_classes(self) -> int:
        """Number of classes, K; 0 without a head."""
        return self.options.num_classes

    @property
    def global_pool(self) -> str:
        """Input of the head; see `ImageOptions`."""
        return self.options.global_pool

    def forward(self, images: Tensor) -> Tensor:
        """Classify images.

        Args:
            images: Normalized images, ``[B, channels, height, width]`` of the parameters' dtype.

        Returns:
            Logits ``[B, K]``, or features ``[B, C]`` without a head. With ``global_pool=""`` one row per token.

        Raises:
            ValueError: The images are not of this form, or smaller than a patch.
            BackendError: Context parallelism is active; images are not split.
        """
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """Return all tokens after the last norm, the class token first, ``[B, 1 + N, C]``."""
        x, grid = self._start(images)
        for block in self.blocks:
            x = self._block(block, x, grid)
        return self._close(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the tokens ``[B, 1 + N, C]`` of `forward_features` and classify.

        Args:
            x: What `forward_features` returned.
            pre_logits: Stop in front of the head.

        Returns:
            Logits ``[B, K]``, or features ``[B, C]``.
        """
        if self.global_pool:
            x = x[:, self.num_prefix_tokens :].mean(dim=1) if self.global_pool == "avg" else x[:, 0]
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Intermediate] | tuple[Tensor, list[Intermediate]]:
        """Return the patches after chosen blocks.

        Args:
            x: Images, ``[B, channels, height, width]``.
            indices: Blocks by number; an integer means that many of the last, None all of them.
            return_prefix_tokens: Return pairs of the patches and the class token ``[B, 1, C]``, in models whose blocks
                have one. In `VisionToST` it enters after the blocks, and there is none to return.
            norm: Apply the model's last norm to each.
            stop_early: Do not compute the blocks after the last chosen one, if only intermediates are returned.
            output_fmt: ``"NCHW"``: maps ``[B, C, rows, columns]``; ``"NLC"``: tokens ``[B, N, C]``.
            intermediates_only: Return only the intermediates.

        Returns:
            The intermediates in the order of the blocks; or the tokens of `forward_features` and them.

        Raises:
            ValueError: `output_fmt` is neither of the two.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt={output_fmt!r} is not known; it takes 'NCHW' or 'NLC'.")
        wanted, last = feature_take_indices(len(self.blocks), indices)
        found: list[Intermediate] = []
        tokens, grid = self._start(x)
        for i, block in enumerate(self.blocks[: last + 1] if stop_early and intermediates_only else self.blocks):
            tokens = self._block(block, tokens, grid)
            if i in wanted:
                prefix, patches = (self.norm(tokens) if norm else tokens).tensor_split((self._leading,), dim=1)
                patches = patches.transpose(1, 2).unflatten(2, grid) if output_fmt == "NCHW" else patches
                found.append((patches, prefix) if return_prefix_tokens and self._leading else patches)
        return found if intermediates_only else (self._close(tokens), found)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | list[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Intermediate]:
        """Return the patches after chosen blocks, with the arguments of DINO's models; see `forward_intermediates`.

        Args:
            x: Images, ``[B, channels, height, width]``.
            n: Blocks by number; an integer means that many of the last.
            reshape: Maps ``[B, C, rows, columns]`` instead of tokens ``[B, N, C]``.
            return_prefix_tokens: Return the class token too.
            norm: Apply the model's last norm to each.
        """
        found = self.forward_intermediates(
            x, n, return_prefix_tokens, norm, output_fmt="NCHW" if reshape else "NLC", intermediates_only=True
        )
        assert isinstance(found, list)
        return found

    def set_input_size(self, img_size: int | Grid | None = None, patch_size: int | Grid | None = None) -> None:
        """Prepare the model for images of another size.

        Args:
            img_size: Edge of the images, or height and width; None for no change. Learned positions are interpolated;
                other models take images of any size as they are.
            patch_size: Edge of the patches, which cannot change.

        Raises:
            ValueError: The patch size differs, or the images are not made of whole patches where they have to be.
        """
        P = self.options.patch_size
        if patch_size is not None and _pair(patch_size) != (P, P):
            raise ValueError(
                f"patch_size={patch_size} differs from that of this model, {P}: its first layers are made for it. "
                "Build another model with tost.create_model(..., patch_size=...)."
            )
        if img_size is not None:
            self._resize(_pair(img_size))

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the parts that `forward_intermediates` does not need for these indices.

        Args:
            indices: As in `forward_intermediates`.
            prune_norm: Remove the last norm.
            prune_head: Remove the head and what leads to it.

        Returns:
            The numbers of the chosen blocks.
        """
        wanted, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return list(wanted)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a fresh one.

        Args:
            num_classes: Classes of the new head; 0 for none.
            global_pool: What it sees: ``"token"``, ``"avg"`` or ``""``; None for no change.

        Raises:
            ValueError: There is no such pooling, or the number is negative.
        """
        changes = {"num_classes": num_classes} | ({} if global_pool is None else {"global_pool": global_pool})
        self.options = type(self.options).model_validate({**self.options.model_dump(), **changes})
        like = next(self.parameters())
        self.head = self._new_head(num_classes).to(device=like.device, dtype=like.dtype)
        self.head.train(self.training)

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Switch gradient checkpointing of the blocks on or off."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return which parameters belong to which layer, from stem to head, for timm's layer-wise learning rates."""
        return {
            "stem": r"^cls_token|^pos_embed|^patch_embed",
            "blocks": r"^blocks\.(\d+)",
            "close": [(r"^cls_attn_blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    @abstractmethod
    def no_weight_decay(self) -> set[str]:
        """Return the parameters that are exempt from weight decay though they are no vectors."""

    @abstractmethod
    def _embed(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Return the input tokens of the first block, and the grid of the patches among them."""

    @abstractmethod
    def _close(self, x: Tensor) -> Tensor:
        """Return the tokens of `forward_features`, given those after the last block."""

    def _start(self, images: Tensor) -> tuple[Tensor, Grid]:
        self._check(images)
        return self._embed(images)

    def _block(self, block: nn.Module, x: Tensor, grid: Grid) -> Tensor:
        """Call one block."""
        return self._call(block, x)

    def _call(self, module: Callable[..., Any], *inputs: Any) -> Any:
        """Call a module, with gradient checkpointing if it is switched on."""
        if self.grad_checkpointing and torch.is_grad_enabled():
            return recompute(module, *inputs)
        return module(*inputs)

    def _resize(self, image: Grid) -> None:
        """Prepare for images of this height and width."""
        if min(image) < self.options.patch_size:
            raise ValueError(f"images of {image[0]} x {image[1]} pixels are smaller than a patch; enlarge them.")

    def _check(self, images: Tensor | torch.fx.Proxy) -> None:
        if isinstance(images, torch.fx.Proxy):  # has neither shape nor dtype yet
            return
        o = self.options
        if active() is not None:
            raise BackendError(
                "image models need whole images, but a ContextParallel context is active, in which each process holds "
                "a piece of a sequence. Run this model outside of it; use data parallelism for more images."
            )
        if images.dim() != 4 or images.shape[1] != o.in_chans or not images.is_floating_point():
            raise ValueError(
                f"images have shape {tuple(images.shape)} and dtype {images.dtype}; this model needs floating point "
                f"images [B, {o.in_chans}, height, width]. Use images[None] for a single one; in_chans= for others."
            )
        if images.shape[2] < o.patch_size or images.shape[3] < o.patch_size:
            raise ValueError(
                f"images of {images.shape[2]} x {images.shape[3]} pixels are smaller than a patch of {o.patch_size} x "
                f"{o.patch_size}. Enlarge them, or build the model with a smaller patch_size."
            )

    def _new_head(self, num_classes: int) -> nn.Module:
        return nn.Linear(self.embed_dim, num_classes) if num_classes else nn.Identity()


def _pair(size: int | Grid) -> Grid:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
