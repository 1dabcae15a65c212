"""Group requests: which task starts next, under which number, and when.

Staleness, budget and engine caches limit the number of groups. With ``max_staleness: 0`` groups
start in rounds, only while a step waits for them: no group is in flight during a weight sync.
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
from rayloop.rollout.plain import with_present_keys
from rayloop.run.config import RunConfig
from rayloop.run.order import Order


@dataclass(frozen=True)
class GroupRequest:
    """A group to play.

    It has its number, its task's index in the dataset, and the number of earlier visits of that
    task.
    """

    number: int
    index: int
    visit: int

    def ids(self, size: int) -> list[TrajectoryId]:
        """The ids of its ``size`` trajectories."""
        return [TrajectoryId(self.number, sample) for sample in range(size)]


class GroupRunner(Protocol):
    """Rolls out and scores groups, also when actors die.

    It is in cluster/supervision/attempts.py.
    """

    async def rollout_group(
        self, asked: Sequence[RolloutRequest], step: int, begins: Callable[[RolloutRequest], None]
    ) -> list[Member]:
        """The members of a group for ``step``.

        ``begins`` is called when an episode is admitted to the engines.
        """


def requests(
    config: RunConfig, task: Task, ids: Sequence[TrajectoryId], visit: int
) -> list[RolloutRequest]:
    """The episodes of one group.

    The samples of each follow from the run's seed, the task, the sample and the visit.
    """
    sampling = config.rollout.sampling.sampling()
    cohort = len(ids) if config.rollout.deterministic else None
    episodes = []
    for id in ids:
        seed = derive(config.seed, task.id, id.sample, visit)
        episodes.append(RolloutRequest(task, id, 0, seed, sampling, cohort))
    return episodes


class GroupRollout:
    """The rollouts of groups with the version that the engines serve.

    ``changed`` is called when an episode begins once more. An episode in flight
    counts as begun by the version that was served when it was admitted to the engines.
    """

    def __init__(self, config: RunConfig, changed: Callable[[], None]) -> None:
        self.config = config
        self._changed = changed
        self.version = Version(0, 0)
        self._first_versions: dict[int, dict[int, Version]] = {}
        """Group number -> sample -> the version that began the episode."""
        self._episodes: Counter[Version] = Counter()
        """Version -> number of episodes in flight that it began."""

    async def rollout_group(self, request: GroupRequest, task: Task, runner: GroupRunner) -> Group:
        """All members of a group, which counts as in flight until ``forget``."""
        ids = request.ids(self.config.algorithm.group_size)
        episodes = requests(self.config, task, ids, request.visit)
        self._first_versions[request.number] = {}
        # A sync during the episodes changes the version.
        step = self.version.step
        members = await runner.rollout_group(episodes, step, self._begins)
        for member in members:
            is_scored = isinstance(member.outcome, Scored)
            self._set(member.summary.id, member.summary.first_version if is_scored else None)
        return Group(request.number, task, tuple(members), step=step)

    def _begins(self, request: RolloutRequest) -> None:
        if self._set(request.id, self.version):
            self._changed()

    def _set(self, id: TrajectoryId, version: Version | None) -> bool:
        """Count an episode under the version that began it (None: no longer).

        Returns whether it was counted already.
        """
        versions = self._first_versions[id.group]
        old_version = versions.pop(id.sample, None)
        if old_version is not None:
            self._forget(old_version)
        if version is not None:
            versions[id.sample] = version
            self._episodes[version] += 1
        return old_version is not None

    def _forget(self, version: Version) -> None:
        self._episodes[version] -= 1
        if not self._episodes[version]:
            del self._episodes[version]

    def any_due(self, training: Version, inherited: Mapping[int, int]) -> bool:
        """Whether an episode in flight is too old for every version after ``training``."""
        limit = self.config.algorithm.staleness.max_staleness
        return any(is_due(version, training, limit, inherited) for version in self._episodes)

    def forget(self, request: int) -> None:
        """Stop counting a group's episodes."""
        for version in self._first_versions.pop(request).values():
            self._forget(version)

    def clear(self) -> None:
        """Stop counting all episodes."""
        self._first_versions.clear()
        self._episodes.clear()


