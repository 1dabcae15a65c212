"""Alarms about slow failures (docs/algorithm.md, section 10).

They watch trajectories without a reward, excluded or flagged ones, episodes that infrastructure
took, log-prob mismatch and a collapsed policy. Fresh samples have equal log-probs in engine and
trainer, unless a weight sync was lost.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, ClassVar

from pydantic import Field

from rayloop.core import incidents
from rayloop.core.events import Emit
from rayloop.core.failures import AlarmStopped, GraderBroken
from rayloop.core.groups import Member, Scored, TrajectoryState, Unscored, UnscoredKind
from rayloop.core.types import TrajectoryId
from rayloop.grpo.collapse import LENGTH, Alarm, Collapse, CollapseSettings, Limit
from rayloop.grpo.lost_episodes import LostEpisodes
from rayloop.grpo.sight import Sight

DRIFT = "actor/logprob_mismatch_mean/lag_0"
"""Mean |trainer's log-prob - engine's| of samples of the present weights.

Asynchrony does not change it.
"""

WINDOW_TRAJECTORIES = 512
"""Trajectories of a share: the last eight steps of 8 x 8, or half a step of 128 x 8."""
LEAST_AFFECTED = 8
"""Affected trajectories from which a share can be an alarm: fewer may be chance."""
CORRELATION_LIMIT = 0.3
"""Limit of the correlation of a missing reward with length or source.

Over 512 trajectories 0.3 is 7 standard errors from 0.
"""
DRIFT_STEPS = 3
"""Steps over which the log-prob mismatch is averaged."""
UNSEEN_STEPS = 10
"""Steps in a row without samples of the present weights, after which probes are played.

