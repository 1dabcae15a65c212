"""The pools that play and score episodes."""

from __future__ import annotations

from typing import Protocol

from rayloop.actors.environment import EnvironmentActor
from rayloop.actors.reward import RewardActor
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.supervision.pool import Pool


class Pools(Protocol):
    """What playing and scoring need of a run's actors (cluster/roles/services.py)."""

    environment: Pool[EnvironmentActor]
    rollout: Pool[RolloutActor]
    reward: Pool[RewardActor]
