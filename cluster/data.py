"""``python -m cluster data``: making the datasets of recipes, and checking a file before a run reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.config import RunConfig
from rayloop.core.config import Component
from rayloop.core.dataset import Dataset, Reader
from rayloop.core.failures import DataFailure
from rayloop.core.images import probe
from rayloop.core.types import ImageSource, Task
from recipes.arc_vision import miniwob

SHOWN = 20


def prepare_miniwob(out: Path, rows: dict[str, int], browser: str | None, jobs: int) -> int:
    """Render MiniWoB++ pages into ``out`` and compare them with the shipped set. Returns exit code 0; raises RayloopError."""
    manifest = miniwob.prepare(out, {**miniwob.ROWS, **rows}, browser, jobs)
    print("made with " + ", ".join(f"{name} {version}" for name, version in manifest["made_with"].items()))
    for split, described in manifest["splits"].items():
        print(f"{out / split}.parquet: {described['rows']} rows, sha256 {described['sha256']}")
        print(f"  {compared(out, split)}")
    return 0


def compared(out: Path, split: str) -> str:
    """How a new split compares with the shipped one of that name."""
    shipped = miniwob.SHIPPED / f"{split}.parquet"
    if not shipped.is_file():
        return "no such split is shipped"
    ours, theirs = miniwob.read_parquet(out / f"{split}.parquet"), miniwob.read_parquet(shipped)
    different = list(miniwob.differences(ours, theirs))
    if not different:
        return f"equal to the {len(theirs)} shipped rows"
    more = f"\n  and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    return f"{len(different)} differences from the shipped rows:\n  " + "\n  ".join(different[:SHOWN]) + more


def validate_run(config: RunConfig) -> int:
    """Check the rows of a run with its own reader: those to train on, and the held-out ones. Returns and raises as ``validate``."""
    files = [path for path in (config.data.train, config.data.eval) if path is not None]
    limit = config.environment.episode.max_image_pixels
    return max([validate(Path(path), config.data.reader, limit) for path in files])


def validate(path: Path, reader: Component, max_image_pixels: int) -> int:
    """Read every row with ``reader`` and open its images; print each bad row with file, row and reason.

    Returns 0 when all rows are usable, else 1. Raises ConfigError when the file or the reader cannot be used at all.
    """
    problems = 0

    def report(failure: DataFailure) -> None:
        nonlocal problems
        problems += 1
        print(failure)

    built: Reader = reader.build()
    dataset = Dataset(path, built, strict=False, quarantine=report)
    for task in dataset:
        for failure in unusable_images(task, dataset.where(task), max_image_pixels):
            report(failure)
    if warning := dataset.warning():
        print(f"warning: {warning}")
    print(f"{path}: {len(dataset)} rows read by {reader.use}, {problems} problems")
    return 1 if problems else 0


def unusable_images(task: Task, where: str, max_image_pixels: int) -> Iterator[DataFailure]:
    """A failure for each image of the task that cannot be shown, named after ``where``."""
    for part in (part for message in task.messages for part in message.parts if isinstance(part, ImageSource)):
        try:
            probe(part, max_image_pixels)
        except DataFailure as failure:
            yield DataFailure(where, str(failure))
