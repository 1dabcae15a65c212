"""Checks of files of rows before a run reads them.

They find wrong schemas, broken images, repeated rows, long prompts, and held-out rows that are
trained on.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError, DataFailure, counted
from rayloop.core.types import Task
from rayloop.data.dataset import Dataset, Reader, like_images
from rayloop.data.images import probe

PLACES = ("id", "root", "index", "split")
"""Columns that say which row it is, not what it asks."""
Length = Callable[[Task], int]
"""Tokens of a task's prompt. Raises DataFailure when it cannot be rendered."""


@dataclass
class Checked:
    """The number of a file's problems, and the places of its rows and images."""

    path: Path
    problems: int = 0
    rows: dict[str, str] = field(default_factory=dict)
    """Hash of a content -> file:line of the first row that has it."""
    images: dict[str, str] = field(default_factory=dict)
    """Hash of an image -> file:line of the first row that has it."""


def check(
    path: Path,
    reader: Component,
    kinds: Collection[str] = (),
    length: Length | None = None,
    limit: int = 0,
    compares: bool = True,
    reads: bool = False,
    anywhere: bool = False,
) -> Checked:
    """Read every row with ``reader``, open its images, and print each bad row.

    A prompt of more than ``limit`` tokens by ``length`` is bad, and an image outside of the file's
    folder, unless images may be ``anywhere``. ``reads``: the environment reads the columns. Raises
    ConfigError for a bad file or reader, and for an environment outside ``kinds``.
    """
    result = Checked(path)

    def report(failure: DataFailure) -> None:
        result.problems += 1
        print(failure)

    built: Reader = reader.build()
    dataset = Dataset(path, built, strict=False, quarantine=report, kinds=kinds, anywhere=anywhere)
    lengths: list[int] = []
    repetitions: list[str] = []
    for task in dataset:
        where = dataset.where(task)
        try:
            image_hashes = [hashlib.sha256(probe(image)[0]).hexdigest() for image in task.images]
            if length is not None:
                lengths.append(length(task))
                _check_length(lengths[-1], limit, where)
        except DataFailure as failure:
            # The image's own path says nothing about which row shows it.
            report(failure if failure.path == where else DataFailure(where, str(failure)))
            continue
        row_hash = _row_hash(task, image_hashes, reads or bool(task.environment))
        if row_hash in result.rows:
            repetitions.append(f"{where} (as {result.rows[row_hash]})")
        result.rows.setdefault(row_hash, where)
        for image_hash in image_hashes:
            result.images.setdefault(image_hash, where)
    _print_warnings(dataset, compares)
    if repetitions:
        count = len(repetitions)
        print(f"warning: {count} rows of {path} repeat another one: {_some(repetitions)}")
    if lengths:
        print(
            f"{path}: prompts of {min(lengths)} to {max(lengths)} tokens, half of them up to"
            f" {median(lengths):.0f}"
        )
    print(
        f"{path}: {counted(len(dataset), 'row')} read by {reader.use},"
        f" {counted(result.problems, 'problem')}"
    )
    return result


def _check_length(tokens: int, limit: int, where: str) -> None:
    """Raises DataFailure for a prompt of more than ``limit`` tokens."""
    if tokens > limit:
        raise DataFailure(where, f"a prompt of {tokens} tokens, above max_prompt_tokens ({limit})")


def _print_warnings(dataset: Dataset, compares: bool) -> None:
    """Print the dataset's warning, and whether the policy is shown the tools of its rows."""
    warning = dataset.warning(compares)
    if warning:
        print(f"warning: {warning}")
    rows_with_tools = sum(bool(task.tools) for task in dataset)
    if rows_with_tools:
        print(
            f"{dataset.path}: {rows_with_tools} rows have tools, which the chat template shows"
            " where the environment has no tools itself"
        )
    elif any(task.extra.get("tools") for task in dataset):
        print(
            f"warning: the column 'tools' of {dataset.path} is not a list of schemas, and nothing"
            " shows it to the policy"
        )


def leaks(train: Checked, held_out: Checked) -> int:
    """Print the held-out rows that are trained on, and how many share only an image.

    Returns the number of the former.
    """
    same = [
        f"{where} (as {train.rows[row]})"
        for row, where in held_out.rows.items()
        if row in train.rows
    ]
    images = [
        f"{where} (as {train.images[image]})"
        for image, where in held_out.images.items()
        if image in train.images
    ]
    if same:
        print(
            f"{held_out.path}: {len(same)} held-out rows are trained on: {_some(same)}. Leave them"
            " out of one of the files"
        )
    elif images:
        print(
            f"warning: {len(images)} images of {held_out.path} are trained on, with other questions"
            f" or columns: {_some(images)}"
        )
    return len(same)


def unusable_images(task: Task, where: str) -> Iterator[DataFailure]:
    """A failure for each image of the task that cannot be shown, named after ``where``."""
    for image in task.images:
        try:
            probe(image)
        except DataFailure as failure:
            yield DataFailure(where, str(failure))


def _row_hash(task: Task, images: Sequence[str], reads: bool) -> str:
    """The hash of everything that an episode of the task depends on, except its id.

    That is the question with its images. The other columns count too where an environment ``reads``
    them or the task has no image: games that begin with the same image differ in them.
    """
    texts: list[str] = []
    fields: list[str] = []
    for message in task.messages:
        texts += [part for part in message.parts if isinstance(part, str)]
        fields += map(str, message.fields.values())
    columns: list[str] | str = ""
    if reads or not images:
        # The columns are sorted: files of one data set may have them in another order.
        columns = sorted(
            str((name, value))
            for name, value in task.extra.items()
            if name not in PLACES and not like_images(value)
        )
    return hashlib.sha256(repr((texts + fields, images, columns)).encode()).hexdigest()


def _some(texts: Sequence[str], shown: int = 3) -> str:
    """The first texts, and the number of the others."""
    others = len(texts) - shown
    return ", ".join(texts[:shown]) + (f" and {others} more" if others > 0 else "")


def first_intact(dataset: Dataset, write: Callable[[str], None], shown: int) -> Task:
    """The first task whose images can be shown; ``write`` gets the first ``shown`` that cannot.

    Raises ConfigError without one.
    """
    first: DataFailure | None = None
    for number, task in enumerate(dataset):
        failure = next(unusable_images(task, dataset.where(task)), None)
        if failure is None:
            return task
        first = first or failure
        if number < shown:
            write(f"left out: {failure}")
    raise ConfigError(
        f"{dataset.path}: the images of none of its {len(dataset)} rows can be shown. The first:"
        f" {first}"
    )
