"""What the page shows of the layers: rates against an untrained control, coherence, gains, moments, use of heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tost.analysis import coding_rate_by_layer, gains_by_layer, head_usage, subspace_coherence
from tost.analysis.rates import Measure
from tost.analysis.result import plain, rounded
from tost.errors import ConfigError
from tost.explore.models import ExploredModel

MEASURES: tuple[Measure, ...] = ("rate", "compression", "variational")


def look(source: ExploredModel, inputs: Tensor) -> dict[str, Any]:
    """Return what the layers of a model do to one input.

    Args:
        source: The model.
        inputs: Ids ``[1, N]`` or an image ``[1, channels, height, width]``.

    Raises:
        ConfigError: The model has no TSSA layers.
    """
    with source.lock:
        model = source.model
        if not source.has_groups():
            raise ConfigError(f"{source.name} has no TSSA layers, so that there are no groups to measure; see Compare.")
        batches = [inputs]
        rates = coding_rate_by_layer(model, batches, split="", places=("input", "attention"))
        rates += coding_rate_by_layer(
            source.control, batches, split="", source="control", places=("input", "attention")
        )
        coherence, gains, heads = subspace_coherence(model), gains_by_layer(model, batches), head_usage(model, batches)
    curves = [
        {
            "source": curve.source,
            "place": curve.place,
            "values": {measure: plain(curve.mean(measure)) for measure in MEASURES},
        }
        for curve in rates.curves
    ]
    return {
        "curves": curves,
        "verdict": rates.verdict(),
        "coherence": {"blocks": plain(coherence.blocks), "random": coherence.random, "mutual": plain(coherence.mutual)},
        "gains": plain(gains.mean),
        "blocks": rounded(gains.correlations()) if gains.moments.shape[-1] > 1 else None,
        "usage": plain(heads.usage),
        "rank": plain(heads.rank),
        "temperature": plain(heads.temperature),
    }
