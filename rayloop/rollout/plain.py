"""Groups, members and trajectories as plain values (what JSON knows, bytes and arrays) and back, for the checkpoint.

Written out by hand: what a checkpoint says does not change when a class is renamed or moved, and reading one runs no code of
whoever wrote it. A field that is added here and cannot be absent raises ``SCHEMA`` (rayloop/run/identity.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rayloop.core.groups import Group, Member, Outcome, Scored, Status, TrajectoryState, Unscored, UnscoredKind
from rayloop.core.types import (
    EndReason,
    FinishReason,
    ImageRef,
    ImagesSent,
    Sampling,
    Summary,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)

Plain = Any
"""None, a bool, a number, a text, bytes, an array, a list of these, or a mapping from texts to these."""
Own = Callable[[Any], Any]
"""Keeps a value (a trajectory, or log-probs) and returns what stands for it in ``Member``."""


@dataclass(frozen=True, slots=True)
class Held:
    """In a state, in the place of a value that somebody else holds: ``reference`` is what the member ``id`` has of it."""

    id: TrajectoryId
    reference: Any


def held(state: Plain) -> Iterator[Held]:
    """All in ``state``."""
    match state:
        case Held():
            yield state
        case Mapping():
            for value in state.values():
                yield from held(value)
        case list():
            for value in state:
                yield from held(value)


def filled(state: Plain, values: Callable[[Any], Any]) -> Plain:
    """``state`` with the value of every ``Held`` in its place; ``values``: by reference."""
    match state:
        case Held(reference=reference):
            value = values(reference)
            return plain_trajectory(value) if isinstance(value, Trajectory) else value
        case Mapping():
            return {name: filled(value, values) for name, value in state.items()}
        case list():
            return [filled(value, values) for value in state]
    return state


# Groups ----------------------------------------------------------------------------------------------------------------


def plain_group(group: Group) -> Plain:
    return {
        "issue": group.number,
        "task": group.task.id,  # the row is in the run's data
        "members": [plain_member(member) for member in group.members],
        "mean": group.mean,
        "std": group.std,
        "replay_of": None if group.replay_of is None else _id(group.replay_of),
    }


def group_from_plain(plain: Plain, own: Own, task: Callable[[str], Task]) -> Group:
    replay_of = None if plain["replay_of"] is None else TrajectoryId(*plain["replay_of"])
    members = tuple(member_from_plain(member, own) for member in plain["members"])
    return Group(plain["issue"], task(plain["task"]), members, plain["mean"], plain["std"], replay_of)


def plain_member(member: Member) -> Plain:
    """Of one that left its group only the record is kept."""
    id = member.summary.id
    return {
        "summary": _summary(member.summary),
        "outcome": _outcome(member.outcome),
        "payload": None if member.payload is None or not member.kept else Held(id, member.payload),
        "advantage": member.advantage,
        "reference": None if member.reference is None or not member.kept else Held(id, member.reference),
        "replayed": member.replayed,
        "fate": None if member.status is None else [str(member.status.state), member.status.reason],
    }


def member_from_plain(plain: Plain, own: Own) -> Member:
    payload, reference, status = plain["payload"], plain["reference"], plain["fate"]
    return Member(
        summary=_summary_from(plain["summary"]),
        outcome=_outcome_from(plain["outcome"]),
        payload=None if payload is None else own(trajectory_from_plain(payload)),
        advantage=plain["advantage"],
        reference=None if reference is None else own(reference),
        replayed=plain["replayed"],
        status=None if status is None else Status(TrajectoryState(status[0]), status[1]),
    )


def _summary(summary: Summary) -> Plain:
    return {
        **asdict(summary),
        "id": _id(summary.id),
        "end_reason": str(summary.end_reason),
        "first_version": _version(summary.first_version),
        "last_version": _version(summary.last_version),
    }


def _summary_from(plain: Plain) -> Summary:
    made = {
        "id": TrajectoryId(*plain["id"]),
        "end_reason": EndReason(plain["end_reason"]),
        "first_version": Version(*plain["first_version"]),
        "last_version": Version(*plain["last_version"]),
        "sent": ImagesSent(**plain.get("sent", {})),  # older checkpoints lack it
    }
    return Summary(**{**plain, **made})


def _outcome(outcome: Outcome) -> Plain:
    if isinstance(outcome, Unscored):
        return {"unscored": str(outcome.kind), "reason": outcome.reason, "trace": outcome.trace}
    components = {name: float(value) for name, value in outcome.components.items()}
    return {"value": float(outcome.value), "components": components, "flags": list(outcome.flags), "trace": outcome.trace}


def _outcome_from(plain: Plain) -> Outcome:
    if "unscored" in plain:
        return Unscored(UnscoredKind(plain["unscored"]), plain["reason"], plain["trace"])
    return Scored(plain["value"], plain["components"], tuple(plain["flags"]), plain["trace"])


# Trajectories ----------------------------------------------------------------------------------------------------------


def plain_trajectory(trajectory: Trajectory) -> Plain:
    return {
        "id": _id(trajectory.id),
        "attempt": trajectory.attempt,
        "task_id": trajectory.task_id,
        "seed": trajectory.seed,
        "turns": [_turn(turn) for turn in trajectory.turns],
        "sampling": {name: _listed(value) for name, value in asdict(trajectory.sampling).items()},
        "end_reason": str(trajectory.end_reason),
        "env_result": trajectory.env_result,
        "image_bytes": dict(trajectory.image_bytes),
    }


def trajectory_from_plain(plain: Plain) -> Trajectory:
    sampling: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain["sampling"].items()
    }
    made = {
        "id": TrajectoryId(*plain["id"]),
        "turns": tuple(_turn_from(turn) for turn in plain["turns"]),
        "sampling": Sampling(**sampling),
        "end_reason": EndReason(plain["end_reason"]),
    }
    return Trajectory(**{**plain, **made})


def _turn(turn: Turn) -> Plain:
    """``token_ids`` [N] int64, ``logprobs`` [N] float64: the very numbers, whatever the engine's type was."""
    return {
        "role": turn.role,
        "token_ids": np.array(turn.token_ids, np.int64),
        "images": [{**asdict(image), "grid": list(image.grid)} for image in turn.images],
        "logprobs": None if turn.logprobs is None else np.array(turn.logprobs, np.float64),
        "version": None if turn.version is None else _version(turn.version),
        "finish": None if turn.finish is None else str(turn.finish),
        "restart": turn.restart,
        "executed": turn.executed,
    }


def _turn_from(plain: Plain) -> Turn:
    return Turn(
        role=plain["role"],
        token_ids=tuple(plain["token_ids"].tolist()),
        images=tuple(ImageRef(**{**image, "grid": tuple(image["grid"])}) for image in plain["images"]),
        logprobs=None if plain["logprobs"] is None else tuple(plain["logprobs"].tolist()),
        version=None if plain["version"] is None else Version(*plain["version"]),
        finish=None if plain["finish"] is None else FinishReason(plain["finish"]),
        restart=plain.get("restart", False),
        executed=plain.get("executed"),
    )


def _id(id: TrajectoryId) -> list[int]:
    return [id.group, id.sample]


def _version(version: Version) -> list[int]:
    return [version.lineage, version.step]


def _listed(value: Plain) -> Plain:
    return list(value) if isinstance(value, tuple) else value
