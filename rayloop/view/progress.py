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

from rayloop.core.signals import leave_terminal
from rayloop.view.completions import shown
from rayloop.view.words import span

ROWS = 10
ABSENT = "-"
SHORT = {
    "gen": "gen",
    "update_actor": "train",
    "update_weights": "weight_sync",
    "logprob_check": "compare",
    "testing": "eval",
    "save_checkpoint": "save",
}
"""Name of a timing -> word of its phase, for the phases whose share of the time is shown."""


@dataclass(frozen=True, slots=True)
class Column:
    """``show`` formats a step's metrics; ``word`` is the label in plain lines.

    A table shows it from its first value on.
    """

    title: str
    word: str
    show: Callable[[Mapping[str, float]], str]


def _value(name: str, form: str) -> Callable[[Mapping[str, float]], str]:
    return lambda metrics: format(metrics[name], form) if name in metrics else ABSENT


def _kept(metrics: Mapping[str, float]) -> str:
    if "rollout/trajectories" not in metrics:
        return ABSENT
    return f"{_value('rollout/trained', '.0f')(metrics)}/{_value('rollout/trajectories', '.0f')(metrics)}"


def _skipped(metrics: Mapping[str, float]) -> str:
    """Updates whose gradient was not finite, of all."""
    skipped = metrics.get("actor/skipped_updates", 0.0)
    return f"{skipped:.0f}/{skipped + metrics.get('actor/updates', 0.0):.0f}" if skipped else ABSENT


