"""Prediction of hidden parts of the inputs: the first stage of pretraining a classifier on its own data.

Shapes: ids [..., N] or values [..., N, F] of sequences, images [B, channels, height, width] of N patches,
hidden [..., N].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.data import Batch, DataBundle
from tost.data.dataset import IGNORED
from tost.errors import ConfigError
from tost.models import create_model
from tost.models.registry import flops_per_image
from tost.train.config import RunConfig
from tost.train.task import BatchResult, Task, sequence_arguments

HIDDEN = 0
"""What stands in place of hidden ids, among which it is the padding's, and of hidden numbers, whose mean is near it."""


class MaskedPrediction(Task):
    """Cross-entropy of hidden ids, or squared error of hidden numbers and patches; labels are not looked at.

    Every batch has a share of its elements hidden, ``train.hide``: single symbols, single vectors of numbers, or
    patches of an image. The model is the classifier that the configuration names, with one change: every element has
    its own output, by a linear head that predicts what was there. All other parameters keep their names and shapes, so
    ``train.init_from`` starts the classifier from them. In evaluation what is hidden is the same every time.
    """

    share: float
    patch_size: int | None = None
    """Edge of the patches of images; None for sequences."""

    def build_model(self, config: RunConfig, bundle: DataBundle) -> nn.Module:
        """Return the classifier that the configuration names, with an output for every element."""
        assert config.train.hide is not None, "checked with the configuration"
        self.share, options = config.train.hide, dict(config.model.options)
        if "global_pool" in options:
            self.patch_size = options["patch_size"]
            options["global_pool"], outputs = "", options["in_chans"] * options["patch_size"] ** 2
        elif options.get("pooling") in ("mean", "mean_padded", "first"):
            options["pooling"], outputs = "none", options["vocab_size"] or options["in_features"]
        else:
            raise ConfigError(
                f"{config.model.name} cannot be trained by masked prediction with pooling={options.get('pooling')}: it "
                "takes image models, and sequence models whose blocks have no class token; use pooling=mean."
            )
        model = create_model(config.model.name, **options)
        model.head = nn.Linear(options["embed_dim"], outputs)
        return model

    def tokens(self, batch: Batch) -> int:
        """Return the number of elements, padding included."""
        return self._elements(batch["inputs"])[..., 0].numel()

    def flops(self, model: nn.Module, batch: Batch) -> float | None:
        """Return the arithmetic of a forward pass over this batch; None if the model does not say."""
        if self.patch_size is None:
            return super().flops(model, batch)
        per_image = flops_per_image(model, *batch["inputs"].shape[-2:])
        return None if per_image is None else per_image * batch["inputs"].shape[0]

    def training_batch(self, batch: Batch, config: RunConfig, seed: int) -> Batch:
        """Hide a share of the elements: "inputs" are what is left, "whole" what was there, "hidden" where."""
        return self._hide(batch, seed)

    def compute(self, model: nn.Module, batch: Batch) -> BatchResult:
        """Return the mean error over the hidden elements, and of ids how many were right, for each sample."""
        if "hidden" not in batch:
            batch = self._hide(batch, 0)
        hidden, whole = batch["hidden"], batch["whole"]
        outputs = model(batch["inputs"], **sequence_arguments(batch)).float()
        if self.patch_size is not None:
            outputs = outputs[:, outputs.shape[1] - hidden.shape[1] :]  # class tokens come first
        outputs = outputs.reshape(*hidden.shape, -1)
        scale = batch["targets"].shape[0] / hidden.sum().clamp_min(1)
        if whole.is_floating_point():
            return BatchResult(scale * (outputs - whole).square().mean(dim=-1).where(hidden, 0).sum())
        wanted = whole.masked_fill(~hidden, IGNORED)
        loss = F.cross_entropy(outputs.flatten(0, -2), wanted.flatten(), reduction="sum", ignore_index=IGNORED)
        right = (outputs.argmax(dim=-1) == wanted).sum()
        return BatchResult(scale * loss, {"accuracy": scale * right})

    def _elements(self, inputs: Tensor) -> Tensor:
        """Return the elements of inputs, [..., N, numbers]; images become patches, row by row."""
        P = self.patch_size
        if P is None:
            return inputs if inputs.is_floating_point() else inputs.unsqueeze(-1)
        rows, columns = inputs.shape[-2] % P, inputs.shape[-1] % P
        whole = F.pad(inputs, (0, P - columns if columns else 0, 0, P - rows if rows else 0))
        return F.unfold(whole, P, stride=P).transpose(1, 2)

    def _hide(self, batch: Batch, seed: int) -> Batch:
        inputs, mask = batch["inputs"], batch.get("mask")
        elements = self._elements(inputs)
        # Drawn on the CPU: the same elements on every device.
        draws = torch.rand(elements.shape[:-1], generator=torch.Generator().manual_seed(seed))
        hidden = (draws < self.share).to(inputs.device)
        hidden = hidden if mask is None else hidden & mask
        if (P := self.patch_size) is None:
            left = inputs.masked_fill(hidden if inputs.dim() == hidden.dim() else hidden.unsqueeze(-1), HIDDEN)
        else:
            height, width = inputs.shape[-2:]
            place = hidden.reshape(len(hidden), -1, -(-width // P))
            place = place.repeat_interleave(P, 1).repeat_interleave(P, 2)[:, None, :height, :width]
            left = inputs.masked_fill(place, HIDDEN)
        whole = elements if inputs.is_floating_point() else inputs
        return {**batch, "inputs": left, "whole": whole, "hidden": hidden}
