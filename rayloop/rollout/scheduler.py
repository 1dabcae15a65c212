"""What starts next: which task, under which number, and whether the staleness bound and the step's budget leave room for it.

With ``max_staleness: 0`` groups start in rounds, only while a step waits for them; a round ends before the next begins, so
nothing in flight survives a weight sync. Otherwise groups start whenever the staleness bound leaves room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, replace
from typing import Any

from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.ledger import Ledger
from rayloop.core.types import Task
from rayloop.data.cursor import TaskCursor
from rayloop.data.dataset import Dataset
from rayloop.grpo.staleness import open_slots
from rayloop.rollout.group_rollout import GroupRequest
from rayloop.run.config import RunConfig
from rayloop.run.order import Order


class GroupScheduler:
    """Visits the tasks that are not quarantined, in the cursor's order; what was in flight at a checkpoint comes first."""

    def __init__(self, config: RunConfig, dataset: Dataset, ledger: Ledger, on_bad_row: Callable[[DataFailure], None]) -> None:
        self.config, self.dataset, self.ledger = config, dataset, ledger
        order: Order | None = config.data.order.build() if isinstance(config.data.order, Component) else None
        tiers = [order.tier(task) for task in dataset] if order else ()
        self.cursor = TaskCursor(len(dataset), config.seed, config.data.shuffle, tiers)
        self.next_number = 0
        self.reissue: list[GroupRequest] = []
        """Groups that were in flight when their run ended, to be played again under their numbers."""
        self.one_round = True
        """Without staleness: what is issued again was one round, which is finished as it began; else it fills rounds of its own."""
        self.issued_this_step = 0
        self.quarantined: set[str] = set()
        self.bad: DataFailure | None = None
        """Why the task that was quarantined last was."""
        self._made_up_for = 0
        self._on_bad_row = on_bad_row

    def admissible(self, *, ready: int, in_flight: int, acceptance: float) -> int:
        """How many groups may start now. ``ready``: trajectories that wait to be trained, or are just being trained;
        ``in_flight``: groups that are being played, of whose trajectories the share ``acceptance`` will survive."""
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
        return c.filtering.max_generation_batches * (c.filtering.groups_per_generation or c.groups_per_step)

    @property
    def spent(self) -> bool:
        """Nothing new may begin for this step."""
        return self.exhausted or self.issued_this_step >= self.budget

    def issue(self) -> GroupRequest | None:
        """The next group, which is now in flight in the ledger. None when every task is quarantined."""
        request = self._next()
        if request is not None:
            self.ledger.issue(request.ids(self.config.algorithm.group_size))
        return request

    def _next(self) -> GroupRequest | None:
        if self.reissue:
            request = self.reissue.pop(0)  # counted in ``issued_this_step`` when it was first issued
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
        """So many were lost after they were scored: groups for them cost the step nothing, as often as its budget has groups."""
        groups = math.ceil(trajectories / self.config.algorithm.group_size)
        again = min(groups, self.budget - self._made_up_for)
        self._made_up_for += again
        self.issued_this_step -= again

    def begin_step(self) -> None:
        """The groups of a step were taken: the next one has its own budget."""
        self.issued_this_step = self._made_up_for = 0

    # Tasks that fail -----------------------------------------------------------------------------------------------

    def quarantine(self, task: Task, path: str, reason: str) -> bool:
        """Never issue this task again, and write down why. Returns whether that is new."""
        if task.id in self.quarantined:
            return False
        self.quarantined.add(task.id)
        self.bad = DataFailure(self.dataset.where(task), f"{path}: {reason}" if path else reason)
        self._on_bad_row(self.bad)
        return True

    @property
    def exhausted(self) -> bool:
        """Every task is quarantined."""
        return len(self.quarantined) >= len(self.dataset) and all(task.id in self.quarantined for task in self.dataset)

    def no_task(self) -> ConfigError:
        """The error of a run whose tasks are all quarantined."""
        return ConfigError(
            f"data.train: every one of the {len(self.dataset)} tasks is quarantined; see quarantine.jsonl. If the rows are good "
            "and what they need was broken, repair it and run again with checkpoint.resume=runs/NAME/checkpoints/step_N"
        )

    def probe_tasks(self) -> list[Task]:
        """Tasks that log-prob check and self-test may play, in the dataset's order. Raises ConfigError when there is none."""
        if self.exhausted:
            raise self.no_task()
        return [task for task in self.dataset if task.id not in self.quarantined]

    # The checkpoint ------------------------------------------------------------------------------------------------

    def state(self, in_flight: Iterable[GroupRequest]) -> dict[str, Any]:
        """Plain values. What is ``in_flight`` will be issued again, before anything else."""
        again, playing = [astuple(request) for request in self.reissue], [astuple(request) for request in in_flight]
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
        """Go on where ``state`` was taken. Raises CheckpointError when data, seed or shuffling have changed."""
        self.cursor.restore(state["cursor"])
        self.next_number = state["next_number"]
        self.reissue = [GroupRequest(*request) for request in state["reissue"]]
        self.one_round = state["one_round"]
        self.issued_this_step, self._made_up_for = state["issued_this_step"], state["made_up_for"]
        self.quarantined = set(state["quarantined"])
