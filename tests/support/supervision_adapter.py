"""All that the simulated cluster must know of where failure handling lives: the one file that
changes when that moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from rayloop.actors.environment import _failed
from rayloop.actors.images import SentImages
from rayloop.actors.lease import LeasedEngine
from rayloop.cluster import services
from rayloop.cluster.driver import Driver
from rayloop.cluster.loop import weight_check
from rayloop.cluster.supervision import watchdog
from rayloop.cluster.supervision.nodes import Nodes
from rayloop.core import deadlines, failures
from rayloop.core.groups import Scored, Unscored, UnscoredKind
from rayloop.core.types import RolloutRequest
from rayloop.run.config import RunConfig
from rayloop.run.lifetime import RecoverySettings
from rayloop.run.origin import Origin
from rayloop.run.reporter import Reporter

CAUSES: Mapping[str, Callable[[], Exception]] = MappingProxyType(
    {
        "environment raised": lambda: failures.EnvironmentFailed(
            "reset raised OSError: No space left on device"
        ),
        "environment bug": lambda: failures.EnvironmentFailed(
            "step must return StepResult, not str", bug=True
        ),
        "environment hung": lambda: failures.EnvironmentHung("step gave no answer within 60 s"),
        "environment hung, contained": lambda: failures.EnvironmentHung(
            "step gave no answer within 60 s", contained=True
        ),
        "bad data": lambda: failures.DataFailure("/data/x.png", "cannot identify image file"),
        "over long prompt": lambda: failures.OverLongPrompt(9000, 8192),
        "network": lambda: failures.InfrastructureFailure("connection reset"),
        "bug": lambda: KeyError("turn"),
        "spent": lambda: failures.WorkerSpent("8 calls hang in this process"),
        "judge outage": lambda: failures.RewardLost("the judge has not answered for 600 s"),
        "bad settings": lambda: failures.ConfigError("reward.source: no such column"),
        "diverged": lambda: failures.Diverged("the loss is not finite"),
        "no room for a checkpoint": lambda: failures.CheckpointStorageFailed("no space left"),
        "storage": lambda: failures.StorageFailed("the storage is away"),
        "damaged": lambda: failures.Damaged(
            "trainer/rank-0", "its text is not the one that was written"
        ),
        "weights changed on the way": lambda: failures.WeightSyncError("layer.0: another checksum"),
    }
)
"""What code of ours raises in an actor."""
KEYS = {"environment__episodes_per_call": "environment__episodes_at_once"}
DERIVED = {"policy_restarts": 6, "health_every": 5.0, "stall_report": 30.0}
"""Of ``recovery``, with the values that the cases leave out."""


def configured(values: Mapping[str, Any], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The keys that a case names, in the words of today's configuration; of some, what is derived
    or constant today is set.
    """
    given = {KEYS.get(name, name): value for name, value in values.items()}
    for name, default in DERIVED.items():
        patch.setattr(RecoverySettings, name, given.pop(f"recovery__{name}", default))
    patch.setattr(weight_check, "PROBE_TASKS", 1)
    patch.setattr(RunConfig, "sync_timeout", given.pop("publish__timeout"))
    given.pop("environment__episode__request_timeout", None)
    if given.pop("data__shuffle", True) is False:
        given["data__order"] = "file"
    if given.pop("reference__kind", None) == "actor":  # follows from a KL term without an adapter
        given["policy__loss__kl_coef"] = 0.1
    return given


def unscored(kind: str, reason: str) -> Unscored:
    """What a reward actor returns for a trajectory that it could not score."""
    return Unscored(UnscoredKind(kind), reason)


def scored(value: float) -> Scored:
    """A reward."""
    return Scored(value)


def failed(request: RolloutRequest, error: Exception) -> Any:
    """What an environment actor returns for an episode that raised."""
    return _failed(request, error)


def engine(request: RolloutRequest, lease: Any, driver: Any, timeout: float) -> Any:
    """The engine that an environment actor gives to an episode."""
    return LeasedEngine(request, lease, driver, timeout, SentImages())


def driver(
    config: RunConfig,
    folder: Path,
    handle: Any,
    clock: Callable[[], float],
    patch: pytest.MonkeyPatch,
) -> Any:
    """The driver of a run in ``folder``; environment actors ask ``handle`` for another engine."""
    for module in (deadlines, watchdog):
        patch.setattr(module, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
    reporter = Reporter(
        config, folder, lambda *_: SimpleNamespace(log=lambda *_: None, close=lambda: None)
    )
    actors = services.TrainingServices(config, str(folder), reporter.event)
    return Driver(
        config,
        actors,
        reporter,
        Origin.of(folder / "checkpoints", "auto"),
        handle,
        {"data.train": "0"},
    )


async def lease_engine(driver: Any, episode: str, lost: int, why: str) -> Any:
    """What the driver's actor does when an environment actor lost an engine."""
    return await driver.runner.calls.replace_engine(episode, lost, why)


def quarantined(driver: Any) -> set[str]:
    """The ids of the tasks that are played no more."""
    return set(driver.rollouts.scheduler.quarantined)


def place(
    patch: pytest.MonkeyPatch, create: Callable[..., Any], rows: Callable[[], list[dict[str, Any]]]
) -> None:
    """Create actors with ``create(class name, role, slot)``, and read the cluster's nodes from
    ``rows``.
    """

    def options(self: Any, role: str, slot: int, placement: Any) -> dict[str, Any]:
        return {"role": role, "slot": slot}

    async def reserve(*_: Any) -> Any:
        return object()

    patch.setattr(services, "create", lambda actor, options, *_: create(actor.__name__, **options))
    patch.setattr(services, "Nodes", lambda emit: Nodes(emit, rows))
    patch.setattr(services, "reserve", reserve)
    patch.setattr(services, "remove_placement_group", lambda group: None)
    patch.setattr(services, "held_in", lambda environment: "")
    patch.setattr(services.Services, "_options", options)
