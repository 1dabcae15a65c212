"""Groups, members and trajectories as plain values (JSON's, bytes and arrays) and back.

They are for the checkpoint; pydantic reads them by type, which runs no code. A new field without a
default requires another ``CHECKPOINT_SCHEMA_VERSION`` (rayloop/run/identity.py), and a renamed one
a line in ``KEYS_OF_SCHEMA_3``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
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
from rayloop.core.types import (
    ImageSource,
    Streams,
    Summary,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)

T = TypeVar("T")
Plain = Any
"""None, a bool, a number, a text, bytes or an array, or a list or mapping of these.

The keys of a mapping are texts.
"""
KEYS_OF_SCHEMA_3 = {
    "production": "rollouts",
    "issuer": "scheduler",
    "made_up_for": "replaced_groups",
    "issue": "number",
    "fate": "status",
    "reference": "ref_logprobs",
    "advantage": "credit",
    "kept": "token_mask",
}
"""Keys that checkpoints had up to schema 3, and their present names."""
Store = Callable[[Any], Any]
"""A function that keeps a value (a trajectory, or log-probs) and returns its reference."""


@dataclass(frozen=True)
class HeldValue:
    """A placeholder in a state for a value in the object store.

    ``ref`` is the object reference that the member ``id`` has.
    """

    id: TrajectoryId
    ref: Any


def held(state: Plain) -> Iterator[HeldValue]:
    """Yield all held values in ``state``."""
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
    """``state`` with each ``HeldValue`` replaced by its value, which ``values`` finds."""
    match state:
        case HeldValue(ref=ref):
            value = values(ref)
            return plain_trajectory(value) if isinstance(value, Trajectory) else value
        case Mapping():
            return {name: filled(value, values) for name, value in state.items()}
        case list():
            return [filled(value, values) for value in state]
    return state


def with_present_keys(plain: Mapping[str, Any]) -> dict[str, Any]:
    """``plain``, perhaps of an older checkpoint, with the keys that it would have today.

    The keys within its values stay: some are names that a user chose.
    """
    return {KEYS_OF_SCHEMA_3.get(key, key): value for key, value in plain.items()}


def _plain(value: Any) -> Plain:
    """A value of the core's classes as plain data."""
    match value:
        # Before the case of all dataclasses, which these are as well.
        case TrajectoryId() | Version():
            return list(astuple(value))
        case StrEnum():
            return str(value)
        case tuple() | list():
            return [_plain(element) for element in value]
        case Mapping():
            return {name: _plain(element) for name, element in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, HeldValue):
            return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


