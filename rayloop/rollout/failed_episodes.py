"""The failures of a run's episodes, by which ``verdict.py`` decides who is to blame.

- The task: it failed on two actors (or nodes) while other episodes succeeded, or on actors where
  nothing else fails. It is quarantined after ``TASK_FAILURES`` such groups in a row, or when
  ``environment.attempts`` episodes of one group hung.
- The actor: episodes of ``ACTOR_FAILURES`` different tasks failed on it in a row, while others
  succeeded. It is replaced.
- Neither: every episode fails, so the environment is broken. The generation budget ends the run and
  gives the reason.

An actor is counted by its node when the pool is on several, else by its slot; in a pool of one by
its process.
"""

from collections import Counter
from collections.abc import Mapping

from rayloop.core.failures import Cause, Failure, Scope
from rayloop.grpo.lost_episodes import LostEpisodes
from rayloop.rollout.verdict import (
    ActorProcess,
    GroupFailures,
    blames_task,
    quarantine_reason,
    too_many_hung,
)
from rayloop.run.sections import EnvironmentSettings


class FailureHistory:
    """The failures of a run's episodes.

    ``groups_failed`` counts the groups in which a task failed since it last succeeded
    (checkpointed).
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self.groups_failed: Counter[str] = Counter()
        self.successes = 0
        self._groups: dict[int, GroupFailures] = {}
        self.processes: dict[int, ActorProcess] = {}
        self.lost_episodes = LostEpisodes()
        """What infrastructure took of them, for metrics and an alarm."""

    def begins(self, group: int, worker: int) -> None:
        """An episode of ``group`` begins on the process with serial number ``worker``."""
        self._groups.setdefault(group, GroupFailures(self.successes))
        self.processes.setdefault(worker, ActorProcess(self.successes))

    def succeeded(self, worker: int) -> None:
        """An episode succeeded on the process ``worker``."""
        self.successes += 1
        process = self.processes.setdefault(worker, ActorProcess(self.successes))
        process.served = True
        process.failing.clear()

    def failed(
        self, group: int, task: str, worker: int, place: int | str, failure: Failure
    ) -> None:
        """An episode's environment failed at ``place``, the node or the slot of its actor."""
        if self._settings.actors == 1:
            place = worker
        failures = self._groups[group]
        failures.places.add(place)
        failures.workers.add(worker)
        is_contained = failure.scope is not Scope.PROCESS
        if failure.cause is Cause.HUNG:
            if is_contained and self._settings.actors == 1:
                # The only actor plays each episode in another process, which is another place.
                place = -1 - len(failures.hung)
            failures.hung.append(place)
        # Otherwise the actor's process ends anyway.
        if is_contained:
            self.processes[worker].failing.add(task)

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
        return too_many_hung(hung, self._settings.attempts)

    def ended(self, group: int, task: str, failed: bool) -> str:
        """The group is finished; ``failed``: the environment of some member.

        Returns why to quarantine the task, or "".
        """
        failures = self._groups.pop(group, GroupFailures(self.successes))
        if not failed:
            # A Counter does not raise for a key that it lacks.
            del self.groups_failed[task]
            return ""
        others_went_well = self.successes > failures.began
        actors = self._settings.actors
        if not blames_task(task, failures, self.processes, others_went_well, actors):
            return ""
        if others_went_well:
            # The failures of a task that is to blame must not count against the actors.
            for process in self.processes.values():
                process.failing.discard(task)
        self.groups_failed[task] += 1
        limit = self._settings.attempts
        return quarantine_reason(failures.hung, self.groups_failed[task], limit)