class GroupScheduler:
    """A scheduler that visits the tasks that are not quarantined, in the cursor's order.

    Groups that were in flight at a checkpoint come first.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        ledger: Ledger,
        on_bad_row: Callable[[DataFailure], None],
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.ledger = ledger
        order: Order | None = None
        if isinstance(config.data.order, Component):
            order = config.data.order.build()
        tiers = [order.tier(task) for task in dataset] if order else ()
        self.cursor = TaskCursor(len(dataset), config.seed, config.data.shuffle, tiers)
        self.next_number = 0
        self.reissue: list[GroupRequest] = []
        """Groups that were in flight when their run ended.

        They will be played again under their numbers.
        """
        self.one_round = True
        """Whether ``reissue`` is a round that had begun, without staleness.

        It is then finished as it began; otherwise its groups fill new rounds.
        """
        self.issued_this_step = 0
        self.quarantined: set[str] = set()
        """Ids of the tasks that are not played again in this run."""
        self._replaced_groups = 0
        self._on_bad_row = on_bad_row

    def admissible(self, *, ready: int, in_flight: int, acceptance: float) -> int:
        """How many groups may start now.

        ``ready``: trajectories that wait for training or are in it. ``in_flight``: groups in
        flight; of their trajectories the share ``acceptance`` will survive.
        """
        algorithm = self.config.algorithm
        max_staleness = algorithm.staleness.max_staleness
        if algorithm.synchronous and in_flight:
            return 0
        if algorithm.synchronous and self.one_round and self.reissue:
            return len(self.reissue)
        playing = in_flight * algorithm.group_size
        slots = open_slots(max_staleness, algorithm.target, ready, playing, acceptance)
        groups = slots / (algorithm.group_size * acceptance)
        budget = max(0, (max_staleness + 1) * self.budget - self.issued_this_step)
        # These were counted in ``issued_this_step`` when they were first issued.
        budget += len(self.reissue)
        if not algorithm.synchronous:
            # A group beyond the bound would only grow stale.
            return min(math.floor(groups), budget)
        if not slots:
            return 0
        return min(algorithm.filtering.groups_per_generation or math.ceil(groups), budget)

    @property
    def budget(self) -> int:
        """The number of groups that one step may spend."""
        algorithm = self.config.algorithm
        filtering = algorithm.filtering
        groups_per_batch = filtering.groups_per_generation or algorithm.groups_per_step
        return filtering.max_generation_batches * groups_per_batch

    @property
    def spent(self) -> bool:
        """Whether no new group may begin for this step."""
        return self.exhausted or self.issued_this_step >= self.budget

    def issue(self) -> GroupRequest | None:
        """Return the next group, which is then in flight in the ledger.

        None when every task is quarantined.
        """
        request = self._next()
        if request is not None:
            self.ledger.issue(request.ids(self.config.algorithm.group_size))
        return request

    def _next(self) -> GroupRequest | None:
        if self.reissue:
            request = self.reissue.pop(0)
            if self.ledger.may_issue(request.ids(self.config.algorithm.group_size)):
                return request
            # The group size has grown, so that not all of its ids may be issued.
            self.next_number += 1
            return replace(request, number=self.next_number)
        while not self.exhausted:
            index = self.cursor.next()
            if self.dataset[index].id not in self.quarantined:
                self.next_number += 1
                self.issued_this_step += 1
                return GroupRequest(self.next_number, index, self.cursor.visits(index))
        return None

    def again(self, issues: Iterable[GroupRequest]) -> None:
        """Issue groups again that were in flight and were lost, oldest first."""
        self.reissue = sorted([*self.reissue, *issues], key=lambda request: request.number)

    def make_up_for(self, trajectories: int) -> None:
        """Exempt the groups that replace lost trajectories from the step's budget.

        A step has at most as many such groups as its budget.
        """
        groups = math.ceil(trajectories / self.config.algorithm.group_size)
        groups = min(groups, self.budget - self._replaced_groups)
        self._replaced_groups += groups
        self.issued_this_step -= groups

    def begin_step(self) -> None:
        """Begin the budget of the next step, after the groups of a step were taken."""
        self.issued_this_step = 0
        self._replaced_groups = 0

    def quarantine(self, task: Task, path: str, reason: str) -> bool:
        """Never issue this task again, and record the reason. Returns whether that is new."""
        if task.id in self.quarantined:
            return False
        self.quarantined.add(task.id)
        message = f"{path}: {reason}" if path else reason
        self._on_bad_row(DataFailure(self.dataset.where(task), message))
        return True

    @property
    def exhausted(self) -> bool:
        """Whether every task is quarantined."""
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
        """The tasks that log-prob check and self-test may play, in the dataset's order.

        Raises ConfigError when all tasks are quarantined.
        """
        if self.exhausted:
            raise self.no_task()
        return [task for task in self.dataset if task.id not in self.quarantined]

    def state(self, in_flight: Iterable[GroupRequest]) -> dict[str, Any]:
        """The state as plain values. Groups ``in_flight`` will be issued again first."""
        requests = [astuple(request) for request in (*self.reissue, *in_flight)]
        is_synchronous = self.config.algorithm.synchronous
        return {
            "cursor": self.cursor.state(),
            "next_number": self.next_number,
            "reissue": [list(request) for request in sorted(requests)],
            "one_round": is_synchronous and (self.one_round or not self.reissue),
            "issued_this_step": self.issued_this_step,
            "replaced_groups": self._replaced_groups,
            "quarantined": sorted(self.quarantined),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises CheckpointError when data, seed or shuffling have changed.
        """
        state = with_present_keys(state)
        self.cursor.restore(state["cursor"])
        self.next_number = state["next_number"]
        self.reissue = [GroupRequest(*request) for request in state["reissue"]]
        self.one_round = state["one_round"]
        self.issued_this_step = state["issued_this_step"]
        self._replaced_groups = state["replaced_groups"]
        self.quarantined = set(state["quarantined"])


