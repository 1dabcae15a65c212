"""Alarms about a policy that collapses.

Its entropy or its answers shrink, or the rewards of its groups become equal.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import ClassVar, Self

from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel


class Limit(SettingsModel):
    """An alarm: where it warns, and where it ends the run. null: never."""

    warn: float | None = Field(None, ge=0)
    """Beyond this the run emits an event and prints a line, once until the value is back.

    Why a key: once the reason is known, the same alarm in each run hides the others: a task that
    the model nearly solves has many groups that are all right.
    """
    stop: float | None = Field(None, ge=0)
    """Beyond this the run ends with exit code 1.

    Why a key: a run over the weekend on rented GPUs should end when half of its trajectories have
    no reward.
    """

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.warn is not None and self.stop is not None and self._beyond(self.warn, self.stop):
            side = "above" if isinstance(self, Floor) else "below"
            raise ValueError(
                f"stop ({self.stop:g}) is {side} warn ({self.warn:g}): the run would end before it"
                " warned"
            )
        return self

    def warns(self, value: float) -> bool:
        """Whether ``value`` is an alarm."""
        return self.warn is not None and self._beyond(value, self.warn)

    def stops(self, value: float) -> bool:
        """Whether ``value`` ends the run."""
        return self.stop is not None and self._beyond(value, self.stop)

    def _beyond(self, value: float, bound: float) -> bool:
        return value > bound


class Floor(Limit):
    """An alarm for a value that falls: where it warns, and where it ends the run. null: never."""

    def _beyond(self, value: float, bound: float) -> bool:
        return value < bound


Alarm = tuple[float, Limit, str]
"""The watched value, its limits, and a sentence that says what the value means."""


ENTROPY = "actor/entropy"
LENGTH = "response_length/mean"
DONE = "end_reason/done"
EQUAL = "rollout/equal_rewards"
RIGHT = "rollout/all_right"
WRONG = "rollout/all_wrong"
STATES = "rollout/shared_states"
REPEATS = "rollout/repeated_states"
PAID = "rollout/paid_at_max_turns"
SETTINGS = {
    ENTROPY: "entropy",
    LENGTH: "response_length",
    DONE: "completed",
    EQUAL: "equal_groups",
    RIGHT: "all_right",
    WRONG: "all_wrong",
    STATES: "shared_states",
    REPEATS: "repeated_states",
}
"""Watched metric -> the setting with its limits."""

ENTROPY_ADVICE = "A lower policy.optimizer.lr, policy.loss.entropy_coef or a KL term keep it open"
STATES_ADVICE = (
    "A clock, a counter or an animation on the screen makes every state another one: hide it, or"
    " take advantage.kind: turns"
)
COLLAPSED_SHARE = 0.5
"""Share of the first steps' entropy below which a policy has collapsed.

It counts where no groups are left to train on.
"""
MEAN_STEPS = 5
"""Steps of a mean, and number of first steps with which lengths and entropies are compared.

