"""Group requests: which task starts next, under which number, and whether staleness, budget and
engine caches leave room for it. With ``max_staleness: 0`` groups start in rounds, only while a step
waits for them: nothing in flight survives a weight sync.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.groups import Group, Member, Scored
from rayloop.core.ledger import Ledger
from rayloop.core.protocols import EngineHealth
from rayloop.core.types import RolloutRequest, Task, TrajectoryId, Version, derive
from rayloop.data.cursor import TaskCursor
from rayloop.data.dataset import Dataset
from rayloop.grpo.staleness import is_due, open_slots
from rayloop.run.config import RunConfig
from rayloop.run.order import Order


@dataclass(frozen=True)
class GroupRequest:
    """A group to play: its number, its task's index in the dataset, and how often that task was
    visited before.
    """

    number: int
    index: int
    visit: int

    def ids(self, size: int) -> list[TrajectoryId]:
        """Of its ``size`` trajectories."""
        return [TrajectoryId(self.number, sample) for sample in range(size)]


class Player(Protocol):
    """Plays and scores groups, also when actors die (cluster/supervision/attempts.py)."""

    async def play(
        self, asked: Sequence[RolloutRequest], step: int, begins: Callable[[RolloutRequest], None]
    ) -> list[Member]:
        """The members of a group for ``step``.

        ``begins`` is called when an episode is let into the engines.
        """


def requests(
    config: RunConfig, task: Task, ids: Sequence[TrajectoryId], visit: int
) -> list[RolloutRequest]:
    """The episodes of one group: what each samples follows from the run's seed, the task, the
    sample and the visit.
    """
    sampling = config.rollout.sampling.sampling()
    cohort = len(ids) if config.rollout.deterministic else None
    return [
        RolloutRequest(task, i, 0, derive(config.seed, task.id, i.sample, visit), sampling, cohort)
        for i in ids
    ]


class GroupRollout:
    """Plays groups for the version that the engines serve.

    ``changed`` is called when an episode begins once more. Until an episode ends, the version that
    began it is assumed to be the one served when it was let into the engines: that or an older one.
    """

    def __init__(self, config: RunConfig, changed: Callable[[], None]) -> None:
        self.config, self._changed = config, changed
        self.version = Version(0, 0)
        self._began: dict[int, dict[int, Version]] = {}
        self._versions: Counter[Version] = Counter()
        """Version -> episodes in flight that it began."""

    async def play(self, request: GroupRequest, task: Task, player: Player) -> Group:
        """All members of a group, which counts as being played until ``forget``."""
        asked = requests(
            self.config, task, request.ids(self.config.algorithm.group_size), request.visit
        )
        self._began[request.number] = {}
        members = await player.play(asked, self.version.step, self._begins)
        for member in members:
            self._set(
                member.summary.id,
                member.summary.first_version if isinstance(member.outcome, Scored) else None,
            )
        return Group(request.number, task, tuple(members))

    def _begins(self, request: RolloutRequest) -> None:
        if self._set(request.id, self.version):
            self._changed()

    def _set(self, id: TrajectoryId, version: Version | None) -> bool:
        """Count an episode under the version that began it (None: no longer).

        Returns whether it was counted before.
        """
        began = self._began[id.group]
        if before := began.pop(id.sample, None):
            self._forget(before)
        if version is not None:
            began[id.sample] = version
            self._versions[version] += 1
        return before is not None

    def _forget(self, version: Version) -> None:
        self._versions[version] -= 1
        if not self._versions[version]:
            del self._versions[version]

    def any_due(self, training: Version, inherited: Mapping[int, int]) -> bool:
        """Whether a group holds what ``training`` is the last version to train on."""
        limit = self.config.algorithm.staleness.max_staleness
        return any(is_due(first, training, limit, inherited) for first in self._versions)

    def forget(self, request: int) -> None:
        """Count a group's episodes no longer."""
        for version in self._began.pop(request).values():
            self._forget(version)

    def clear(self) -> None:
        """Count no episode any longer."""
        self._began.clear()
        self._versions.clear()


