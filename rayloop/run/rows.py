"""The rows that a run trains on and is measured on; what cannot be used of them is reported."""

from __future__ import annotations

from typing import Protocol

from rayloop.core import incidents
from rayloop.core.events import Event
from rayloop.core.failures import DataFailure
from rayloop.core.types import Task
from rayloop.data.cursor import evenly
from rayloop.data.dataset import Dataset
from rayloop.run.config import RunConfig
from rayloop.run.folder import SHOWN


class Reports(Protocol):
    """Whom a run tells of events, and of rows that are quarantined (rayloop/run/reporter.py)."""

    def event(self, event: Event) -> None: ...

    def bad_row(self, failure: DataFailure) -> None: ...


def training_rows(config: RunConfig, reporter: Reports) -> Dataset:
    """``data.train``. Bad rows are quarantined; with ``data.strict`` the first raises DataFailure. ConfigError: there is none."""
    return _read(config.data.train, config, reporter)


def held_out_rows(config: RunConfig, reporter: Reports) -> list[Task]:
    """Rows of ``data.eval``, evenly over its sources; none without evaluations. Raises as ``training_rows``."""
    if not config.evaluation.every or config.data.eval is None:
        return []
    return evenly([*_read(config.data.eval, config, reporter)], config.evaluation.limit)


def _read(path: str, config: RunConfig, reporter: Reports) -> Dataset:
    left_out: list[DataFailure] = []

    def leave_out(failure: DataFailure) -> None:
        left_out.append(failure)
        reporter.bad_row(failure)

    dataset = Dataset(path, config.data.reader.build(), config.data.strict, leave_out, config.environment.kinds)
    if len(left_out) > SHOWN:
        read = len(left_out) + len(dataset)
        why = f"{len(left_out)} of the {read} rows of {path} are left out; quarantine.jsonl of the run lists each with its reason"
        reporter.event(incidents.DataWarning(why=why))
    if warning := dataset.warning():
        reporter.event(incidents.DataWarning(why=warning))
    return dataset
