"""The record of a step that ``replay`` computes again: its groups, and the values of its tokens.

It is plain data, in the form of a checkpoint (``plain.py``): reading it runs no code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayloop.core.failures import ConfigError
from rayloop.core.groups import Group
from rayloop.core.types import Trajectory, Version
from rayloop.rollout.plain import Plain, group_from_plain, plain_group, task_from_plain
from rayloop.run.config import RunConfig
from rayloop.run.records.rollouts import RolloutRecord
from rayloop.run.records.step_metrics import Collected

STEP_SCHEMA_VERSION = 1
REWARD_KEYS = frozenset(("source", "per", "timeout", "on_error"))
"""Keys of ``reward`` that decide an outcome; the others place its actors."""


@dataclass(frozen=True)
class RecordedStep:
    """A step on record.

    ``version`` was trained. ``config``: ``step_config``. ``groups``: all that ended or were
    trained, as the step left them, with a Trajectory as the payload of each played member;
    ``texts``: by group number, of the sampled turns of each of these members, as the reward saw
    them. ``trained``: the numbers of the groups that were trained. ``ranks``:
    ``TokenRecorder.result`` of each rank with a share.
    """

    step: int
    version: Version
    config: Mapping[str, Any]
    groups: tuple[Group, ...]
    texts: Mapping[int, Sequence[Sequence[str]]]
    trained: tuple[int, ...]
    ranks: Sequence[Mapping[str, Any]]


def step_config(config: RunConfig) -> dict[str, Any]:
    """The values of a run's configuration that decide what a step computes of its episodes."""
    values = config.model_dump(mode="json", by_alias=True)
    policy = values["policy"]
    reward = values["reward"]
    return {
        "seed": config.seed,
        "algorithm": values["algorithm"],
        "reward": {name: value for name, value in reward.items() if name in REWARD_KEYS},
        "policy": {"loss": policy["loss"], "update": policy["update"], "ranks": policy["ranks"]},
        "sequence_parallel": config.policy.engine.sequence_parallel,
    }


def plain_step(
    config: RunConfig,
    version: Version,
    collected: Collected,
    records: Sequence[RolloutRecord],
    ranks: Sequence[Mapping[str, Any]],
) -> Plain:
    """The step that ``version`` trained as plain values, with ``HeldValue`` for payloads.

    ``records``: of all groups; ``ranks``: as in ``RecordedStep``.
    """
    ended = {group.number: group for group in collected.ended_groups}
    # Groups that a step has cut or rescaled are the ones that it trained.
    groups = ended | {group.number: group for group in collected.groups}
    texts: dict[int, list[list[str]]] = {}
    for record in records:
        turns = [turn.text for turn in record.turns if turn.sampled]
        texts.setdefault(record.group, []).append(turns)
    return {
        "schema": STEP_SCHEMA_VERSION,
        "step": version.step + 1,
        "version": [version.lineage, version.step],
        "config": step_config(config),
        "groups": [plain_group(groups[number], whole=True) for number in sorted(groups)],
        "texts": list(texts.items()),
        "trained": [group.number for group in collected.groups],
        "ranks": list(ranks),
    }


def without_images(payload: Any) -> Any:
    """A trajectory without the bytes of its images, which are files beside; other values as is."""
    return replace(payload, image_bytes={}) if isinstance(payload, Trajectory) else payload


def step_from_plain(plain: Plain, where: str) -> RecordedStep:
    """The step of plain values. Raises ConfigError, which names ``where`` they are from."""
    try:
        if plain["schema"] != STEP_SCHEMA_VERSION:
            raise ConfigError(
                f"{where} has schema {plain['schema']!r} and this version of rayloop reads"
                f" {STEP_SCHEMA_VERSION}. Replay it with the version that wrote it"
            )
        groups = [
            group_from_plain(group, lambda payload: payload, task_from_plain)
            for group in plain["groups"]
        ]
        texts = {int(number): members for number, members in plain["texts"]}
        return RecordedStep(
            step=int(plain["step"]),
            version=Version(*plain["version"]),
            config=dict(plain["config"]),
            groups=tuple(groups),
            texts=texts,
            trained=tuple(map(int, plain["trained"])),
            ranks=list(plain["ranks"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{where} is damaged: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