A trainer that is slower than generation has such steps.
"""


_GRADERS = ("grader_error", "grader_timeout", "judge_invalid", "judge_changed", "invalid_component")
FLAGS = {"*": Limit(warn=0.9), **{name: Limit(warn=0.05) for name in _GRADERS}}


class AlarmSettings(CollapseSettings):
    """Limits at which a run warns, and ends.

    Shares (0 to 1) are of the last 512 trajectories, and count from eight affected ones; shares of
    groups are means of five steps.
    """

    unscored: Limit = Limit(warn=0.05)
    """Trajectories without a reward: not played, timed out, grader failed, payload lost.

    Lower ``warn`` when every one matters.
    """
    excluded: Limit = Limit(warn=0.25)
    """Trajectories left out for such a reason, or since few of their group had a reward.

    Lower ``warn`` when every one matters.
    """
    flags: ClassVar[dict[str, Limit]] = FLAGS
    """By name of a flag, of the scored trajectories; ``*`` is for flags that are not named."""
    infrastructure: ClassVar[Limit] = Limit(warn=0.1)
    """The share of the last 512 episodes that infrastructure took; each attempt counts.

    ``unscored`` sees only those of which no further attempt succeeded.
    """
    logprobs: Limit = Limit()
    """Mean |log-prob difference| of trainer and engine, averaged over three steps.

    It is over samples of the present weights (lag 0). After ten steps without such samples, and
    every ten steps with ``policy.engine.lora.dropout``, four tasks are played for it. Without
    ``warn``: 1e-3 in float32, 0.1 in bfloat16.
    """
    sight: float = Field(0.01, ge=0, le=1)
    """Tokens that the trainer scores again, with their picture and with another, as a share of all.

    Of single turns these are half as many turns, 0.5 %; of longer episodes, which are scored up to
    the turn, fewer. Every fifth step has the turns of five. The other picture is another task's of
    the same rank. An alarm says when it has made a difference, and makes none any more. Why a key:
    steps of a few dozen trajectories need a larger share to notice it soon; 0 turns it off.
    """


@dataclass(frozen=True)
class _Finished:
    """The facts about a finished trajectory that alarms need."""

    id: TrajectoryId
    source: str
    length: int
    unscored: Unscored | None
    excluded: bool
    flags: tuple[str, ...]


class Alarms:
    """Watches a run for slow failures, emits events and ends the run at a ``stop`` limit.

    Call ``groups`` with the members of finished groups, ``lost`` with trajectories that are lost
    later, ``step`` with the trainer's metrics of a step, ``recorded`` with all metrics of a step.

    Emits an ``Alarm`` when a limit is passed (again only after the value was back), a
    ``GraderError`` with the first traceback, and an ``Unscored`` for the first trajectory of each
    kind. All methods but ``lost`` raise AlarmStopped; ``groups`` also raises GraderBroken when the
    reward raised on every trajectory of the first group (of two or more) that reached it.
    """

    def __init__(
        self,
        settings: AlarmSettings,
        drift: float,
        reward: str,
        emit: Emit,
        *,
        dropout: bool = False,
        compares_states: bool = False,
        lost_episodes: LostEpisodes | None = None,
    ) -> None:
        """``drift``: log-prob mismatch in nats that warns.

        ``reward``: the dotted name of the reward, for messages. ``dropout``: the trainer's
        log-probs are with dropout, so that their mismatch shows no lost sync; only fresh episodes
        are compared. ``compares_states``: as for ``Collapse``. ``lost_episodes`` is filled by the
        runner of the episodes.
        """
        self.settings = settings
        self._reward = reward
        self._emit = emit
        self._dropout = dropout
        self._drift_limit = _drift_limit(settings.logprobs, drift)
        self._finished: deque[_Finished] = deque(maxlen=WINDOW_TRAJECTORIES)
        self._drift: deque[float] = deque(maxlen=DRIFT_STEPS)
        self._steps_without_samples = 0
        self._active: set[str] = set()
        self.lost_episodes = lost_episodes or LostEpisodes()
        self.collapse = Collapse(settings, compares_states=compares_states)
        self.sight = Sight()
        self._kinds: set[UnscoredKind] = set()
        # Tracebacks of the first trajectory on which the reward raised,
        # and of the first for which it returned no number.
        self._raised_trace = ""
        self._returned_trace = ""
        self.graded = False
        """Whether a group has reached the grader.

        A checkpoint keeps it: only the run's first group is checked.
        """
        self._raised: list[bool] = []
        self._raised_held_out: list[bool] = []

    def groups(self, members: Iterable[Member]) -> None:
        """Count the members of finished groups. Raises AlarmStopped, GraderBroken."""
        # A replayed success is counted already, when it was played.
        fresh = [member for member in members if not member.replayed]
        for member in fresh:
            self._first_of_its_kind(member)
            unscored = member.outcome if isinstance(member.outcome, Unscored) else None
            excluded = member.status is not None and member.status.state is TrajectoryState.EXCLUDED
            flags = member.outcome.flags if isinstance(member.outcome, Scored) else ()
            self._finished.append(
                _Finished(
                    id=member.summary.id,
                    source=member.summary.source,
                    length=member.summary.length,
                    unscored=unscored,
                    excluded=excluded,
                    flags=tuple(set(flags)),
                )
            )
        self._first_group(fresh)
        self._raise_or_emit("shares", {**self._shares(), **self._correlations()})

    def state(self) -> dict[str, Any]:
        """Returns plain values for the checkpoint. Averages and active alarms are not in it."""
        return {
            "graded": self.graded,
            "sight": list(self.sight.values),
            "first": {name: list(values) for name, values in self.collapse.first.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add the values of ``state`` to the values of this process."""
        self.graded |= state["graded"]
        # Older checkpoints have no scored turns.
        self.sight.values.extendleft(reversed(state.get("sight", ())))
        # Older checkpoints only have the lengths, under another name.
        older = {LENGTH: state.get("first_lengths", ())}
        first = state.get("first", older)
        self.collapse.first |= {name: list(values) for name, values in first.items()}

    def held_out(self, member: Member) -> None:
        """Emit the first unscored held-out answer of a kind. Held-out answers count in no share."""
        self._first_of_its_kind(member)
        if member.summary.length:
            self._raised_held_out.append(_grader_raised(member))

    def evaluated(self, first: bool) -> None:
        """Call it after an evaluation.

        Raises GraderBroken when the reward raised on all answers of the ``first`` one.
        """
        raised = self._raised_held_out
        self._raised_held_out = []
        if first:
            self._stop_if_all(raised, "answers to held-out rows")

    def lost(self, ids: Collection[TrajectoryId]) -> None:
        """Count lost scored trajectories as excluded, from the next finished group on.

        Raises nothing: a checkpoint may call it.
        """
        finished = (
            replace(trajectory, excluded=True) if trajectory.id in ids else trajectory
            for trajectory in self._finished
        )
        self._finished = deque(finished, maxlen=WINDOW_TRAJECTORIES)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Take the log-prob mismatch of a step's samples of lag 0, unless dropout is part of it."""
        self._steps_without_samples += 1
        if DRIFT in metrics and not self._dropout:
            self.compared(metrics[DRIFT])

    def looked(self, changes: Iterable[float]) -> None:
        """Take ``rayloop.grpo.sight.of_screens`` of a step."""
        self._raise_or_emit("sight", self.sight.step(changes))

    def recorded(self, metrics: Mapping[str, float]) -> None:
        """Check the recorded metrics of a step for a collapse. Raises AlarmStopped."""
        self._raise_or_emit("collapse", self.collapse.step(metrics))

    def collapsed(self, learning_rate: float) -> str:
        """Emits an alarm if the policy of a run that ends without gradients has collapsed.

        Returns a sentence on entropy and learning rate, or "".
        """
        cause = self.collapse.cause(learning_rate)
        if cause and "collapse entropy" not in self._active:
            self._emit(incidents.Alarm("entropy", why=cause))
        return cause

    @property
    def unseen(self) -> bool:
        """Whether fresh episodes must be ``compared``.

        True when the last ``UNSEEN_STEPS`` steps had no samples of the present weights.
        """
        return self._steps_without_samples >= UNSEEN_STEPS

    def compared(self, difference: float | None) -> None:
        """Take the mean |trainer's log-prob - engine's| of samples of the present weights.

        It is in nats; None: the step had no such samples.
        """
        self._steps_without_samples = 0
        if difference is None:
            return
        self._drift.append(difference)
        # A mean of fewer steps would raise an alarm for one odd batch.
        if len(self._drift) < DRIFT_STEPS:
            return
        value = mean(self._drift)
        text = (
            f"trainer and engine differ by {value:.2e} nats per token of the same weights, mean of"
            f" {len(self._drift)} steps: a weight sync did not arrive, or dtype, attention or"
            " sampling of the two differ"
        )
        self._raise_or_emit("logprobs", {"logprobs": (value, self._drift_limit, text)})

    def _first_of_its_kind(self, member: Member) -> None:
        outcome = member.outcome
        if isinstance(outcome, Unscored) and outcome.kind is UnscoredKind.INVALID_REWARD:
            self._returned_trace = self._returned_trace or outcome.trace
        elif outcome.trace and not self._raised_trace:
            self._raised_trace = outcome.trace
            self._emit(grader_error(member))
        if isinstance(outcome, Unscored) and outcome.kind not in self._kinds:
            self._kinds.add(outcome.kind)
            trajectory = str(member.summary.id)
            task = member.summary.task_id
            self._emit(incidents.UnscoredEvent(trajectory, task, str(outcome.kind), outcome.reason))

    def _first_group(self, members: Sequence[Member]) -> None:
        if self.graded:
            return
        self._raised += [_grader_raised(member) for member in members if member.summary.length]
        # A single failure may be due to its task.
        if len(self._raised) < 2:
            return
        self.graded = True
        self._stop_if_all(self._raised, "trajectories that reached it first")

    def _stop_if_all(self, raised: Sequence[bool], answers: str) -> None:
        if len(raised) < 2 or not all(raised):
            return
        reason = _last_line(self._raised_trace or self._returned_trace or "no traceback")
        if self._returned_trace and not self._raised_trace:
            failure = "returned no number"
            source = ""
        else:
            failure = "raised"
            source = " (the traceback: grader_error in events.jsonl)"
        raise GraderBroken(
            f"the reward {self._reward} {failure} on each of the {len(raised)} {answers}:"
            f" {reason}{source}. Repair it, and look at it with `python -m rayloop try CONFIG`: a"
            " dataset column that is missing, or an answer of a form that it does not expect,"
            " are the usual reasons. When only what the policy writes can break it,"
            " reward.on_error=0.0 gives such answers the failing value, and the run continues."
        )

    def _shares(self) -> dict[str, Alarm]:
        total = len(self._finished)
        alarms: dict[str, Alarm] = {}
        unscored = [t.unscored for t in self._finished if t.unscored is not None]
        if unscored:
            text = (
                f"{len(unscored)} of the last {total} trajectories have no reward"
                f" ({', '.join(reasons(unscored))})"
            )
            alarms["unscored"] = (_share(len(unscored), total), self.settings.unscored, text)
        excluded = sum(trajectory.excluded for trajectory in self._finished)
        if excluded:
            text = f"{excluded} of the last {total} trajectories were excluded from training"
            alarms["excluded"] = (_share(excluded, total), self.settings.excluded, text)
        lost, ended = self.lost_episodes.recent
        if lost:
            share = _share(lost, ended)
            text = self.lost_episodes.sentence()
            alarms["infrastructure"] = (share, self.settings.infrastructure, text)
        scored = total - len(unscored)
        flags: Counter[str] = Counter()
        for trajectory in self._finished:
            flags.update(trajectory.flags)
        for name, count in flags.items():
            limit = self.settings.flags.get(name) or self.settings.flags["*"]
            text = f"{count} of the last {scored} scored trajectories carry the flag {name}"
            alarms[f"flags.{name}"] = (_share(count, scored), limit, text)
        return alarms

    def _correlations(self) -> dict[str, Alarm]:
        """Over the trajectories that were played; one that failed earlier has no length."""
        played = [trajectory for trajectory in self._finished if trajectory.length]
        unscored = [float(trajectory.unscored is not None) for trajectory in played]
        # A correlation with fewer would be chance.
        if sum(unscored) < LEAST_AFFECTED:
            return {}
        limit = Limit(warn=CORRELATION_LIMIT)
        alarms: dict[str, Alarm] = {}
        r = correlation(unscored, [float(trajectory.length) for trajectory in played])
        size = "longer" if r > 0 else "shorter"
        text = f"{size} trajectories have no reward more often (r = {r:.2f})"
        alarms["length"] = (min(abs(r), 1.0), limit, text)
        for source in dict.fromkeys(trajectory.source for trajectory in played):
            from_source = [float(trajectory.source == source) for trajectory in played]
            r = correlation(unscored, from_source)
            name = source or "no source"
            text = f"trajectories of {name} have no reward more often (r = {r:.2f})"
            alarms[f"source {source}"] = (min(r, 1.0), limit, text)
        return alarms

    def _raise_or_emit(self, kind: str, alarms: Mapping[str, Alarm]) -> None:
        warnings = {
            f"{kind} {name}" for name, (value, limit, _) in alarms.items() if limit.warns(value)
        }
        for name, (value, limit, text) in alarms.items():
            if limit.stops(value):
                raise AlarmStopped(f"{text}; alarms.{name}.stop is {limit.stop:g}")
            if f"{kind} {name}" in warnings - self._active:
                self._emit(incidents.Alarm(name, why=text))
        # A name of this kind that does not warn now may warn again once it comes back.
        other_kinds = {name for name in self._active if not name.startswith(f"{kind} ")}
        self._active = other_kinds | warnings


