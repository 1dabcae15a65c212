"""Groups, members and trajectories as plain values (JSON's, bytes and arrays) and back, for the
checkpoint; pydantic reads them by type, which runs no code. A new field without a default requires
another ``SCHEMA`` (rayloop/run/identity.py).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

from rayloop.core.groups import (
    Credit,
    Group,
    Member,
    Outcome,
    Scored,
    Status,
    TrajectoryState,
    Unscored,
)
from rayloop.core.types import Streams, Summary, Task, Trajectory, TrajectoryId, Turn, Version

T = TypeVar("T")
Plain = Any
"""None, a bool, a number, a text, bytes, an array, a list of these, or a mapping from texts to
these.
"""
Own = Callable[[Any], Any]
"""Keeps a value (a trajectory, or log-probs) and returns what stands for it in ``Member``."""


@dataclass(frozen=True, slots=True)
class HeldValue:
    """Stands in a state for a value in the object store: ``reference`` is the one that the member
    ``id`` has.
    """

    id: TrajectoryId
    reference: Any


def held(state: Plain) -> Iterator[HeldValue]:
    """All held values in ``state``."""
    match state:
        case HeldValue():
            yield state
        case Mapping():
            for value in state.values():
                yield from held(value)
        case list():
            for value in state:
                yield from held(value)


def filled(state: Plain, values: Callable[[Any], Any]) -> Plain:
    """``state`` with the value of every ``HeldValue`` in its place; ``values``: by reference."""
    match state:
        case HeldValue(reference=reference):
            value = values(reference)
            return plain_trajectory(value) if isinstance(value, Trajectory) else value
        case Mapping():
            return {name: filled(value, values) for name, value in state.items()}
        case list():
            return [filled(value, values) for value in state]
    return state


def _plain(value: Any) -> Plain:
    """A value of the core's classes as plain data."""
    match value:
        # Before the case of all dataclasses, which these are as well.
        case TrajectoryId() | Version():
            return list(astuple(value))
        case StrEnum():
            return str(value)
        case tuple() | list():
            return [_plain(one) for one in value]
        case Mapping():
            return {name: _plain(one) for name, one in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, HeldValue):
            return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


@cache
def _reader(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _read(cls: type[T], plain: Mapping[str, Any], **made: Any) -> T:
    """The value that ``_plain`` wrote; ``made`` are the fields that are no mappings.

    Raises ValueError.
    """
    value: T = _reader(cls).validate_python({**plain, **made})  # type: ignore[arg-type]  # a class is hashable
    return value


def plain_group(group: Group) -> Plain:
    """A group; of its task only the id, since the row is in the run's data."""
    # ``issue`` here and ``fate`` in ``plain_member`` are names
    # of the file format: others would need a new SCHEMA.
    members = [plain_member(member) for member in group.members]
    return {
        "issue": group.number,
        "task": group.task.id,
        "members": members,
        "mean": group.mean,
        "std": group.std,
        "replay_of": _plain(group.replay_of),
    }


def group_from_plain(plain: Plain, own: Own, task: Callable[[str], Task]) -> Group:
    """The group again; ``own`` keeps its payloads, ``task`` finds a row by its id."""
    replay_of = None if plain["replay_of"] is None else TrajectoryId(*plain["replay_of"])
    members = tuple(member_from_plain(member, own) for member in plain["members"])
    return Group(
        plain["issue"], task(plain["task"]), members, plain["mean"], plain["std"], replay_of
    )


def plain_member(member: Member) -> Plain:
    """A member; of one that left its group only the record."""
    kept, id = member.kept, member.summary.id
    return {
        "summary": _plain(member.summary),
        "outcome": _outcome(member.outcome),
        "payload": HeldValue(id, member.payload) if kept and member.payload is not None else None,
        "credit": None if member.credit is None else _plain(member.credit),
        "reference": (
            HeldValue(id, member.reference) if kept and member.reference is not None else None
        ),
        "replayed": member.replayed,
        "fate": None if member.status is None else [str(member.status.state), member.status.reason],
    }


def member_from_plain(plain: Plain, own: Own) -> Member:
    """The member again."""
    payload, reference, status, summary = (
        plain["payload"],
        plain["reference"],
        plain["fate"],
        plain["summary"],
    )
    versions = {name: Version(*summary[name]) for name in ("first_version", "last_version")}
    return Member(
        summary=_read(Summary, summary, id=TrajectoryId(*summary["id"]), **versions),
        outcome=_outcome_from(plain["outcome"]),
        payload=None if payload is None else own(trajectory_from_plain(payload)),
        # Older checkpoints have a number under ``advantage``.
        credit=_credit(plain.get("credit", plain.get("advantage"))),
        reference=None if reference is None else own(reference),
        replayed=plain["replayed"],
        status=None if status is None else Status(TrajectoryState(status[0]), status[1]),
    )


def _credit(plain: Plain) -> Credit | None:
    """The credit again; from a number, an advantage for all tokens."""
    if isinstance(plain, Mapping):
        return _read(Credit, plain, streams=_read(Streams, plain["streams"]))
    return None if plain is None else Credit(plain)


def _outcome(outcome: Outcome) -> Plain:
    plain = _plain(outcome)
    if isinstance(outcome, Unscored):
        return {"unscored": plain.pop("kind"), **plain}
    return {
        **plain,
        "value": float(outcome.value),
        "components": {name: float(v) for name, v in outcome.components.items()},
    }


def _outcome_from(plain: Plain) -> Outcome:
    if "unscored" not in plain:
        return _read(Scored, plain)
    rest = dict(plain)
    return _read(Unscored, rest, kind=rest.pop("unscored"))


def plain_trajectory(trajectory: Trajectory) -> Plain:
    """A trajectory.

    A turn's ``token_ids`` are [N] int64 and its ``logprobs`` [N] float64, whatever the engine's
    types were.
    """
    plain = _plain(trajectory)
    for turn, of in zip(plain["turns"], trajectory.turns, strict=True):
        turn["token_ids"] = np.array(of.token_ids, np.int64)
        turn["logprobs"] = None if of.logprobs is None else np.array(of.logprobs, np.float64)
    return plain


def trajectory_from_plain(plain: Plain) -> Trajectory:
    """The trajectory again."""
    return _read(
        Trajectory, plain, id=TrajectoryId(*plain["id"]), turns=tuple(map(_turn, plain["turns"]))
    )


def _turn(plain: Plain) -> Turn:
    logprobs, version = plain["logprobs"], plain["version"]
    return _read(
        Turn,
        plain,
        token_ids=plain["token_ids"].tolist(),
        logprobs=None if logprobs is None else logprobs.tolist(),
        version=None if version is None else Version(*version),
    )
