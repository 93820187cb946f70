"""Options of the image models. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from tost._options import Count, Depth, Switch
from tost.models.extensions import ExtensionOptions
from tost.models.mixers import Place
from tost.models.options import ConvolutionOptions, ModelOptions

Rate = Annotated[float, Field(ge=0, lt=1)]


class ImageOptions(ModelOptions):
    """Options of every image model."""

    patch_size: Count = Field(16, description="edge of the square of pixels of a token, P")
    in_chans: Count = Field(3, description="channels of an image")
    num_classes: Annotated[int, Field(ge=0, strict=True)] = Field(
        1000, description="number of classes, K; 0 has no head and gives the features"
    )
    global_pool: Literal["token", "avg", ""] = Field(
        "token", description="what the head sees: the class token, the average of the patches, or (empty) every token"
    )
    head_dropout: Rate = Field(0.0, description="dropout in front of the head")
    drop_path: Rate = Field(0.0, description="probability with which a residual branch is left out for an image")
    drop_path_rule: Literal["constant", "linear"] = Field(
        "constant", description="drop_path of the blocks: the same for all, or growing from 0 at the first to the last"
    )

    def drop_paths(self) -> list[float]:
        """Return the drop path rate of each block."""
        if self.drop_path_rule == "constant" or self.depth == 1:
            return [self.drop_path] * self.depth
        return [self.drop_path * i / (self.depth - 1) for i in range(self.depth)]


class FixedSizeOptions(ImageOptions):
    """Options of an image model with learned positions, whose number follows from the size of the images."""

    image_size: Count | tuple[Count, Count] = Field(224, description="size of the images, or (height, width)")

    @field_validator("image_size")
    @classmethod
    def _one_number(cls, size: int | tuple[int, int]) -> int | tuple[int, int]:
        """Write squares in one way, so that equal models have equal options."""
        return size[0] if isinstance(size, tuple) and size[0] == size[1] else size

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of the images."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else size

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        size, patch = values.get("image_size"), values.get("patch_size")
        sides = (size,) if isinstance(size, int) else tuple(size or ())
        if isinstance(patch, int) and any(isinstance(side, int) and side % patch for side in sides):
            found.append(
                f"image_size={size} is not made of whole patches of patch_size={patch}: "
                "resize the images to multiples of the patch, or choose another patch_size"
            )
        if values.get("backend", "auto") != "auto":
            found.append(f"backend={values['backend']} chooses an implementation of TSSA, which this model has not")
        return found


class VisionOptions(ExtensionOptions, ImageOptions, ConvolutionOptions):
    """Options of `VisionToST`."""

    place: ClassVar[Place] = "vision"

    patch_size: Literal[2, 4, 8, 16] = Field(
        16, description="edge of the square of pixels of a token, P: one convolution of stride 2 per factor of 2"
    )
    feed_forward: Literal["mlp", "ista"] = Field(
        "mlp", description="what follows it: an MLP with a residual connection, or a sparsifying step (CRATE)"
    )
    normalize: Switch = Field(True, description="normalize features over the tokens before memberships are taken")
    layer_scale: float | None = Field(
        1.0, gt=0, description="initial value of the vectors that scale each residual branch; null has none"
    )
    class_depth: Depth = Field(2, description="number of class-attention blocks after the others")
    tokens_norm: Switch = Field(True, description="second norm of class attention for all tokens, not the class alone")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        width, patch = values.get("embed_dim"), values.get("patch_size")
        if isinstance(width, int) and patch in (2, 4, 8, 16) and width % (patch // 2):
            found.append(
                f"embed_dim={width} is not divisible by {patch // 2}: with patch_size={patch} the stem starts with "
                f"1/{patch // 2} of the width and doubles it; change one of the two"
            )
        return found


class CrateOptions(FixedSizeOptions):
    """Options of `CRATE`. `mlp_ratio` has no meaning here: the sparsifying step has no hidden width."""

    step_size: float = Field(0.1, gt=0, description="step of the sparsifying block, eta")
    threshold: float = Field(0.1, ge=0, description="what the sparsifying block charges for being non-zero, lambda")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        if values.get("mlp_ratio", 4.0) != 4.0:
            found.append(f"mlp_ratio={values['mlp_ratio']} has no meaning for CRATE, which has no MLP; leave it out")
        return found


class VitOptions(FixedSizeOptions):
    """Options of `ViT`, which is timm's VisionTransformer."""

    drop_path_rule: Literal["linear"] = Field("linear", description="timm's drop path grows from 0 at the first block")
