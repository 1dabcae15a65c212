"""Whether failures of episodes count against the task, the environment actor, or neither.

- The task: it failed on two actors (or nodes) while other episodes went well, or on actors where
  nothing else fails. It is quarantined after ``TASK_FAILURES`` such groups in a row, or when
  ``environment.attempts`` episodes of one group hung.
- The actor: episodes of ``ACTOR_FAILURES`` different tasks failed on it in a row, while others went
  well. It is replaced.
- Neither: nothing goes well, so the environment is broken. The generation budget ends the run and
  gives the reason.

An actor is counted by its node when the pool is on several, else by its slot; in a pool of one by
its process.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rayloop.core.failures import Cause, Failure, Scope
from rayloop.run.sections import EnvironmentSettings

TASK_FAILURES = 2
"""Groups in a row: one may be chance, and each further one costs a group."""
ACTOR_FAILURES = 3
"""Different tasks in a row: two are common among bad rows, three on one actor alone are not."""


@dataclass
class _GroupFailures:
    """The failures of a group that is being played.

    ``began``: the number of successes at its start; ``hung``: a place per hung episode.
    """

    began: int
    places: set[int | str] = field(default_factory=set)
    workers: set[int] = field(default_factory=set)
    hung: list[int | str] = field(default_factory=list)


@dataclass
class _Service:
    """An actor's process.

    ``began``: the number of successes when it began; ``served``: whether an episode went well on
    it; ``failing``: the tasks that failed on it since.
    """

    began: int
    served: bool = False
    failing: set[str] = field(default_factory=set)


class FailureHistory:
    """The failures of a run's episodes.

    ``groups_failed`` counts the groups in which a task failed since it last went well
    (checkpointed).
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self.groups_failed: Counter[str] = Counter()
        self._successes = 0
        self._groups: dict[int, _GroupFailures] = {}
        self._services: dict[int, _Service] = {}

    def begins(self, group: int, worker: int) -> None:
        """An episode of ``group`` begins on the process with serial number ``worker``."""
        self._groups.setdefault(group, _GroupFailures(self._successes))
        self._services.setdefault(worker, _Service(self._successes))

    def succeeded(self, worker: int) -> None:
        """An episode went well on the process ``worker``."""
        self._successes += 1
        service = self._services.setdefault(worker, _Service(self._successes))
        service.served = True
        service.failing.clear()

    def failed(self, group: int, task: str, worker: int, place: int | str, failure: Failure) -> str:
        """An episode's environment failed at ``place``, the node or the slot of its actor.

        Returns why to replace it, or "".
        """
        if self._settings.actors == 1:
            place = worker
        failures = self._groups[group]
        failures.places.add(place)
        failures.workers.add(worker)
        if failure.cause is Cause.HUNG:
            is_contained = failure.scope is not Scope.PROCESS
            if is_contained and self._settings.actors == 1:
                # The only actor plays each episode in another process, which is another place.
                failures.hung.append(-1 - len(failures.hung))
            else:
                failures.hung.append(place)
            if not is_contained:
                # The actor's process ends anyway.
                return ""

        service = self._services[worker]
        service.failing.add(task)
        # Without a success anywhere since it began, the environment is broken, and not this actor.
        if len(service.failing) < ACTOR_FAILURES or self._successes == service.began:
            return ""
        return (
            f"episodes of {len(service.failing)} different tasks failed on it one after the other,"
            f" last: {failure.why}"
        )

    def clear(self) -> None:
        """Forget in how many groups tasks failed."""
        self.groups_failed.clear()

    def state(self) -> dict[str, int]:
        """The part that outlives the run's processes, for the checkpoint."""
        return dict(self.groups_failed)

    def restore(self, groups_failed: Mapping[str, int]) -> None:
        """Restore a checkpoint. Its groups' numbers are given to other tasks."""
        self.groups_failed = Counter(groups_failed)
        self._groups.clear()

    def forget(self, group: int) -> None:
        """The group has ended, and its number may be used again."""
        self._groups.pop(group, None)

    def hangs(self, group: int) -> str:
        """Why no further episode of this group should be played, or "".

        The reason is that too many of them hung, in more than one place.
        """
        hung = self._groups[group].hung if group in self._groups else []
        if len(hung) < max(self._settings.attempts, 2) or len(set(hung)) < 2:
            return ""
        return f"{len(hung)} episodes of its group hung"

    def ended(self, group: int, task: str, failed: bool) -> str:
        """The group is finished; ``failed``: the environment of some member.

        Returns why to quarantine the task, or "".
        """
        hangs = self.hangs(group)
        failures = self._groups.pop(group, _GroupFailures(self._successes))
        if not failed:
            # A Counter does not raise for a key that it lacks.
            del self.groups_failed[task]
            return ""

        others_went_well = self._successes > failures.began
        on_enough_places = len(failures.places) >= min(2, self._settings.actors)
        if not on_enough_places or not (others_went_well or self._only_this(failures, task)):
            return ""
        # The task is to blame, so its failures must not count against the actors.
        if others_went_well:
            for service in self._services.values():
                service.failing.discard(task)

        self.groups_failed[task] += 1
        if self.groups_failed[task] >= TASK_FAILURES:
            hangs = hangs or f"its environment failed in {self.groups_failed[task]} groups"
        return hangs

    def _only_this(self, failures: _GroupFailures, task: str) -> bool:
        """Whether only this task fails on the actors on which its group failed.

        The actors must have served other tasks.
        """
        services = [self._services[worker] for worker in failures.workers]
        return all(service.served and service.failing <= {task} for service in services)
