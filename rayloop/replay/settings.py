"""The configuration of a recorded step, and what may be changed in it."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rayloop.config.settings import SettingsModel, changed
from rayloop.core.failures import ConfigError
from rayloop.grpo.losses.settings import LOSS, LossChoice, PpoLoss
from rayloop.grpo.settings import AlgorithmSettings, UpdateSettings
from rayloop.rewards.settings import RewardSettings

CHANGEABLE = ("algorithm.advantage", "algorithm.filtering", "policy.loss", "reward")
"""Keys, with all below them, whose other values a record can answer for."""
SHIPPED = ("rayloop.rewards.", "rayloop.recipes.", "rayloop.judge.reward:", "rayloop.grpo.")
"""Beginnings of the modules whose classes a stranger's bundle may name."""
JUDGE = "rayloop.judge.reward:JudgeReward"


class RecordedPolicy(SettingsModel):
    """The part of ``policy`` that decides a loss."""

    loss: Annotated[LossChoice, LOSS] = PpoLoss()
    update: UpdateSettings = UpdateSettings()
    ranks: int = Field(1, ge=1)
    """Processes that trained."""


class RecordedConfig(SettingsModel):
    """What a step computes of its episodes (``rayloop.rollout.step_record.step_config``)."""

    seed: int
    algorithm: AlgorithmSettings
    reward: RewardSettings
    policy: RecordedPolicy
    sequence_parallel: int = Field(1, ge=1)
    """Processes in a row that share rows."""


def recorded_config(config: Mapping[str, Any], overrides: Sequence[str] = ()) -> RecordedConfig:
    """The configuration on record with ``key.sub=value`` changed.

    Raises ConfigError, also for a key that decides what was computed in the first place.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(f"{key}.".startswith(f"{allowed}.") for allowed in CHANGEABLE):
            raise ConfigError(
                f"{key} cannot be changed in a replay: the episodes and log-probs on record are"
                f" those of its value then. Values below {', '.join(CHANGEABLE)} can"
            )
    return changed(config, overrides, RecordedConfig)


def foreign(config: Any) -> Iterator[str]:
    """The components in plain values that are not classes of rayloop's rewards and algorithms."""
    if isinstance(config, Mapping):
        use = config.get("use")
        if use and not _is_shipped(str(use)):
            yield str(use)
        for part in config.values():
            yield from foreign(part)
    elif isinstance(config, list):
        for part in config:
            yield from foreign(part)


def _is_shipped(use: str) -> bool:
    """Whether it is a class that a module of rayloop defines, and does not only import."""
    module, _, name = use.partition(":")
    if not use.startswith(SHIPPED):
        return False
    try:
        component = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return False
    return isinstance(component, type) and component.__module__ == module


def with_judge(config: Any, url: str) -> Any:
    """Plain values whose judge rewards ask the judge at ``url``."""
    if isinstance(config, list):
        return [with_judge(part, url) for part in config]
    if not isinstance(config, Mapping):
        return config
    values = {name: with_judge(part, url) for name, part in config.items()}
    if values.get("use") == JUDGE:
        settings = values.get("with") or {}
        judge = {**(settings.get("judge") or {}), "url": url}
        values["with"] = {**settings, "judge": judge}
    return values


def asks_judge(config: Any) -> bool:
    """Whether a reward in plain values asks a judge."""
    if isinstance(config, Mapping):
        return config.get("use") == JUDGE or any(map(asks_judge, config.values()))
    return isinstance(config, list) and any(map(asks_judge, config))
