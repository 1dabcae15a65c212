"""The verdict on failures: what is done about episodes, actors and tasks, in which order.

``verdict`` gets a ``Call`` that has ended; it says what becomes of each episode (``Settle``), and
which actors end (``Replace``). Pure functions: they only read what they are given.
``FailureHistory`` collects the facts, and ``EpisodeRunner`` (cluster/supervision/attempts.py)
carries the actions out.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import NamedTuple, Protocol

from rayloop.core.failures import Cause, Failure, Scope
from rayloop.core.groups import Ref
from rayloop.core.types import RolloutRequest, Summary, Trajectory

FREE_ATTEMPTS = 10
"""Attempts that an episode has beyond its limit when other episodes ended its actors."""
TASK_FAILURES = 2
"""Groups in a row: one may be chance, and each further one costs a group."""
ACTOR_FAILURES = 3
"""Different tasks in a row: two are common among bad rows, three on one actor alone are not."""
NEVER = Failure(Cause.LOST, Scope.BYSTANDER, retryable=True, why="never played")
EpisodeResult = tuple[Summary, Ref[Trajectory]]
"""An episode that was played, and its payload, which the driver owns and does not open."""


class Seat(Protocol):
    """A leased worker: its serial number, its slot and its node."""

    @property
    def worker(self) -> int: ...  # noqa: D102

    @property
    def slot(self) -> int: ...  # noqa: D102

    @property
    def node(self) -> str: ...  # noqa: D102


Doubt = tuple[Seat, Failure]
"""A failure and the actor on which it happened."""


class Record(NamedTuple):
    """The attempts of an episode that have ended.

    ``charged``: how many of them count against the limit; ``doubts``: the actors that found its
    data bad, and their failures; ``environments``, ``engines``: slots on which it failed, to avoid.
    """

    attempts: int = 0
    charged: int = 0
    failure: Failure = NEVER
    doubts: tuple[Doubt, ...] = ()
    environments: frozenset[int] = frozenset()
    engines: frozenset[int] = frozenset()


class LostCall(NamedTuple):
    """The error of a call that was lost with its environment actor.

    ``is_spent``: the actor asked to be replaced; ``has_ended``: it was ended before, because of
    another call.
    """

    text: str
    first_line: str
    is_spent: bool
    is_hung: bool
    has_ended: bool

    @property
    def failure(self) -> Failure:
        """The failure of each episode of the call."""
        scope = Scope.EPISODE
        if self.is_spent or self.has_ended:
            scope = Scope.BYSTANDER
        elif self.is_hung:
            scope = Scope.PROCESS
        cause = Cause.HUNG if scope is Scope.PROCESS else Cause.LOST
        reason = f"the environment actor was lost: {self.first_line}"
        return Failure(cause, scope, retryable=True, why=reason)


class Staff(Protocol):
    """A pool: the number of its actors, and their nodes."""

    size: int

    @property
    def homes(self) -> AbstractSet[str]: ...  # noqa: D102


@dataclass
class ActorProcess:
    """An actor's process.

    ``began``: the number of the run's successes when it began; ``served``: whether an episode
    succeeded on it; ``failing``: the tasks that failed on it since.
    """

    began: int
    served: bool = False
    failing: set[str] = field(default_factory=set)


@dataclass
class GroupFailures:
    """The failures of a group that is being played.

    ``began``: the number of successes at its start; ``hung``: a place per hung episode.
    """

    began: int
    places: set[int | str] = field(default_factory=set)
    workers: set[int] = field(default_factory=set)
    hung: list[int | str] = field(default_factory=list)


class Call(NamedTuple):
    """A call of episodes of one group, which has ended; ``results`` has one value per episode.

    ``lost``: set if it was lost with its environment actor.
    """

    requests: Sequence[RolloutRequest]
    environment: Seat
    engine: Seat
    results: Sequence[Failure | EpisodeResult] = ()
    lost: LostCall | None = None


class Context(NamedTuple):
    """The facts that a verdict reads besides the failed call.

    ``limit``: ``environment.attempts``; ``records``: its episodes before the call; ``processes``:
    by serial number of an environment actor; ``successes``: the number of all before the call.
    """

    limit: int
    records: Sequence[Record]
    environments: Staff
    engines: Staff
    processes: Mapping[int, ActorProcess]
    successes: int


class Replace(NamedTuple):
    """Replace an environment actor.

    ``charged``: it costs one of ``recovery.replacements``; ``spares_others``: the run ends the
    actor itself, so that the actor's other calls are not to blame for their loss.
    """

    worker: int
    why: str
    charged: bool
    spares_others: bool = True


class Next(StrEnum):
    """What becomes of an episode."""

    PLAYED = "played"
    AGAIN = "again"
    """It is played again, on other nodes or at least in other slots."""
    GIVEN_UP = "given up"
    BAD_DATA = "bad data"
    """It is excluded, and its data reported."""
    TOO_LONG = "too long"
    """It is excluded: its prompt exceeds the limit on any actor."""
    END_RUN = "end run"


class Settle(NamedTuple):
    """The end of an episode's attempt.

    ``engine_worked``: None if unknown; ``record`` includes the attempt;
    ``charges``: failures that now count against the task and an environment actor.
    """

    episode: int
    engine_worked: bool | None
    next: Next
    record: Record
    charges: Sequence[Doubt] = ()


class Verdict(NamedTuple):
    """What follows from a call. Its fields are carried out in their order.

    ``actor_worked``: whether the environment actor played an episode, None if unknown.
    ``replacements``: of environment actors; if one is named twice, the first entry counts.
    """

    actor_worked: bool | None
    replacements: Sequence[Replace]
    episodes: Sequence[Settle]


def verdict(call: Call, context: Context) -> Verdict:
    """What follows from a call."""
    failures = [result for result in call.results if isinstance(result, Failure)]
    actor_worked = None
    if len(failures) < len(call.results):
        # One episode that was played shows that the actor works.
        actor_worked = True
    elif call.lost is None and any(failure.of_actor for failure in failures):
        # A lost actor is replaced instead.
        actor_worked = False
    episodes = [
        _settled(number, result, call, context) for number, result in enumerate(call.results)
    ]
    # Successes last: each ends the actor's streak of failing tasks, and clears the misses of its
    # engine.
    episodes.sort(key=lambda episode: episode.next is Next.PLAYED)
    return Verdict(actor_worked, _replacements(call, episodes, context), episodes)


def _replacements(call: Call, episodes: Sequence[Settle], context: Context) -> list[Replace]:
    """The environment actors that are replaced."""
    replacements = []
    for seat, failure in chain.from_iterable(episode.charges for episode in episodes):
        process = context.processes[seat.worker]
        tasks = {call.requests[0].task.id} | process.failing
        if seat is call.environment:
            others_went_well = context.successes > process.began
        else:
            # An earlier actor could not read data that this call's actor has now read. If the two
            # are the same actor, this success ended the streak of its failures.
            others_went_well = seat.worker != call.environment.worker
        if failure.scope is Scope.PROCESS:
            # It holds a call that hangs, and is not to blame.
            replacements.append(Replace(seat.worker, failure.why, charged=False))
        # Without a success anywhere since it began, the environment is broken, and not this actor.
        elif others_went_well and len(tasks) >= ACTOR_FAILURES:
            reason = f"episodes of {len(tasks)} different tasks failed on it one after the other"
            why = f"{reason}, last: {failure.why}"
            replacements.append(Replace(seat.worker, why, charged=True))
    lost = call.lost
    if lost is not None and not lost.has_ended:
        why = lost.first_line if lost.is_spent else lost.text
        charged = not lost.is_spent
        replacements.append(Replace(call.environment.worker, why, charged, lost.is_spent))
    return replacements


def _settled(number: int, result: Failure | EpisodeResult, call: Call, context: Context) -> Settle:
    """What becomes of an episode."""
    before = context.records[number]
    if not isinstance(result, Failure):
        # The episode's data are good, so the actors that could not read them are charged. The pool
        # itself counts the misses of engines.
        doubts_of_actors = [doubt for doubt in before.doubts if doubt[1].of_actor]
        return Settle(number, True, Next.PLAYED, before, doubts_of_actors)

    failure = result
    after = _after(before, failure, call)
    is_bad_data = failure.cause is Cause.BAD_DATA
    engine_worked = False if is_bad_data and not failure.of_actor else None
    # Bad data counts against its actor when another one has played the episode. The loss of a call
    # is one failure, however many episodes were lost.
    counts = failure.of_actor and not is_bad_data and (call.lost is None or number == 0)
    charges = [(call.environment, failure)] if counts else []
    return Settle(number, engine_worked, _next(before, after, context), after, charges)


def _after(before: Record, failure: Failure, call: Call) -> Record:
    """The record of an episode with its failed attempt."""
    doubts = before.doubts
    engines = before.engines
    is_bad_data = failure.cause is Cause.BAD_DATA
    if is_bad_data:
        seat = call.environment if failure.of_actor else call.engine
        doubts = (*doubts, (seat, failure))
        # The second opinion must come from another engine, too.
        engines |= {call.engine.slot}
    # Several episodes were on the actor that was lost, or another one is known to have ended it.
    is_shared = call.lost is not None and len(call.results) > 1
    by_others = is_shared or failure.scope is Scope.BYSTANDER
    # Bad data is charged in any case, so that a task which is never confirmed ends.
    charged = before.charged + (is_bad_data or not by_others)
    environments = before.environments | {call.environment.slot}
    return Record(before.attempts + 1, charged, failure, doubts, environments, engines)


def _next(before: Record, after: Record, context: Context) -> Next:
    """What follows the failed attempt that ``after`` includes and ``before`` does not."""
    failure = after.failure
    is_bad_data = failure.cause is Cause.BAD_DATA
    if failure.cause is Cause.DIVERGED:
        return Next.END_RUN
    if failure.cause is Cause.OVER_LONG:
        return Next.TOO_LONG
    if is_bad_data and _confirmed(after.doubts, context):
        return Next.BAD_DATA

    # Two actors have to agree about bad data, even where one attempt is allowed.
    limit = max(context.limit, 2) if is_bad_data else context.limit
    # The same bug on a second actor is not tried a third time.
    same_bug_again = not failure.retryable and failure.why == before.failure.why
    # Attempts that are not charged end, too.
    too_many = after.attempts >= context.limit + FREE_ATTEMPTS
    if after.charged >= limit or same_bug_again or too_many:
        return Next.GIVEN_UP
    return Next.AGAIN


def _confirmed(doubts: Sequence[Doubt], context: Context) -> bool:
    """Whether two actors found the data bad.

    They must be on two nodes if there are two. In a pool of one, one actor is enough.
    """
    pools = [context.environments if doubt.of_actor else context.engines for _, doubt in doubts]
    nodes = set[str]().union(*(pool.homes for pool in pools))
    if len(nodes) > 1:
        return len({seat.node for seat, _ in doubts}) > 1
    actors = {(failure.of_actor, seat.slot) for seat, failure in doubts}
    return len(actors) >= min(2, pools[-1].size)


def blames_task(
    task: str,
    failures: GroupFailures,
    processes: Mapping[int, ActorProcess],
    others_went_well: bool,
    actors: int,
) -> bool:
    """Whether the task is to blame for the failures of its group.

    ``others_went_well``: episodes of other tasks, during the group; ``actors``: the number of
    actors in the pool.
    """
    # At one place alone something may be missing.
    if len(failures.places) < min(2, actors):
        return False
    if others_went_well:
        return True
    # Otherwise the environment is broken, unless its actors serve other tasks.
    group_processes = [processes[worker] for worker in failures.workers]
    return all(process.served and process.failing <= {task} for process in group_processes)


def quarantine_reason(hung: Sequence[int | str], groups_failed: int, limit: int) -> str:
    """Why a task is quarantined after ``groups_failed`` failed groups in a row, or ""."""
    reason = too_many_hung(hung, limit)
    if not reason and groups_failed >= TASK_FAILURES:
        return f"its environment failed in {groups_failed} groups"
    return reason


def too_many_hung(hung: Sequence[int | str], limit: int) -> str:
    """Why no further episode of a group should be played, or "".

    The reason is that too many of them hung, in more than one place.
    """
    if len(hung) < limit or len(set(hung)) < 2:
        return ""
    return f"{len(hung)} episodes of its group hung"