def _drift_limit(settings: Limit, drift: float) -> Limit:
    """The limits of the log-prob mismatch; ``drift`` (nats) warns where the settings do not say."""
    if settings.warn is not None:
        return settings
    # A limit that stops must not be lower than the one that warns.
    warn = drift if settings.stop is None else min(drift, settings.stop)
    return Limit(warn=warn, stop=settings.stop)


def _share(count: int, total: int) -> float:
    return count / total if count >= LEAST_AFFECTED else 0.0


def reasons(lost: Iterable[Unscored], most: int = 3) -> list[str]:
    """Returns the most frequent kinds, each with one reason.

    For example ``invalid_reward 8: the reward source returned None, ...``.
    """
    outcomes = list(lost)
    # The order is reversed, so that the first reason of a kind stays.
    examples = {outcome.kind: outcome.reason for outcome in reversed(outcomes) if outcome.reason}
    kinds = Counter(outcome.kind for outcome in outcomes)
    sentences: list[str] = []
    for kind, count in kinds.most_common(most):
        example = f": {examples[kind]}" if kind in examples else ""
        sentences.append(f"{kind} {count}{example}")
    return sentences


def _grader_raised(member: Member) -> bool:
    """Whether the reward raised or returned no number.

    False with ``reward.on_error: fail``, where the flag has an alarm.
    """
    outcome = member.outcome
    is_failure_of_reward = isinstance(outcome, Unscored) and outcome.kind in (
        UnscoredKind.GRADER_ERROR,
        UnscoredKind.INVALID_REWARD,
    )
    return is_failure_of_reward and bool(outcome.trace)


def grader_error(member: Member) -> incidents.GraderError:
    """Returns the event for a trajectory on which the reward raised."""
    trace = member.outcome.trace
    return incidents.GraderError(
        str(member.summary.id), member.summary.task_id, _last_line(trace), trace
    )


def _last_line(trace: str) -> str:
    return trace.rstrip().splitlines()[-1]


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns Pearson's coefficient, 0 when one of the two does not vary."""
    mean_a = sum(a) / len(a)
    mean_b = sum(b) / len(b)
    product = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    spread = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return product / math.sqrt(spread) if spread > 0 else 0.0
