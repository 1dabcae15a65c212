"""What a person sees of a run: a table of the last steps on a terminal, one line per step elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import fmean
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rayloop.view.words import span

ROWS = 10
ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """``show`` formats a step's metrics; ``word`` is the label in plain lines."""

    title: str
    word: str
    show: Callable[[Mapping[str, float]], str]


def _value(name: str, form: str) -> Callable[[Mapping[str, float]], str]:
    return lambda metrics: format(metrics[name], form) if name in metrics else ABSENT


def _kept(metrics: Mapping[str, float]) -> str:
    return f"{_value('rollout/trained', '.0f')(metrics)}/{_value('rollout/trajectories', '.0f')(metrics)}"


def _share(state: str, *, none: str) -> Callable[[Mapping[str, float]], str]:
    """Of the finished trajectories, those that ended so: ``filtered``, or ``excluded`` for want of a reward."""

    def share(metrics: Mapping[str, float]) -> str:
        finished = metrics.get("rollout/trajectories", 0.0)
        removed = sum(value for name, value in metrics.items() if name.startswith(f"{state}/"))
        if not finished:
            return ABSENT
        return f"{removed / finished:.0%}" if removed else none

    return share


GIVEN_UP = ("publish_s", "train_s", "gen_s", "grad", "entropy", "step_s", "loss", "excluded", "filtered")
"""Words of the columns that a table leaves out, in this order, until it fits the terminal. Never what was earned or trained."""
SEEN = 10
"""Steps over whose mean duration the time that is left is reckoned."""


def columns(sampled: str, held_out: str) -> tuple[Column, ...]:
    """Of the table. ``sampled`` and ``held_out`` say how the two kinds of answers are drawn: they are not to be compared."""
    return (
        Column(f"reward\n({sampled})", f"reward({sampled})", _value("reward/mean", ".3f")),
        Column("trained/\nplayed", "trained", _kept),
        Column("filtered", "filtered", _share("filtered", none="0%")),
        Column("excluded", "excluded", _share("excluded", none=ABSENT)),
        Column("loss", "loss", _value("actor/loss", ".4f")),
        Column("grad\nnorm", "grad", _value("actor/grad_norm", ".3g")),
        Column("entropy", "entropy", _value("actor/entropy", ".3f")),
        Column("generate\ns", "gen_s", _value("timing_s/gen", ".1f")),
        Column("train\ns", "train_s", _value("timing_s/update_actor", ".1f")),
        Column("publish\ns", "publish_s", _value("timing_s/update_weights", ".1f")),
        Column("step\ns", "step_s", _value("timing_s/step", ".1f")),
        Column(f"held-out\n({held_out})", f"held_out({held_out})", _value("val/reward/mean", ".3f")),
    )


class Progress:
    """Shows steps as they are recorded. Use as a context manager; ``console`` is stdout unless given."""

    def __init__(
        self, total_steps: int, sampled: str = "sampled", held_out: str = "greedy", console: Console | None = None
    ) -> None:
        self.total_steps = total_steps
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._columns = columns(sampled, held_out)
        self._rows: deque[tuple[str, ...]] = deque(maxlen=ROWS)
        self._seconds: deque[float] = deque(maxlen=SEEN)
        self._left = ""
        self._doing = ""
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._left = ""
            self.doing("")
            self._live.stop()
            self._live = None

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show one step: a record of metrics.jsonl, with ``step`` in it."""
        step = f"{metrics['step']:.0f}/{self.total_steps}"
        cells = tuple(column.show(metrics) for column in self._columns)
        if "timing_s/step" in metrics:
            self._seconds.append(metrics["timing_s/step"])
            remaining = (self.total_steps - metrics["step"]) * fmean(self._seconds)
            self._left = f"about {span(remaining)} left" if remaining else ""
        if self._live is None:
            pairs = (
                f"{column.word} {cell}" for column, cell in zip(self._columns, cells, strict=True) if cell != ABSENT
            )
            self.console.print(Text("  ".join(filter(None, (f"step {step}", *pairs, self._left)))))
            return
        self._rows.append((step, *cells))
        self._refresh()

    def doing(self, text: str) -> None:
        """Below the table of a terminal: what the run does now. Says nothing elsewhere."""
        self._doing = text
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def note(self, text: str) -> None:
        """Say something once, above the table."""
        self.console.print(Text(text))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Say how the run ended: the summary's values, nested ones on lines of their own."""
        plain = {name: value for name, value in summary.items() if not isinstance(value, Mapping)}
        self.note("done: " + ", ".join(f"{name} {value}" for name, value in plain.items()))
        for name, nested in summary.items():
            if isinstance(nested, Mapping):
                self.note(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in nested.items() if value))

    def _table(self) -> Group:
        now = Text("  ".join(filter(None, (self._doing, self._left))), style="dim")
        if not self._rows:
            return Group(now)
        tables = [self._without(GIVEN_UP[:gone]) for gone in range(len(GIVEN_UP) + 1)]
        free = self.console.options.update(max_width=1000)
        fits = (table for table in tables if self.console.measure(table, options=free).maximum <= self.console.width)
        return Group(Text(), next(fits, tables[-1]), now)

    def _without(self, words: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("step", justify="right", vertical="bottom", no_wrap=True)
        shown = [column.word not in words for column in self._columns]
        for column in compress(self._columns, shown):
            table.add_column(column.title, justify="right", vertical="bottom", no_wrap=True)
        for step, *cells in self._rows:
            table.add_row(step, *compress(cells, shown))
        return table
