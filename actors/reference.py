"""The reference actor: log-probs of the sampled tokens under the frozen start model, off the training path."""

from __future__ import annotations

from typing import Any

from rayloop.core.types import Trajectory
from rayloop.engines.settings import FsdpSettings, ModelSettings


class ReferenceActor:
    def __init__(self, model: ModelSettings, engine: FsdpSettings) -> None:
        from rayloop.engines.scorer import FrozenScorer

        self.scorer = FrozenScorer(model, engine)

    def health(self) -> None:
        return None

    def annotate(self, *trajectories: Trajectory) -> tuple[Any, ...]:
        """(None, array, ...): one float32 array [sampled_tokens] per trajectory; the driver awaits the None only."""
        return (None, *self.scorer.logprobs(trajectories))
