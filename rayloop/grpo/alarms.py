"""Alarms about slow failures: trajectories without a reward, excluded or flagged ones, log-prob
mismatch, a collapsed policy (docs/algorithm.md, section 10). Fresh samples have equal log-probs in
engine and trainer, unless a weight sync was lost.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, ClassVar

from rayloop.core import incidents
from rayloop.core.events import Emit
from rayloop.core.failures import AlarmStopped, GraderBroken
from rayloop.core.groups import Member, Scored, TrajectoryState, Unscored, UnscoredKind
from rayloop.core.types import TrajectoryId
from rayloop.grpo.collapse import LENGTH, Alarm, Collapse, CollapseSettings, Limit

DRIFT = "actor/logprob_mismatch_mean/lag_0"
"""Mean |trainer's log-prob - engine's| of samples of the present weights: asynchrony does not
change it.
"""

WINDOW = 512
"""Trajectories of a share: the last eight steps of 8 x 8, or half a step of 128 x 8."""
LEAST = 8
"""Affected trajectories from which a share can be an alarm: fewer may be chance."""
CORRELATION = 0.3
"""Limit of the correlation of a missing reward with length or source: over 512 trajectories 0.3 is
7 standard errors from 0.
"""
DRIFT_STEPS = 3
"""Steps over which the log-prob mismatch is averaged."""
UNSEEN = 10
"""Steps in a row without samples of the present weights (the trainer is slower), after which probes
are played.
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
    logprobs: Limit = Limit()
    """Mean |log-prob difference| of trainer and engine over samples of the present weights (lag 0),
    averaged over three steps. After ten steps without such samples, and every ten steps with
    ``policy.engine.lora.dropout``, four tasks are played for it. Without ``warn``: 1e-3 in float32,
    0.1 in bfloat16.
    """


@dataclass(frozen=True, slots=True)
class _Seen:
    """A finished trajectory, as far as alarms need it."""

    id: TrajectoryId
    source: str
    length: int
    unscored: Unscored | None
    excluded: bool
    flags: tuple[str, ...]


