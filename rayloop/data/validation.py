"""Checking files of rows before a run reads them: schema, images, repetitions, long prompts,
held-out rows that are trained on.
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
    """The problems of a file, and the place of the first row with each content (``rows``) and each
    image (``images``), by hash.
    """

    path: Path
    problems: int = 0
    rows: dict[str, str] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)


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
    """Read every row with ``reader``, open its images, and print each bad row; a prompt of more
    than ``limit`` tokens by ``length`` is bad, and an image outside of the file's folder, unless it
    may lie ``anywhere``. ``reads``: the environment reads the columns. Raises ConfigError for a bad
    file or reader, an environment outside ``kinds``.
    """
    found, lengths, repeated = Checked(path), list[int](), list[str]()

    def report(failure: DataFailure) -> None:
        found.problems += 1
        print(failure)

    built: Reader = reader.build()
    dataset = Dataset(path, built, strict=False, quarantine=report, kinds=kinds, anywhere=anywhere)
    for task in dataset:
        where = dataset.where(task)
        try:
            shown = [hashlib.sha256(probe(image)[0]).hexdigest() for image in task.images]
            if length is not None:
                lengths.append(length(task))
                if lengths[-1] > limit:
                    raise DataFailure(
                        where,
                        f"a prompt of {lengths[-1]} tokens, above max_prompt_tokens ({limit})",
                    )
        except DataFailure as failure:
            # The image's own path says nothing about which row shows it.
            report(failure if failure.path == where else DataFailure(where, str(failure)))
            continue
        whole = _row(task, shown, reads or bool(task.environment))
        if whole in found.rows:
            repeated.append(f"{where} (as {found.rows[whole]})")
        found.rows.setdefault(whole, where)
        for image in shown:
            found.images.setdefault(image, where)
    if warning := dataset.warning(compares):
        print(f"warning: {warning}")
    if offering := sum(bool(task.tools) for task in dataset):
        print(
            f"{path}: {offering} rows have tools, which the chat template shows where the"
            " environment has none of its own"
        )
    elif any(task.extra.get("tools") for task in dataset):
        print(
            f"warning: the column 'tools' of {path} is no list of schemas, and nothing shows it to"
            " the policy"
        )
    if repeated:
        print(f"warning: {len(repeated)} rows of {path} repeat another one: {_some(repeated)}")
    if lengths:
        print(
            f"{path}: prompts of {min(lengths)} to {max(lengths)} tokens, half of them up to"
            f" {median(lengths):.0f}"
        )
    print(
        f"{path}: {counted(len(dataset), 'row')} read by {reader.use},"
        f" {counted(found.problems, 'problem')}"
    )
    return found


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


def _row(task: Task, images: Sequence[str], reads: bool) -> str:
    """The hash of what an episode of the task depends on, whatever its id: the question and its
    images; and the other columns, of which games that begin with the same image differ, where an
    environment ``reads`` them or there is no image.
    """
    texts = [part for message in task.messages for part in message.parts if isinstance(part, str)]
    texts += [str(value) for message in task.messages for value in message.fields.values()]
    # The columns are sorted: files of one data set may have them in another order.
    own = sorted(
        str((k, v)) for k, v in task.extra.items() if k not in PLACES and not like_images(v)
    )
    return hashlib.sha256(
        repr((texts, images, own if reads or not images else "")).encode()
    ).hexdigest()


def _some(many: Sequence[str], shown: int = 3) -> str:
    return ", ".join(many[:shown]) + (f" and {len(many) - shown} more" if len(many) > shown else "")


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
