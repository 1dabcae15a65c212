"""Checking a file of rows before a run reads it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from rayloop.config.settings import Component
from rayloop.core.failures import DataFailure
from rayloop.core.types import Task
from rayloop.data.dataset import Dataset, Reader
from rayloop.data.images import probe


def validate(path: Path, reader: Component, kinds: Collection[str] = ()) -> int:
    """Read every row with ``reader`` and open its images; print each bad row with file, row and reason.

    Returns 0 when all rows are usable, else 1. Raises ConfigError when the file or the reader cannot be used at all, or a row names
    none of the ``kinds`` of environment, if there are any.
    """
    problems = 0

    def report(failure: DataFailure) -> None:
        nonlocal problems
        problems += 1
        print(failure)

    built: Reader = reader.build()
    dataset = Dataset(path, built, strict=False, quarantine=report, kinds=kinds)
    for task in dataset:
        for failure in unusable_images(task, dataset.where(task)):
            report(failure)
    if warning := dataset.warning():
        print(f"warning: {warning}")
    print(f"{path}: {len(dataset)} rows read by {reader.use}, {problems} problems")
    return 1 if problems else 0


def unusable_images(task: Task, where: str) -> Iterator[DataFailure]:
    """A failure for each image of the task that cannot be shown, named after ``where``."""
    for image in task.images:
        try:
            probe(image)
        except DataFailure as failure:
            yield DataFailure(where, str(failure))