One odd batch is not a collapse.
"""


class CollapseSettings(SettingsModel):
    """Limits of means over the last five steps. docs/choosing_settings.md explains the defaults."""

    entropy: Floor = Floor(warn=0.05)
    """Entropy of the policy, as a share of that of the run's first five steps.

    Near 0 all samples of a group are the same. Lower ``warn`` where answers are to become certain.
    Five steps without a gradient count as 0.
    """
    response_length: Floor = Floor(warn=0.6)
    """Sampled tokens per answer, as a share of the run's first five steps'.

    Lower ``warn`` where answers should become shorter.
    """
    completed: Floor = Floor(warn=0.3)
    """Share of trajectories that the policy ended itself or the environment paid at the last turn.

    The policy ends a trajectory (``end_reason/done``) by an answer or its last action; the others
    ran out of turns or tokens, or broke off. Lower it for tasks that few attempts finish.
    """
    equal_groups: Limit = Limit(warn=0.9)
    """Share of groups whose advantages are all 0, as where rewards are all equal.

    They have no gradient. Lower ``warn`` when generation costs most.
    """
    all_right: Limit = Limit(warn=0.8)
    """Share of groups of which every answer is right (reward 1 or above): the rows are too easy.

    Lower it to change rows sooner.
    """
    all_wrong: Limit = Limit(warn=0.8)
    """Share of groups of which every answer is wrong (reward 0 or below): the rows are too hard.

    Raise it where success is rare.
    """
    shared_states: ClassVar[Floor] = Floor(warn=1e-9)
    """Share of turns that began at the state of another turn of the group.

    It is watched for an advantage that compares such turns.
    """
    repeated_states: ClassVar[Floor] = Floor(warn=0.5)
    """Agreement of the states that the same actions of a group led to; watched for the same."""


class Collapse:
    """Watches the metrics of steps for a collapse.

    ``step`` takes them and returns name of the setting -> alarm.
    """

    def __init__(self, settings: CollapseSettings, *, compares_states: bool = False) -> None:
        """``compares_states``: the advantage is between turns that began at the same state."""
        self._settings = settings
        unwatched = () if compares_states else (STATES, REPEATS)
        self._watched = [name for name in SETTINGS if name not in unwatched]
        self._last: deque[Mapping[str, float]] = deque(maxlen=MEAN_STEPS)
        self.first: dict[str, list[float]] = {LENGTH: [], ENTROPY: []}
        """Values of the run's first steps, in tokens and nats.

        A checkpoint keeps them, for a collapse after a resume.
        """

    def step(self, metrics: Mapping[str, float]) -> dict[str, Alarm]:
        """Returns the watched values, none before ``MEAN_STEPS`` steps.

        A mean skips steps of the last ``MEAN_STEPS`` that lack the metric: a step without a forward
        pass has no entropy.
        """
        self._last.append(metrics)
        for name, first in self.first.items():
            if name in metrics and len(first) < MEAN_STEPS:
                first.append(metrics[name])
        if len(self._last) < MEAN_STEPS:
            return {}
        alarms: dict[str, Alarm] = {}
        for name in self._watched:
            values = self._recent_values(name)
            if values:
                alarms[SETTINGS[name]] = self._alarm(name, values)
        if STATES in self._watched and not any(self._recent_values(STATES)):
            # Where no state is shared, none is repeated either: one alarm says it.
            alarms.pop(SETTINGS[REPEATS], None)
        text = (
            f"none of the last {MEAN_STEPS} steps had a trajectory with gradient: nothing is"
            " learned, and its entropy is unknown"
        )
        # A measured entropy replaces this entry; without one no trajectory had a gradient.
        return {"entropy": (0.0, self._settings.entropy, text)} | alarms

    def _recent_values(self, name: str) -> list[float]:
        """Returns the values of a metric in the last steps that have it."""
        # Trajectories that the environment paid at their last turn are completed, too.
        addend = PAID if name == DONE else ""
        return [
            metrics[name] + metrics.get(addend, 0.0) for metrics in self._last if name in metrics
        ]

    def _alarm(self, name: str, values: Sequence[float]) -> Alarm:
        value = mean(values)
        if name in self.first:
            value = self._share_of_first(name, value)
        return value, getattr(self._settings, SETTINGS[name]), self._text(name, values)

    def cause(self, learning_rate: float) -> str:
        """A sentence on entropy and learning rate, for a run that ends without gradients.

        It is empty unless the entropy has halved.
        """
        values = self._recent_values(ENTROPY)
        if not values or self._share_of_first(ENTROPY, mean(values)) >= COLLAPSED_SHARE:
            return ""
        return (
            f"{self._entropy_text(values)}: it has collapsed. The learning rate is"
            f" {learning_rate:g}. {ENTROPY_ADVICE}."
        )

    def _entropy_text(self, values: Sequence[float]) -> str:
        first = mean(self.first[ENTROPY])
        return (
            f"the policy's entropy is {mean(values):.2g} nats per token, {_mean_of(values)}, and"
            f" was {first:.2g} at first"
        )

    def _share_of_first(self, name: str, value: float) -> float:
        """Returns ``value`` as a share of the first steps' mean.

        1 where an older checkpoint lacks that mean.
        """
        first = mean(self.first[name]) if self.first[name] else 0.0
        return value / first if first else 1.0

    def _text(self, name: str, values: Sequence[float]) -> str:
        """Returns a sentence that explains the mean of a metric's values."""
        value = mean(values)
        if name == ENTROPY:
            text = self._entropy_text(values)
            return f"{text}: it gives the same answer again and again. {ENTROPY_ADVICE}"
        if name == LENGTH:
            first = mean(self.first[LENGTH])
            return (
                f"answers have {value:.0f} tokens, {_mean_of(values)}, and had {first:.0f} at"
                " first: look at what is left"
            )
        if name == DONE:
            return (
                f"{value:.0%} of the last {MEAN_STEPS} steps' trajectories were completed, the"
                " others ran out of turns or tokens, or broke off: look at what they do instead of"
                " answering (end_reason/...). An environment that knows its last turn returns"
                " done=True with it"
            )
        if name == STATES:
            return (
                "no turn after the first shared its state with another one of its group,"
                f" {_mean_of(values)}: gigpo has nothing to compare there. {STATES_ADVICE}"
            )
        if name == REPEATS:
            return (
                f"the same actions led to the same state in {value:.0%} of the cases,"
                f" {_mean_of(values)}: gigpo takes equal states for different ones."
                f" {STATES_ADVICE}"
            )
        meanings = {
            EQUAL: "advantages that are all 0: they teach nothing",
            RIGHT: "only right answers: take harder rows",
            WRONG: "only wrong answers: take easier rows first",
        }
        return f"{value:.0%} of the last {MEAN_STEPS} steps' groups have {meanings[name]}"


def _mean_of(values: Sequence[float]) -> str:
    return f"mean of {len(values)} steps" if len(values) > 1 else "of a single step"
