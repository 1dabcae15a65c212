"""Alarms about a policy that collapses: it becomes certain of everything, says less and less, or its groups teach nothing.

They look at the metrics of steps that are on record (rayloop/run/records/metrics.py). Arc Vision's own run collapsed so: each
answer asked for a tool, each reward was 0.100, answers fell from 38 to 20 tokens, and nothing said a word."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import mean

from rayloop.config.settings import SettingsModel
from rayloop.grpo.limits import Alarm, Floor, Limit

ENTROPY, LENGTH, DONE = "actor/entropy", "response_length/mean", "end_reason/done"
EQUAL, RIGHT, WRONG = "rollout/equal_rewards", "rollout/all_right", "rollout/all_wrong"

OPEN = "A lower policy.optimizer.lr, policy.loss.entropy_coef or a KL term keep it open"
HALF = 0.5
"""Share of its first entropy below which a policy that no longer finds groups to train on has collapsed."""
STEPS = 5
"""Steps that a value is averaged over, and the first steps that lengths are compared with: one odd batch is no collapse."""


class CollapseSettings(SettingsModel):
    """Each is the mean of the last five steps. Where the limits come from: docs/choosing_settings.md."""

    entropy: Floor = Floor(warn=0.05)
    """Entropy of the policy, as a share of what the run's first five steps had: near 0 all samples of a group are the same. Lower
    ``warn`` where answers are to become certain. Five steps without a gradient count as 0."""
    response_length: Floor = Floor(warn=0.6)
    """Sampled tokens per answer, as a share of what the run's first five steps had. Lower ``warn`` where answers are to become
    shorter."""
    completed: Floor = Floor(warn=0.3)
    """Share of trajectories that the policy ended itself (``end_reason/done``), by an answer or its last action; the others ran out
    of turns or tokens, or broke off. Lower it for tasks that few attempts finish."""
    equal_groups: Limit = Limit(warn=0.9)
    """Share of groups whose rewards are all equal, so that they have no gradient. Lower ``warn`` when generation is what costs
    most."""
    all_right: Limit = Limit(warn=0.8)
    """Share of groups of which every answer is right (reward 1 or above): the rows are too easy. Lower it to change rows sooner."""
    all_wrong: Limit = Limit(warn=0.8)
    """Share of groups of which every answer is wrong (reward 0 or below): the rows are too hard. Raise it where successes are
    rare by nature."""


class Collapse:
    """``step`` is told of each step's metrics, and returns what is watched, by the name of its setting."""

    def __init__(self, settings: CollapseSettings) -> None:
        self._settings = settings
        self._last: dict[str, deque[float]] = {name: deque(maxlen=STEPS) for name in (ENTROPY, LENGTH, DONE, EQUAL, RIGHT, WRONG)}
        self.first: dict[str, list[float]] = {LENGTH: [], ENTROPY: []}
        """Of the run's first steps, in tokens and nats. They are in the checkpoint: a collapse may come after a resume."""
        self._unknown = 0
        """Steps in a row that computed nothing, and so have no entropy."""

    def step(self, metrics: Mapping[str, float]) -> dict[str, Alarm]:
        """What a step does not have says nothing; the same of a value that fewer than ``STEPS`` steps have had."""
        for name, values in self._last.items():
            if name in metrics:
                values.append(metrics[name])
        for name, first in self.first.items():
            if name in metrics and len(first) < STEPS:
                first.append(metrics[name])
        found = {name: mean(values) for name, values in self._last.items() if len(values) == STEPS}
        self._unknown = 0 if ENTROPY in metrics else self._unknown + 1
        if self._unknown >= STEPS:
            text = f"none of the last {STEPS} steps had a trajectory with gradient: nothing is learned, and its entropy is unknown"
            found.pop(ENTROPY, None)
            return {"entropy": (0.0, self._settings.entropy, text)} | self._alarms(found)
        return self._alarms(found)

    def _alarms(self, found: Mapping[str, float]) -> dict[str, Alarm]:
        return {setting: alarm for name, value in found.items() for setting, alarm in self._alarm(name, value)}

    def cause(self, learning_rate: float) -> str:
        """A sentence on entropy and learning rate for a run that ends for lack of groups with a gradient; empty unless its entropy
        has halved."""
        last = self._last[ENTROPY]
        if not last or self._share(ENTROPY, mean(last)) >= HALF:
            return ""
        return f"{self._certain(mean(last))}: it has collapsed. The learning rate is {learning_rate:g}. {OPEN}."

    def _certain(self, entropy: float) -> str:
        before = mean(self.first[ENTROPY])
        return f"the policy's entropy is {entropy:.2g} nats per token, mean of {STEPS} steps, and was {before:.2g} at first"

    def _share(self, name: str, value: float) -> float:
        """Of what the first steps had; an older checkpoint may not say it."""
        before = mean(self.first[name]) if self.first[name] else 0.0
        return value / before if before else 1.0

    def _alarm(self, name: str, value: float) -> Sequence[tuple[str, Alarm]]:
        c, share = self._settings, f"{value:.0%} of the last {STEPS} steps' groups"
        if name == ENTROPY:
            text = f"{self._certain(value)}: it gives the same answer again and again. {OPEN}"
            return [("entropy", (self._share(name, value), c.entropy, text))]
        if name == LENGTH:
            before = mean(self.first[LENGTH])
            text = f"answers have {value:.0f} tokens, mean of {STEPS} steps, and had {before:.0f} at first: look at what is left"
            return [("response_length", (self._share(name, value), c.response_length, text))]
        if name == DONE:
            text = (
                f"{value:.0%} of the last {STEPS} steps' trajectories were completed, the others ran out of turns or tokens, or "
                "broke off: look at what they do instead of answering (end_reason/...)"
            )
            return [("completed", (value, c.completed, text))]
        if name == EQUAL:
            text = f"{share} have rewards that are all equal: they teach nothing"
            return [("equal_groups", (value, c.equal_groups, text))]
        if name == RIGHT:
            return [("all_right", (value, c.all_right, f"{share} have only right answers: take harder rows"))]
        return [("all_wrong", (value, c.all_wrong, f"{share} have only wrong answers: take easier rows first"))]