class GroupScheduler:
    """Visits the tasks that are not quarantined, in the cursor's order; what was in flight at a
    checkpoint comes first.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        ledger: Ledger,
        on_bad_row: Callable[[DataFailure], None],
    ) -> None:
        self.config, self.dataset, self.ledger = config, dataset, ledger
        order: Order | None = (
            config.data.order.build() if isinstance(config.data.order, Component) else None
        )
        tiers = [order.tier(task) for task in dataset] if order else ()
        self.cursor = TaskCursor(len(dataset), config.seed, config.data.shuffle, tiers)
        self.next_number = 0
        self.reissue: list[GroupRequest] = []
        """Groups that were in flight when their run ended, to be played again under their numbers.
        """
        self.one_round = True
        """Without staleness: what is issued again was one round, which is finished as it began;
        else it fills rounds of its own.
        """
        self.issued_this_step = 0
        self.quarantined: set[str] = set()
        """Ids of the tasks that are not played again in this run."""
        self._made_up_for = 0
        self._on_bad_row = on_bad_row

    def admissible(self, *, ready: int, in_flight: int, acceptance: float) -> int:
        """How many groups may start now, with ``ready`` trajectories that wait for training or are
        in it, and ``in_flight`` groups, of whose trajectories the share ``acceptance`` will
        survive.
        """
        c = self.config.algorithm
        stale = c.staleness.max_staleness
        if stale == 0 and in_flight:
            return 0
        if stale == 0 and self.one_round and self.reissue:
            return len(self.reissue)
        slots = open_slots(stale, c.target, ready, in_flight * c.group_size, acceptance)
        wanted = slots / (c.group_size * acceptance)
        left = max(0, (stale + 1) * self.budget - self.issued_this_step)
        left += len(self.reissue)  # which were counted before
        if stale:  # not one beyond the bound, which would only grow stale
            return min(math.floor(wanted), left)
        return min(c.filtering.groups_per_generation or math.ceil(wanted), left) if slots else 0

    @property
    def budget(self) -> int:
        """Groups that one step may spend."""
        c = self.config.algorithm
        return c.filtering.max_generation_batches * (
            c.filtering.groups_per_generation or c.groups_per_step
        )

    @property
    def spent(self) -> bool:
        """Nothing new may begin for this step."""
        return self.exhausted or self.issued_this_step >= self.budget

    def issue(self) -> GroupRequest | None:
        """The next group, which is now in flight in the ledger.

        None when every task is quarantined.
        """
        request = self._next()
        if request is not None:
            self.ledger.issue(request.ids(self.config.algorithm.group_size))
        return request

    def _next(self) -> GroupRequest | None:
        if self.reissue:
            request = self.reissue.pop(
                0
            )  # counted in ``issued_this_step`` when it was first issued
            if self.ledger.may_issue(request.ids(self.config.algorithm.group_size)):
                return request
            self.next_number += 1  # groups have grown since: its ids would not
            return replace(request, number=self.next_number)
        while not self.exhausted:
            index = self.cursor.next()
            if self.dataset[index].id not in self.quarantined:
                self.next_number += 1
                self.issued_this_step += 1
                return GroupRequest(self.next_number, index, self.cursor.visits(index))
        return None

    def again(self, issues: Iterable[GroupRequest]) -> None:
        """These were in flight and are gone: they are issued again, oldest first."""
        self.reissue = sorted([*self.reissue, *issues], key=lambda request: request.number)

    def make_up_for(self, trajectories: int) -> None:
        """Groups that replace so many lost trajectories cost the step nothing, as often as its
        budget has groups.
        """
        again = min(
            math.ceil(trajectories / self.config.algorithm.group_size),
            self.budget - self._made_up_for,
        )
        self._made_up_for += again
        self.issued_this_step -= again

    def begin_step(self) -> None:
        """The groups of a step were taken: the next one has its own budget."""
        self.issued_this_step = self._made_up_for = 0

    def quarantine(self, task: Task, path: str, reason: str) -> bool:
        """Never issue this task again, and write down why. Returns whether that is new."""
        if task.id in self.quarantined:
            return False
        self.quarantined.add(task.id)
        self._on_bad_row(
            DataFailure(self.dataset.where(task), f"{path}: {reason}" if path else reason)
        )
        return True

    @property
    def exhausted(self) -> bool:
        """Every task is quarantined."""
        # The cheap test first: the walk over all tasks is for the rare case that it passes.
        return len(self.quarantined) >= len(self.dataset) and all(
            task.id in self.quarantined for task in self.dataset
        )

    def no_task(self) -> ConfigError:
        """The error of a run whose tasks are all quarantined."""
        return ConfigError(
            f"data.train: every one of the {len(self.dataset)} tasks is quarantined; see"
            " quarantine.jsonl. If the rows are good and what they need was broken, repair it and"
            " run again with checkpoint.resume=runs/NAME/checkpoints/step_N"
        )

    def probe_tasks(self) -> list[Task]:
        """Tasks that log-prob check and self-test may play, in the dataset's order.

        Raises ConfigError when there is none.
        """
        if self.exhausted:
            raise self.no_task()
        return [task for task in self.dataset if task.id not in self.quarantined]

    def state(self, in_flight: Iterable[GroupRequest]) -> dict[str, Any]:
        """Plain values. Groups ``in_flight`` will be issued again first."""
        again, playing = (
            [astuple(request) for request in self.reissue],
            [astuple(request) for request in in_flight],
        )
        synchronous = self.config.algorithm.staleness.max_staleness == 0
        return {
            "cursor": self.cursor.state(),
            "next_number": self.next_number,
            "reissue": [list(request) for request in sorted([*again, *playing])],
            "one_round": synchronous and (self.one_round or not again),
            "issued_this_step": self.issued_this_step,
            "made_up_for": self._made_up_for,
            "quarantined": sorted(self.quarantined),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises CheckpointError when data, seed or shuffling have changed.
        """
        self.cursor.restore(state["cursor"])
        self.next_number = state["next_number"]
        self.reissue = [GroupRequest(*request) for request in state["reissue"]]
        self.one_round = state["one_round"]
        self.issued_this_step, self._made_up_for = state["issued_this_step"], state["made_up_for"]
        self.quarantined = set(state["quarantined"])