_FULL_CACHE_SHARE = 0.9
"""The used share of an engine's cache at which waiting requests mean too many episodes."""
_LIMIT_GROWTH = 1.25
"""The factor of the limit at each observation, while every admitted episode fits."""


class ConcurrencyLimit:
    """The number of episodes that play at once.

    It is ``limit`` until an engine's cache is full and requests wait, then the number that fits.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.inside = 0
        self.metrics: dict[str, float] = {}
        """The metrics of the engines' last answers."""
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def room(self, episodes: int = 1) -> AsyncIterator[None]:
        """Admit ``episodes`` together when there is room for one of them, in order of arrival."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, episodes))
        self._admit_waiting()
        try:
            await turn
            yield
        finally:
            # A turn that was granted at the moment of the cancellation is not cancelled: its room
            # is given back.
            if turn.cancelled():
                self._waiting = deque(entry for entry in self._waiting if entry[0] is not turn)
            else:
                self.inside -= episodes
            self._admit_waiting()

    def observe(self, engines: Sequence[EngineHealth]) -> None:
        """Adapt the limit to the engines' load.

        It falls to the number of episodes that they decode, and grows by a factor.
        """
        caches = [engine.cache for engine in engines if engine.cache is not None]
        if not caches:
            return
        running = sum(engine.running for engine in engines)
        waiting = sum(engine.waiting for engine in engines)
        self.metrics = {"rollout/cache": max(caches), "rollout/waiting": float(waiting)}
        is_full = max(caches) >= _FULL_CACHE_SHARE
        if waiting and is_full:
            decoded = math.floor(self.inside * running / (running + waiting))
            # At least one episode for each engine, or some would get nothing to decode.
            self.limit = max(len(caches), decoded)
        elif not waiting and not is_full and self.inside >= self.limit:
            self.limit = math.ceil(self.limit * _LIMIT_GROWTH)
            self._admit_waiting()
        if self.limit < math.inf:
            self.metrics["rollout/in_flight_limit"] = float(self.limit)

    def _admit_waiting(self) -> None:
        while self._waiting and self.inside < self.limit:
            turn, episodes = self._waiting.popleft()
            # Cancelled turns stay in the queue until their own coroutine runs.
            if not turn.done():
                self.inside += episodes
                turn.set_result(None)
