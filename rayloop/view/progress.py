"""The progress of a run: a table of the last steps on a terminal, one line per step elsewhere."""

import errno
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rayloop.launch.signals import leave_terminal
from rayloop.view.completions import shown
from rayloop.view.formatting import span

TABLE_ROWS = 10
ABSENT = "-"
PHASE_WORDS = {
    "gen": "gen",
    "update_actor": "train",
    "update_weights": "weight_sync",
    "logprob_check": "compare",
    "testing": "eval",
    "save_checkpoint": "save",
}
"""Name of a timing -> word of its phase, for the phases that a plain line may show."""


@dataclass(frozen=True)
class Column:
    """A column of the table, which shows it from its first value on.

    ``show`` formats a step's metrics; ``word`` is the label in plain lines.
    """

    title: str
    word: str
    show: Callable[[Mapping[str, float]], str]


def _value(name: str, form: str) -> Callable[[Mapping[str, float]], str]:
    return lambda metrics: format(metrics[name], form) if name in metrics else ABSENT


def _trained(metrics: Mapping[str, float]) -> str:
    """The trained trajectories, of all."""
    if "rollout/trajectories" not in metrics:
        return ABSENT
    trained = _value("rollout/trained", ".0f")(metrics)
    return f"{trained}/{metrics['rollout/trajectories']:.0f}"


def _skipped(metrics: Mapping[str, float]) -> str:
    """The updates with a gradient that was not finite, of all."""
    skipped = metrics.get("actor/skipped_updates", 0.0)
    if not skipped:
        return ABSENT
    updates = skipped + metrics.get("actor/updates", 0.0)
    return f"{skipped:.0f}/{updates:.0f}"


def _share(state: str, *, none: str) -> Callable[[Mapping[str, float]], str]:
    """The share of the finished trajectories with this end.

    The end is ``filtered``, or ``excluded`` because the reward is missing.
    """

    def share(metrics: Mapping[str, float]) -> str:
        finished = metrics.get("rollout/trajectories", 0.0)
        removed = sum(value for name, value in metrics.items() if name.startswith(f"{state}/"))
        if not finished:
            return ABSENT
        return f"{removed / finished:.0%}" if removed else none

    return share


def _phase(phase: str) -> Callable[[Mapping[str, float]], str]:
    """The share of the step's time that a phase took."""

    def share(metrics: Mapping[str, float]) -> str:
        step_s = metrics.get("timing_s/step", 0.0)
        phase_s = metrics.get(f"timing_s/{phase}")
        return f"{phase_s / step_s:.0%}" if step_s and phase_s is not None else ABSENT

    return share


def _time(metrics: Mapping[str, float]) -> str:
    """Seconds of the step and its longest phases: ``1.9 s: gen 55% train 41%``."""
    step_s = metrics.get("timing_s/step", 0.0)
    if not step_s:
        return ABSENT
    parts = [f"{step_s:.1f} s:"]
    for name, word in PHASE_WORDS.items():
        share = metrics.get(f"timing_s/{name}", 0.0) / step_s
        if share >= LARGE_SHARE:
            parts.append(f"{word} {share:.0%}")
    return " ".join(parts)


DROPPED_FIRST = (
    "sight",
    "weight_sync",
    "train",
    "gen",
    "grad",
    "KL",
    "tokens",
    "entropy",
    "step_s",
    "lost",
    "excluded",
    "filtered",
    "trend",
)
"""Words of the columns that a table leaves out, in this order, until it fits the terminal."""
ESTIMATE_STEPS = 10
"""Steps that the estimate of the remaining time uses, and half the steps of the trend."""
LARGE_SHARE = 0.05
"""Phases that took less than this share of a step are left out of a plain line."""
TREND = "trend"
"""The difference of mean rewards between the halves of the last 2 * ``ESTIMATE_STEPS`` steps.

The older half is subtracted from the newer one. It is not a metric.
"""


def columns(sampled: str, held_out: str) -> tuple[Column, ...]:
    """The columns of the table.

    ``sampled`` and ``held_out`` say how the two kinds of answers are drawn.
    """
    return (
        Column(f"reward\n({sampled})", "reward", _value("reward/mean", ".3f")),
        Column("trend", "trend", _value(TREND, "+.3f")),
        Column("trained/\nplayed", "trained", _trained),
        Column("skipped\nupdates", "skipped", _skipped),
        Column("filtered", "filtered", _share("filtered", none="0%")),
        Column("excluded", "excluded", _share("excluded", none=ABSENT)),
        Column("lost", "lost", _value("lost/episodes", ".0%")),
        Column("entropy", "entropy", _value("actor/entropy", ".3f")),
        Column("KL", "KL", _value("actor/kl", ".2g")),
        Column("sight", "sight", _value("actor/sight", ".2g")),
        Column("grad\nnorm", "grad", _value("actor/grad_norm", ".2g")),
        Column("tokens\n/s", "tokens", _value("perf/tokens_per_second", ".0f")),
        Column("step\ns", "step_s", _value("timing_s/step", ".1f")),
        Column("gen", "gen", _phase("gen")),
        Column("train", "train", _phase("update_actor")),
        Column("weight_sync", "weight_sync", _phase("update_weights")),
        Column(f"held-out\n({sampled})", "sampled", _value("val_sampled/reward/mean", ".3f")),
        Column(f"held-out\n({held_out})", "held-out", _value("val/reward/mean", ".3f")),
    )