FULL = 0.9
"""Share of an engine's cache from which on requests that wait mean that there are too many
episodes.
"""
GROWTH = 1.25
"""Factor between two looks, while every admitted episode fits."""


class ConcurrencyLimit:
    """How many episodes play at once: ``limit``, until an engine's cache is full and requests wait;
    then as many as it holds.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit, self.inside = limit, 0
        self.metrics: dict[str, float] = {}
        """Of the engines' last answers."""
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def room(self, episodes: int = 1) -> AsyncIterator[None]:
        """Admits so many episodes together when there is room for one of them; first come, first
        served.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, episodes))
        self._let_in()
        try:
            await turn
            yield
        finally:
            # A turn that was granted in the moment of the
            # cancellation is not cancelled: its room is given back.
            if turn.cancelled():
                self._waiting = deque(other for other in self._waiting if other[0] is not turn)
            else:
                self.inside -= episodes
            self._let_in()

    def observe(self, engines: Sequence[EngineHealth]) -> None:
        """Adapt the limit to the engines' load: down to the episodes that they really decode, up by
        ``GROWTH``.
        """
        caches = [engine.cache for engine in engines if engine.cache is not None]
        if not caches:
            return
        running, waiting = (
            sum(engine.running for engine in engines),
            sum(engine.waiting for engine in engines),
        )
        self.metrics = {"rollout/cache": max(caches), "rollout/waiting": float(waiting)}
        if waiting and max(caches) >= FULL:
            # At least one episode for each engine, or some would get nothing to decode.
            self.limit = max(len(caches), math.floor(self.inside * running / (running + waiting)))
        elif not waiting and max(caches) < FULL and self.inside >= self.limit:
            self.limit = math.ceil(self.limit * GROWTH)
            self._let_in()
        if self.limit < math.inf:
            self.metrics["rollout/in_flight_limit"] = float(self.limit)

    def _let_in(self) -> None:
        while self._waiting and self.inside < self.limit:
            turn, episodes = self._waiting.popleft()
            # Cancelled turns stay in the queue until their own coroutine runs.
            if not turn.done():
                self.inside += episodes
                turn.set_result(None)
