"""|gamma|: the scale that a norm layer gives each channel."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError
from ..importance import CriterionInput, LayerScores, norm_scales, values_by_tie

__all__ = ["NormScale"]


@dataclass(frozen=True)
class NormScale:
    """Every norm layer counts, those of shortcut projections and depthwise convolutions too; each channel once per norm layer."""

    def measure(self, subject: CriterionInput) -> list[LayerScores]:
        found = []
        for name, scale in norm_scales(subject.model, subject.graph).items():
            for axis in range(scale.ndim):
                others = [other for other in range(scale.ndim) if other != axis]
                values = scale.detach().abs()
                values = values.mean(dim=others) if others else values
                layer = name.rpartition(".")[0]
                found += [
                    LayerScores(tie, layer, part)
                    for tie, part in values_by_tie(subject.graph, name, axis, values).items()
                ]
        if not found:
            raise ConfigError(
                'this network has no norm layers with scales: choose criterion="weight", "gradient" or another.'
            )
        return found
