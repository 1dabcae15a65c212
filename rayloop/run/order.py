"""The rows that a run trains on and is measured on, and a curriculum (``data.order``).

Rows of ``tier`` 0 come first, then rows of ``tier`` 1, ...
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Protocol

from pydantic import Field

from rayloop.config.settings import LocalPath, SettingsModel
from rayloop.core import incidents
from rayloop.core.events import Event
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.types import Task
from rayloop.data.cursor import evenly
from rayloop.data.dataset import Dataset
from rayloop.measure.controls import RIGHT, SAMPLED
from rayloop.run.config import RunConfig
from rayloop.run.folder import SHOWN_ROWS, RunFolder
from rayloop.run.held_out import read_items


class Reports(Protocol):
    """Receives the events of a run, and the rows that are quarantined (rayloop/run/reporter.py)."""

    def event(self, event: Event) -> None:
        """Record an event."""

    def bad_row(self, failure: DataFailure) -> None:
        """Record a row that is quarantined."""


def training_rows(config: RunConfig, reporter: Reports) -> Dataset:
    """``data.train``. Bad rows are quarantined. Raises ConfigError when no row is left."""
    return _read(config.data.train, config, reporter)


def held_out_rows(config: RunConfig, reporter: Reports) -> list[Task]:
    """Rows of ``data.eval``, evenly over its sources; none without evaluations.

    Raises as ``training_rows``.
    """
    if not config.evaluation.every or config.data.eval is None:
        return []
    return evenly([*_read(config.data.eval, config, reporter)], config.evaluation.limit)


def _read(path: str, config: RunConfig, reporter: Reports) -> Dataset:
    left_out: list[DataFailure] = []

    def leave_out(failure: DataFailure) -> None:
        left_out.append(failure)
        reporter.bad_row(failure)

    dataset = config.data.rows(path, leave_out, config.environment.kinds)
    if len(left_out) > SHOWN_ROWS:
        total = len(left_out) + len(dataset)
        why = (
            f"{len(left_out)} of the {total} rows of {path} are left out; quarantine.jsonl of the"
            " run lists each with its reason"
        )
        reporter.event(incidents.DataWarning(why=why))
    warning = dataset.warning(config.reward.compares)
    if warning:
        reporter.event(incidents.DataWarning(why=warning))
    return dataset


class Order(Protocol):
    """Says of each row of ``data.train`` when its turn is.

    Rows of a tier come in the order that they would have without.
    """

    def tier(self, task: Task) -> int:
        """The row's tier; lower ones come first."""


class BySolveRate:
    """First the rows that a policy sometimes solves, then unknown ones, then all others.

    ``rates``: the folder of an evaluation of the training rows (``eval CONFIG --data TRAIN
    --samples 4 --out DIR``), or of an earlier run.
    """

    class Settings(SettingsModel):
        rates: LocalPath
        """The ``items.jsonl`` of that evaluation, or the folder of an earlier run with
        ``keep_rollouts`` above 0.
        """
        low: float = Field(0.1, ge=0, le=1)
        """Share of right answers from which a row comes first.

        Raise it to begin with easier rows.
        """
        high: float = Field(0.9, ge=0, le=1)
        """Share of right answers up to which a row comes first.

        Lower it when a run pays for what the policy knows.
        """
        least: float = 1.0
        """Reward from which an answer is right. Lower it for rewards that are seldom full."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError when there is nothing scored at ``rates``."""
        answers = defaultdict[str, list[bool]](list)
        for task, reward in _rewards(Path(settings.rates)):
            if reward is not None:
                answers[task].append(reward >= settings.least)
        if not answers:
            raise ConfigError(
                f"data.order: {settings.rates} has no scored answer; name the items.jsonl of an"
                " `eval`, or the folder of a run that had keep_rollouts above 0"
            )
        self._rates = {task: fmean(right) for task, right in answers.items()}
        self._settings = settings

    def tier(self, task: Task) -> int:
        """0 for rows within the range, 1 for unknown ones, 2 for all others."""
        rate = self._rates.get(task.id)
        if rate is None:
            return 1
        return 0 if self._settings.low <= rate <= self._settings.high else 2


def _rewards(path: Path) -> Iterator[tuple[str, float | None]]:
    """Task and reward of each answer to the image of its task, or of a run's recorded rollouts.

    Replayed rollouts are left out.
    """
    if not path.is_dir():
        yield from (
            (item.task, item.reward) for item in read_items(path) if item.arm in (RIGHT, SAMPLED)
        )
        return
    yield from (
        (record["task"], record["reward"])
        for record in RunFolder.at(path).rollouts
        if not record["replayed"]
    )