def _share(state: str, *, none: str) -> Callable[[Mapping[str, float]], str]:
    """Of the finished trajectories, those that ended so: ``filtered``, or ``excluded`` for want of
    a reward.
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
        whole, part = metrics.get("timing_s/step", 0.0), metrics.get(f"timing_s/{phase}")
        return f"{part / whole:.0%}" if whole and part is not None else ABSENT

    return share


def _time(metrics: Mapping[str, float]) -> str:
    """Seconds of the step, and the phases that took a twentieth of it or more: ``1.9 s: gen 55%
    train 41%``.
    """
    whole = metrics.get("timing_s/step", 0.0)
    if not whole:
        return ABSENT
    large = {
        name: share
        for name in SHORT
        if (share := metrics.get(f"timing_s/{name}", 0.0) / whole) >= LARGE
    }
    return " ".join(
        [f"{whole:.1f} s:", *(f"{SHORT[name]} {share:.0%}" for name, share in large.items())]
    )


GIVEN_UP = (
    "weight_sync",
    "train",
    "gen",
    "grad",
    "KL",
    "tokens",
    "entropy",
    "step_s",
    "excluded",
    "filtered",
    "trend",
)
"""Words of the columns that a table leaves out, in this order, until it fits the terminal."""
SEEN = 10
"""Steps whose mean duration, without evaluations, gives the time that is left; half the steps of
the trend.
"""
LARGE = 0.05
"""Phases that took less than this share of a step are left out of a plain line."""
TREND = "trend"
"""Not a metric: the mean reward of the newer half of the last 2 * ``SEEN`` steps, minus that of the
older half.
"""


def columns(sampled: str, held_out: str) -> tuple[Column, ...]:
    """The columns of the table.

    ``sampled`` and ``held_out`` say how the two kinds of answers are drawn.
    """
    return (
        Column(f"reward\n({sampled})", "reward", _value("reward/mean", ".3f")),
        Column("trend", "trend", _value(TREND, "+.3f")),
        Column("trained/\nplayed", "trained", _kept),
        Column("skipped\nupdates", "skipped", _skipped),
        Column("filtered", "filtered", _share("filtered", none="0%")),
        Column("excluded", "excluded", _share("excluded", none=ABSENT)),
        Column("entropy", "entropy", _value("actor/entropy", ".3f")),
        Column("KL", "KL", _value("actor/kl", ".2g")),
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
"""Word of a column -> its form in a plain line. An evaluation has a line of its own."""


def remaining(newest: Iterable[Mapping[str, float]], steps: int) -> float:
    """Seconds of the steps that are left: each takes the mean of the last ``SEEN``, evaluations
    aside. 0 when none was timed.
    """
    timed = [metrics for metrics in newest if "timing_s/step" in metrics][-SEEN:]
    seconds = [metrics["timing_s/step"] - metrics.get("timing_s/testing", 0.0) for metrics in timed]
    return (steps - timed[-1]["step"]) * fmean(seconds) if timed else 0.0


@contextmanager
def _unless_closed() -> Iterator[None]:
    """What is printed in the block goes nowhere when the terminal has been closed: a run saves, or
    goes on, without it.
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
        self._rows: deque[tuple[str, ...]] = deque(maxlen=ROWS)
        self._used: set[str] = set()
        self._timed: deque[Mapping[str, float]] = deque(maxlen=SEEN)
        self._rewards: deque[float] = deque(maxlen=2 * SEEN)
        self._left = self._doing = ""
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
            self._left = ""
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
            left = remaining(self._timed, self.total_steps)
            self._left = f"{span(left)} left" if left else ""
        if self._live is None:
            cells |= {"time": _time(metrics), "left": self._left or ABSENT}
            said = (
                form.format(cells[word]) for word, form in LINE.items() if cells[word] != ABSENT
            )
            self._print(Text(" ".join((f"step {step} ", *said))))
            return
        self._used |= {word for word, cell in cells.items() if cell != ABSENT}
        self._rows.append((step, *cells.values()))
        self._refresh()

    def _trend(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The trend with this step in it; nothing before there are two rewards for each half."""
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        rewards = list(self._rewards)
        half = len(rewards) // 2
        return {TREND: fmean(rewards[-half:]) - fmean(rewards[:half])} if half > 1 else {}

    def samples(self, found: Mapping[str, Any]) -> None:
        """Show completions of the newest step: below the table of a terminal, elsewhere after the
        step's line.
        """
        self._samples = shown(found, self.console)
        if self._live is None:
            self._print(self._samples)
        self._refresh()

    def doing(self, text: str) -> None:
        """Below the table of a terminal: what the run does now. Says nothing elsewhere."""
        self._doing = text
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            with _unless_closed():
                self._live.update(self._table(), refresh=True)

    def note(self, text: str) -> None:
        """Say something once, above the table."""
        self._print(Text(text))

    def _print(self, text: Text) -> None:
        with _unless_closed():
            self.console.print(text)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Say how the run ended: the summary's values, nested ones on lines of their own."""
        plain = {name: value for name, value in summary.items() if not isinstance(value, Mapping)}
        self.note("done: " + ", ".join(f"{name} {value}" for name, value in plain.items()))
        for name, nested in summary.items():
            if isinstance(nested, Mapping):
                self.note(
                    f"  {name}: "
                    + ", ".join(f"{key} {value}" for key, value in nested.items() if value)
                )

    def _table(self) -> Group:
        now = Text("  ".join(filter(None, (self._doing, self._left))), style="dim")
        if not self._rows:
            return Group(now)
        tables = [self._without(GIVEN_UP[:gone]) for gone in range(len(GIVEN_UP) + 1)]
        free = self.console.options.update(max_width=1000)
        fits = (
            table
            for table in tables
            if self.console.measure(table, options=free).maximum <= self.console.width
        )
        return Group(Text(), next(fits, tables[-1]), self._samples, now)

    def _without(self, words: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("step", justify="right", vertical="bottom", no_wrap=True)
        shown = [column.word in self._used and column.word not in words for column in self._columns]
        for column in compress(self._columns, shown):
            table.add_column(column.title, justify="right", vertical="bottom", no_wrap=True)
        for step, *cells in self._rows:
            table.add_row(step, *compress(cells, shown))
        return table
