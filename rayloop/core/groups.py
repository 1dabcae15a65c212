"""The words of what is judged together: outcomes, members, groups and their fates.

No torch, no ray, no I/O.
"""

import dataclasses
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

from rayloop.core.failures import Cause, Failure
from rayloop.core.types import STREAMS, Streams, Summary, Task, Trajectory, TrajectoryId

T_co = TypeVar("T_co", covariant=True)


class Ref(Generic[T_co]):
    """A value in the object store, now or later: Ray's ObjectRef at run time."""

    def __await__(self) -> Generator[Any, None, T_co]:
        raise NotImplementedError("Ref is a type only; Ray's ObjectRef is awaited")


class UnscoredKind(StrEnum):
    """Why a trajectory has no reward, never by a fault of the policy. It counts in no statistic.

    All are failures but NOT_APPLICABLE: the reward returned None, since it does not fit the row.
    """

    INVALID_REWARD = "invalid_reward"
    ENVIRONMENT_FAILURE = "environment_failure"
    REWARD_UNAVAILABLE = "reward_unavailable"
    PAYLOAD_LOST = "payload_lost"
    OVER_LONG_PROMPT = "over_long_prompt"
    BAD_DATA = "bad_data"
    TIMEOUT = "timeout"
    GRADER_ERROR = "grader_error"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward: its value, and logged ``components``.

    ``flags`` are the policy's faults, ``trace`` a grader's traceback, ``reason`` the judge's.
    ``verdicts``: of a judge that the reward asked, as plain values (rayloop/rewards/verdicts.py).
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    trace: str = field(default="", compare=False, repr=False)
    reason: str = field(default="", compare=False, repr=False)
    verdicts: tuple[Mapping[str, Any], ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Unscored:
    """The reason why no reward exists.

    Never replaced by a number. ``trace``: see ``Scored``; ``components``: the known ones.
    """

    kind: UnscoredKind
    reason: str = ""
    trace: str = field(default="", compare=False, repr=False)
    components: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, failure: Failure) -> Self:
        """The outcome of an episode that was not played."""
        if failure.cause in (Cause.BAD_DATA, Cause.OVER_LONG):
            return cls(UnscoredKind(failure.cause), failure.why)
        # The failures of engines count here, too.
        return cls(UnscoredKind.ENVIRONMENT_FAILURE, failure.why)


Outcome = Scored | Unscored


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantages of a member, and the weights of its losses.

    An advantage is for all its sampled tokens, or one for each sampled turn (``turns``, with their
    mean as ``advantage``). ``base``: the value from which a scale over the step is computed.
    """

    advantage: float
    turns: tuple[float, ...] = ()
    streams: Streams = STREAMS
    base: float = 0.0

    @classmethod
    def of_turns(cls, turns: Iterable[float]) -> Self:
        """One advantage for each sampled turn."""
        values = tuple(turns)
        return cls(sum(values) / max(1, len(values)), values)

    @property
    def teaches(self) -> bool:
        """Whether some token has an advantage other than 0."""
        return any(self.turns or (self.advantage,))


class TrajectoryState(StrEnum):
    """The state of a trajectory id in the ledger. Everything after READY is final."""

    IN_FLIGHT = "in_flight"
    READY = "ready"
    TRAINED = "trained"
    FILTERED = "filtered"
    EXCLUDED = "excluded"
    STALE = "stale"
    SURPLUS = "surplus"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Status:
    """Why a member left its group: a final state and a reason for the counters."""

    state: TrajectoryState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """A trajectory within its group.

    ``payload`` and ``ref_logprobs`` (the reference policy's log-probs, [sampled_tokens] float32)
    are opaque references. ``replayed``: a stored success of ARPO, which is not in the ledger.
    """

    summary: Summary
    outcome: Outcome
    payload: Ref[Trajectory] | None = None
    credit: Credit | None = None
    ref_logprobs: Ref[Any] | None = None
    replayed: bool = False
    status: Status | None = None

    @property
    def advantage(self) -> float | None:
        """The advantage of its tokens, of turns the mean; None before it has one."""
        return None if self.credit is None else self.credit.advantage

    @property
    def kept(self) -> bool:
        """Whether it has not left its group."""
        return self.status is None

    def bare(self) -> Self:
        """The same member without references to the object store."""
        return dataclasses.replace(self, payload=None, ref_logprobs=None)

    @property
    def reward(self) -> float:
        """The reward of a scored member. Raises ValueError for an unscored one."""
        if isinstance(self.outcome, Unscored):
            raise ValueError(
                f"trajectory {self.summary.id} has no reward: {self.outcome.kind}"
                f" {self.outcome.reason}"
            )
        return self.outcome.value


@dataclass(frozen=True, slots=True)
class Group:
    """Trajectories of one task that share a baseline, ordered by ``number``.

    ``mean`` and unbiased ``std``: the baseline's. ``step``: the step for which it was scored, which
    a reward sees as ``ScoreContext.step``.
    """

    number: int
    task: Task
    members: tuple[Member, ...]
    mean: float | None = None
    std: float | None = None
    replay_of: TrajectoryId | None = None
    step: int = 0

    @property
    def kept(self) -> tuple[Member, ...]:
        """Members that have not left the group."""
        return tuple(member for member in self.members if member.kept)

    @property
    def scored(self) -> tuple[Member, ...]:
        """Members that have a reward and have not been excluded."""
        return tuple(m for m in self.members if m.kept and isinstance(m.outcome, Scored))

    def map(self, change: Mapping[int, Member]) -> Self:
        """The same group with the members at the given positions replaced."""
        members = tuple(change.get(place, member) for place, member in enumerate(self.members))
        return dataclasses.replace(self, members=members)

    def bare(self) -> Self:
        """The same group without references to the object store."""
        return dataclasses.replace(self, members=tuple(member.bare() for member in self.members))