@cache
def _reader(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _read(cls: type[T], plain: Mapping[str, Any], **fields: Any) -> T:
    """The value that ``_plain`` wrote; ``fields`` are the fields that pydantic cannot read.

    Raises ValueError.
    """
    reader = _reader(cls)  # type: ignore[arg-type]  # a class is hashable
    value: T = reader.validate_python({**plain, **fields})
    return value


def plain_group(group: Group, *, whole: bool = False) -> Plain:
    """A group as plain values, with the id of its task, since the row is in the run's data.

    ``whole``: with the task itself, and with the payloads of members that have left the group.
    """
    members = [plain_member(member, whole=whole) for member in group.members]
    return {
        "number": group.number,
        "task": _plain_task(group.task) if whole else group.task.id,
        "members": members,
        "mean": group.mean,
        "std": group.std,
        "replay_of": _plain(group.replay_of),
        "step": group.step,
    }


def _plain_task(task: Task) -> Plain:
    """A task without the bytes of its images; values that are not plain become descriptions."""
    messages = []
    for message in task.messages:
        parts = tuple(
            replace(part, data=None) if isinstance(part, ImageSource) else part
            for part in message.parts
        )
        messages.append(replace(message, parts=parts))
    plain: Plain = _plain(replace(task, messages=tuple(messages)))
    for name in ("ground_truth", "extra", "tools"):
        plain[name] = plain_data(plain[name])
    return plain


def plain_data(value: Any) -> Plain:
    """A value of a row as JSON can hold it: what JSON cannot hold becomes its description."""
    if isinstance(value, Mapping):
        return {str(name): plain_data(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value if isinstance(value, str | int | float | None) else repr(value)


def task_from_plain(plain: Plain) -> Task:
    """The task of a ``whole`` group."""
    return _read(Task, plain)


def group_from_plain(plain: Plain, store: Store, task: Callable[[Plain], Task]) -> Group:
    """The group of plain values; ``store`` keeps its payloads, ``task`` finds a row by its id."""
    plain = with_present_keys(plain)
    replay_of = None if plain["replay_of"] is None else TrajectoryId(*plain["replay_of"])
    members = tuple(member_from_plain(member, store) for member in plain["members"])
    # Older checkpoints have no step.
    step = plain.get("step", 0)
    return Group(
        plain["number"], task(plain["task"]), members, plain["mean"], plain["std"], replay_of, step
    )


def plain_member(member: Member, *, whole: bool = False) -> Plain:
    """A member as plain values.

    A member that left its group has no payload and reference, but with ``whole`` its payload.
    """
    payload = None
    ref_logprobs = None
    if (member.kept or whole) and member.payload is not None:
        payload = HeldValue(member.summary.id, member.payload)
    if member.kept and member.ref_logprobs is not None:
        ref_logprobs = HeldValue(member.summary.id, member.ref_logprobs)
    status = None
    if member.status is not None:
        status = [str(member.status.state), member.status.reason]
    return {
        "summary": _plain(member.summary),
        "outcome": _outcome(member.outcome),
        "payload": payload,
        "credit": None if member.credit is None else _plain(member.credit),
        "ref_logprobs": ref_logprobs,
        "replayed": member.replayed,
        "status": status,
    }


def member_from_plain(plain: Plain, store: Store) -> Member:
    """The member of plain values; ``store`` keeps its payloads."""
    plain = with_present_keys(plain)
    payload = plain["payload"]
    ref_logprobs = plain["ref_logprobs"]
    status = None
    if plain["status"] is not None:
        state, reason = plain["status"]
        status = Status(TrajectoryState(state), reason)
    return Member(
        summary=_summary_from_plain(plain["summary"]),
        outcome=_outcome_from_plain(plain["outcome"]),
        payload=None if payload is None else store(trajectory_from_plain(payload)),
        credit=_credit_from_plain(plain["credit"]),
        ref_logprobs=None if ref_logprobs is None else store(ref_logprobs),
        replayed=plain["replayed"],
        status=status,
    )


def _summary_from_plain(plain: Plain) -> Summary:
    return _read(
        Summary,
        plain,
        id=TrajectoryId(*plain["id"]),
        first_version=Version(*plain["first_version"]),
        last_version=Version(*plain["last_version"]),
    )


def _credit_from_plain(plain: Plain) -> Credit | None:
    """The credit; in older checkpoints a number, the advantage for all tokens."""
    if isinstance(plain, Mapping):
        return _read(Credit, plain, streams=_read(Streams, plain["streams"]))
    return None if plain is None else Credit(plain)


def _outcome(outcome: Outcome) -> Plain:
    plain = _plain(outcome)
    if isinstance(outcome, Unscored):
        return {"unscored": plain.pop("kind"), **plain}
    components = {name: float(value) for name, value in outcome.components.items()}
    return {**plain, "value": float(outcome.value), "components": components}


def _outcome_from_plain(plain: Plain) -> Outcome:
    if "unscored" not in plain:
        return _read(Scored, plain)
    fields = dict(plain)
    return _read(Unscored, fields, kind=fields.pop("unscored"))


def plain_trajectory(trajectory: Trajectory) -> Plain:
    """A trajectory as plain values.

    A turn's ``token_ids`` are [N] int64 and its ``logprobs`` [N] float64, whatever the engine's
    types were.
    """
    plain = _plain(trajectory)
    for plain_turn, turn in zip(plain["turns"], trajectory.turns, strict=True):
        plain_turn["token_ids"] = np.array(turn.token_ids, np.int64)
        plain_turn["logprobs"] = None
        if turn.logprobs is not None:
            plain_turn["logprobs"] = np.array(turn.logprobs, np.float64)
    return plain


def trajectory_from_plain(plain: Plain) -> Trajectory:
    """The trajectory of plain values."""
    turns = tuple(map(_turn_from_plain, plain["turns"]))
    return _read(Trajectory, plain, id=TrajectoryId(*plain["id"]), turns=turns)


def _turn_from_plain(plain: Plain) -> Turn:
    plain = with_present_keys(plain)
    logprobs = plain["logprobs"]
    version = plain["version"]
    return _read(
        Turn,
        plain,
        token_ids=plain["token_ids"].tolist(),
        logprobs=None if logprobs is None else logprobs.tolist(),
        version=None if version is None else Version(*version),
    )