class Alarms:
    """Call ``groups`` with the members of finished groups, ``lost`` with trajectories that are lost
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
    ) -> None:
        """``drift``: log-prob mismatch in nats that warns.

        ``reward``: the dotted name of the reward, for messages. ``dropout``: the trainer's
        log-probs are with dropout, so that their mismatch shows no lost sync; only fresh episodes
        are compared. ``compares_states``: as for ``Collapse``.
        """
        self.settings, self._reward, self._emit, self._dropout = settings, reward, emit, dropout
        given = settings.logprobs
        # A limit that stops must not be lower than the one that warns.
        warn = (
            min(drift, drift if given.stop is None else given.stop)
            if given.warn is None
            else given.warn
        )
        self._drift_limit = Limit(warn=warn, stop=given.stop)
        self._seen: deque[_Seen] = deque(maxlen=WINDOW)
        self._drift: deque[float] = deque(maxlen=DRIFT_STEPS)
        self._without = 0
        self._active: set[str] = set()
        self.collapse = Collapse(settings, compares_states=compares_states)
        self._kinds: set[UnscoredKind] = set()
        self._trace = self._returned = ""
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
            of = member.summary
            self._seen.append(
                _Seen(of.id, of.source, of.length, unscored, excluded, tuple(set(flags)))
            )
        self._first_group(fresh)
        self._raise_or_emit("shares", {**self._shares(), **self._correlations()})

    def state(self) -> dict[str, Any]:
        """Returns plain values for the checkpoint. Averages and active alarms are not in it."""
        return {
            "graded": self.graded,
            "first": {name: list(values) for name, values in self.collapse.first.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add what ``state`` knows to what this process has seen."""
        self.graded |= state["graded"]
        earlier = {LENGTH: state.get("first_lengths", ())}  # of older checkpoints
        self.collapse.first |= {
            name: list(values) for name, values in state.get("first", earlier).items()
        }

    def held_out(self, member: Member) -> None:
        """Emit the first unscored held-out answer of a kind. Held-out answers count in no share."""
        self._first_of_its_kind(member)
        if member.summary.length:
            self._raised_held_out.append(_grader_raised(member))

    def evaluated(self, first: bool) -> None:
        """Call it after an evaluation.

        Raises GraderBroken when the reward raised on all answers of the ``first`` one.
        """
        raised, self._raised_held_out = self._raised_held_out, []
        if first:
            self._stop_if_all(raised, "answers to held-out rows")

    def lost(self, ids: Collection[TrajectoryId]) -> None:
        """Count lost scored trajectories as excluded, from the next finished group on.

        Raises nothing: a checkpoint may call it.
        """
        seen = (replace(s, excluded=True) if s.id in ids else s for s in self._seen)
        self._seen = deque(seen, maxlen=WINDOW)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Take the log-prob mismatch of a step's samples of lag 0, unless dropout is part of it."""
        self._without += 1
        if DRIFT in metrics and not self._dropout:
            self.compared(metrics[DRIFT])

    def recorded(self, metrics: Mapping[str, float]) -> None:
        """Check the recorded metrics of a step for a collapse. Raises AlarmStopped."""
        self._raise_or_emit("collapse", self.collapse.step(metrics))

    def collapsed(self, learning_rate: float) -> str:
        """For a run that ends without gradients: emits an alarm and returns a sentence on entropy
        and learning rate, or "".
        """
        why = self.collapse.cause(learning_rate)
        if why and "collapse entropy" not in self._active:
            self._emit(incidents.Alarm("entropy", why=why))
        return why

    @property
    def unseen(self) -> bool:
        """Whether fresh episodes must be ``compared``: the last ``UNSEEN`` steps had no samples of
        the present weights.
        """
        return self._without >= UNSEEN

    def compared(self, difference: float | None) -> None:
        """Take the mean |trainer's log-prob - engine's| in nats of samples of the present weights;
        None: no samples.
        """
        self._without = 0
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
        outcome, trajectory, task = member.outcome, str(member.summary.id), member.summary.task_id
        if isinstance(outcome, Unscored) and outcome.kind is UnscoredKind.INVALID_REWARD:
            self._returned = self._returned or outcome.trace
        elif outcome.trace and not self._trace:
            self._trace = outcome.trace
            self._emit(grader_error(member))
        if isinstance(outcome, Unscored) and outcome.kind not in self._kinds:
            self._kinds.add(outcome.kind)
            self._emit(incidents.UnscoredEvent(trajectory, task, str(outcome.kind), outcome.reason))

    def _first_group(self, members: Sequence[Member]) -> None:
        if self.graded:
            return
        self._raised += [_grader_raised(member) for member in members if member.summary.length]
        if len(self._raised) < 2:  # one trajectory is one task's word
            return
        self.graded = True
        self._stop_if_all(self._raised, "trajectories that reached it first")

    def _stop_if_all(self, raised: Sequence[bool], which: str) -> None:
        if len(raised) >= 2 and all(raised):
            why = _last_line(self._trace or self._returned or "no traceback")
            did, where = "raised", " (the traceback: grader_error in events.jsonl)"
            if self._returned and not self._trace:
                did, where = "returned no number", ""
            raise GraderBroken(
                f"the reward {self._reward} {did} on each of the {len(raised)} {which}:"
                f" {why}{where}. Repair it, and look at it with `python -m rayloop try CONFIG`: a"
                " dataset column that is missing, or an answer of a form that it does not expect,"
                " are the usual reasons. When only what the policy writes can break it,"
                " reward.on_error=0.0 gives such answers the failing value, and the run goes on."
            )

    def _shares(self) -> dict[str, Alarm]:
        total, found = len(self._seen), dict[str, Alarm]()
        lost = [seen.unscored for seen in self._seen if seen.unscored is not None]
        if lost:
            text = (
                f"{len(lost)} of the last {total} trajectories have no reward"
                f" ({', '.join(reasons(lost))})"
            )
            found["unscored"] = (self._share(len(lost), total), self.settings.unscored, text)
        if excluded := sum(seen.excluded for seen in self._seen):
            text = f"{excluded} of the last {total} trajectories were excluded from training"
            found["excluded"] = (self._share(excluded, total), self.settings.excluded, text)
        scored = total - len(lost)
        for name, count in Counter(flag for seen in self._seen for flag in seen.flags).items():
            limit = self.settings.flags.get(name) or self.settings.flags["*"]
            text = f"{count} of the last {scored} scored trajectories carry the flag {name}"
            found[f"flags.{name}"] = (self._share(count, scored), limit, text)
        return found

    def _share(self, count: int, total: int) -> float:
        return count / total if count >= LEAST else 0.0

    def _correlations(self) -> dict[str, Alarm]:
        """Over the trajectories that were played; those that failed before have no length."""
        played = [seen for seen in self._seen if seen.length]
        unscored = [float(seen.unscored is not None) for seen in played]
        # A correlation with fewer would be chance.
        if sum(unscored) < LEAST:
            return {}
        limit, found = Limit(warn=CORRELATION), dict[str, Alarm]()
        r = correlation(unscored, [float(seen.length) for seen in played])
        text = (
            f"{'longer' if r > 0 else 'shorter'} trajectories have no reward more often (r ="
            f" {r:.2f})"
        )
        found["length"] = (min(abs(r), 1.0), limit, text)
        for source in dict.fromkeys(seen.source for seen in played):
            r = correlation(unscored, [float(seen.source == source) for seen in played])
            text = (
                f"trajectories of {source or 'no source'} have no reward more often (r = {r:.2f})"
            )
            found[f"source {source}"] = (min(r, 1.0), limit, text)
        return found

    def _raise_or_emit(self, kind: str, found: Mapping[str, Alarm]) -> None:
        now = {f"{kind} {name}" for name, (value, limit, _) in found.items() if limit.warns(value)}
        for name, (value, limit, text) in found.items():
            if limit.stops(value):
                raise AlarmStopped(f"{text}; alarms.{name}.stop is {limit.stop:g}")
            if f"{kind} {name}" in now - self._active:
                self._emit(incidents.Alarm(name, why=text))
        # A name of this kind that is absent from ``now`` may warn again once it comes back.
        self._active = {name for name in self._active if not name.startswith(f"{kind} ")} | now


def reasons(lost: Iterable[Unscored], most: int = 3) -> list[str]:
    """Returns the most frequent kinds, each with one reason: ``invalid_reward 8: the reward source
    returned None, ...``.
    """
    outcomes = list(lost)
    # The order is reversed, so that the first reason of a kind stays.
    example = {outcome.kind: outcome.reason for outcome in reversed(outcomes) if outcome.reason}
    kinds = Counter(outcome.kind for outcome in outcomes)
    return [
        f"{kind} {n}" + (f": {example[kind]}" if kind in example else "")
        for kind, n in kinds.most_common(most)
    ]


def _grader_raised(member: Member) -> bool:
    """Whether the reward raised or returned no number.

    False with ``reward.on_error: fail``, where the flag has an alarm.
    """
    outcome = member.outcome
    own = isinstance(outcome, Unscored) and outcome.kind in (
        UnscoredKind.GRADER_ERROR,
        UnscoredKind.INVALID_REWARD,
    )
    return own and bool(outcome.trace)


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
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    product = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    spread = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return product / math.sqrt(spread) if spread > 0 else 0.0