LINE = {
    "reward": "reward {}",
    "trend": "({})",
    "trained": " trained {}",
    "skipped": " SKIPPED {} updates",
    "excluded": " excluded {}",
    "entropy": " entropy {}",
    "KL": " KL {}",
    "grad": " grad {}",
    "tokens": " {} tok/s",
    "time": " {}",
    "left": " {}",
}
"""Word of a column -> its form in a plain line. An evaluation has a separate line."""


def remaining(newest: Iterable[Mapping[str, float]], steps: int) -> float:
    """Seconds of the remaining steps, evaluations excluded; 0 when no step was timed.

    Each step takes the mean of the last ``ESTIMATE_STEPS``.
    """
    timed = [metrics for metrics in newest if "timing_s/step" in metrics][-ESTIMATE_STEPS:]
    seconds = [metrics["timing_s/step"] - metrics.get("timing_s/testing", 0.0) for metrics in timed]
    return (steps - timed[-1]["step"]) * fmean(seconds) if timed else 0.0


@contextmanager
def _unless_closed() -> Iterator[None]:
    """Drop the output of the block when the terminal has been closed.

    A run continues, and saves, without its terminal.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_terminal()


class Progress:
    """Shows steps as they are recorded.

    Use as a context manager; ``console`` is stdout unless given.
    """

    def __init__(
        self,
        total_steps: int,
        sampled: str = "sampled",
        held_out: str = "greedy",
        console: Console | None = None,
    ) -> None:
        self.total_steps = total_steps
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._columns = columns(sampled, held_out)
        self._rows: deque[tuple[str, ...]] = deque(maxlen=TABLE_ROWS)
        self._used: set[str] = set()
        self._timed: deque[Mapping[str, float]] = deque(maxlen=ESTIMATE_STEPS)
        self._rewards: deque[float] = deque(maxlen=2 * ESTIMATE_STEPS)
        self._remaining = ""
        self._doing = ""
        self._samples = Text()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._remaining = ""
            self.doing("")
            self._live.stop()
            self._live = None

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show one step: a record of metrics.jsonl, with ``step`` in it."""
        step = f"{metrics['step']:.0f}/{self.total_steps}"
        metrics = {**metrics, **self._trend(metrics)}
        cells = {column.word: column.show(metrics) for column in self._columns}
        if "timing_s/step" in metrics:
            self._timed.append(metrics)
            seconds = remaining(self._timed, self.total_steps)
            self._remaining = f"{span(seconds)} left" if seconds else ""
        if self._live is None:
            cells["time"] = _time(metrics)
            cells["left"] = self._remaining or ABSENT
            parts = [
                form.format(cells[word]) for word, form in LINE.items() if cells[word] != ABSENT
            ]
            self._print(Text(" ".join((f"step {step} ", *parts))))
            return
        self._used |= {word for word, cell in cells.items() if cell != ABSENT}
        self._rows.append((step, *cells.values()))
        self._refresh()

    def _trend(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The trend with this step in it; empty until each half has two rewards."""
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        rewards = list(self._rewards)
        half = len(rewards) // 2
        return {TREND: fmean(rewards[-half:]) - fmean(rewards[:half])} if half > 1 else {}

    def samples(self, found: Mapping[str, Any]) -> None:
        """Show completions of the newest step.

        They are below the table of a terminal, and elsewhere after the step's line.
        """
        self._samples = shown(found, self.console)
        if self._live is None:
            self._print(self._samples)
        self._refresh()

    def doing(self, text: str) -> None:
        """Show the current activity of the run below the table of a terminal, and only there."""
        self._doing = text
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            with _unless_closed():
                self._live.update(self._table(), refresh=True)

    def note(self, text: str) -> None:
        """Print a text once, above the table."""
        self._print(Text(text))

    def _print(self, text: Text) -> None:
        with _unless_closed():
            self.console.print(text)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Print the values of the run's summary, nested ones on separate lines."""
        values = [
            f"{name} {value}" for name, value in summary.items() if not isinstance(value, Mapping)
        ]
        self.note("done: " + ", ".join(values))
        for name, nested in summary.items():
            if isinstance(nested, Mapping):
                parts = [f"{key} {value}" for key, value in nested.items() if value]
                self.note(f"  {name}: " + ", ".join(parts))

    def _table(self) -> Group:
        activity = Text("  ".join(filter(None, (self._doing, self._remaining))), style="dim")
        if not self._rows:
            return Group(activity)
        # Measured at its natural width: at the terminal's, a table that is too wide is squeezed.
        unlimited = self.console.options.update(max_width=1000)
        for dropped in range(len(DROPPED_FIRST) + 1):
            table = self._without(DROPPED_FIRST[:dropped])
            if self.console.measure(table, options=unlimited).maximum <= self.console.width:
                break
        return Group(Text(), table, self._samples, activity)

    def _without(self, words: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("step", justify="right", vertical="bottom", no_wrap=True)
        visible = [
            column.word in self._used and column.word not in words for column in self._columns
        ]
        for column in compress(self._columns, visible):
            table.add_column(column.title, justify="right", vertical="bottom", no_wrap=True)
        for step, *cells in self._rows:
            table.add_row(step, *compress(cells, visible))
        return table
