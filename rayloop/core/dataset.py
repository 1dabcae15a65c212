"""Datasets: rows of a JSONL or parquet file as tasks, and the order in which a run visits them.

A row that cannot become a task is quarantined with its file, line and reason, or ends the run when ``strict`` is set.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rayloop.core.config import Settings as _Settings
from rayloop.core.failures import CheckpointError, ConfigError, DataFailure
from rayloop.core.seeds import derive
from rayloop.core.types import ImageSource, Message, Task

PLACEHOLDER = "<image>"
"""Where an image goes inside a text, in verl's and TRL's datasets."""


class Reader(Protocol):
    """Turns one row into a task. ``where`` is the row's file:line; relative image paths start at ``root``.

    Raises DataFailure.
    """

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task: ...


class Dataset:
    """The tasks of one file, read when made; images are not opened.

    ``quarantine`` is told of every row left out (``path`` is its file:line). Raises ConfigError when the file is missing, no
    row is left, or two rows share an id; with ``strict`` DataFailure at the first bad row.
    """

    def __init__(
        self, path: str | Path, reader: Reader, strict: bool, quarantine: Callable[[DataFailure], None]
    ) -> None:
        self.path = Path(path)
        root = self.path.resolve().parent
        tasks: dict[str, Task] = {}
        lines: dict[str, str] = {}
        for where, row in _rows(self.path):
            try:
                task = _task(reader, row, where, root)
            except DataFailure as failure:
                if strict:
                    raise
                quarantine(failure)
                continue
            if task.id in tasks:
                raise ConfigError(f"{where}: the id {task.id!r} is that of {lines[task.id]} too; ids must be unique")
            tasks[task.id], lines[task.id] = task, where
        if not tasks:
            raise ConfigError(f"{self.path} holds no usable row; see the quarantined rows for the reasons")
        self._tasks = tuple(tasks.values())
        self._lines = lines

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def where(self, task: Task) -> str:
        """file:line of a task of this dataset."""
        return self._lines[task.id]


def _task(reader: Reader, row: Any, where: str, root: Path) -> Task:
    if isinstance(row, DataFailure):
        raise row
    if not isinstance(row, Mapping):
        raise DataFailure(where, f"expected an object, found {type(row).__name__}")
    try:
        return reader.task(row, where, root)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataFailure(where, f"{type(reader).__name__} cannot read the row: {error!r}") from error


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, row) of each row; a line that cannot be parsed comes as the DataFailure that says why."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file; data files are JSONL or parquet")
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                yield where, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                yield where, DataFailure(where, f"not a line of UTF-8 JSON: {error}")


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} cannot be read as parquet behind row {number}: {error}") from error


class ChatRows:
    """Reads verl's columns: prompt, images, reward_model.ground_truth, data_source, extra_info.

    ``prompt`` is a list of {role, content}, possibly as a JSON string; the k-th ``<image>`` of all contents is the k-th
    entry of ``images`` (a path, {image: path}, {path: ...} or {bytes: ...}). The id is ``id``, else that of extra_info
    (its id, or data_source/split/index), else file:line.
    """

    class Settings(_Settings):
        prompt: str = "prompt"
        """Column of the messages."""
        images: str = "images"
        """Column of the images; may be absent or empty."""

    def __init__(self, settings: ChatRows.Settings) -> None:
        self._settings = settings

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        prompt = field(row, self._settings.prompt, where)
        if isinstance(prompt, str):
            prompt = json.loads(prompt) if prompt.lstrip().startswith("[") else [{"role": "user", "content": prompt}]
        images = [image_entry(entry, where, root) for entry in row.get(self._settings.images) or ()]
        reward_model = row.get("reward_model") or {}
        extra = row.get("extra_info") or {}
        return Task(
            _identity(row, extra, where),
            place_images([(field(m, "role", where), field(m, "content", where)) for m in prompt], images, where),
            reward_model.get("ground_truth", row.get("ground_truth")),
            str(row.get("data_source") or ""),
            extra,
        )


def field(row: Mapping[str, Any], name: str, where: str) -> Any:
    """A required, non-empty field of a row. Raises DataFailure."""
    value = row.get(name)
    if value is None or value == "" or value == []:
        raise DataFailure(where, f"the field {name!r} is missing or empty")
    return value


def image_entry(entry: Any, where: str, root: Path) -> ImageSource:
    """An image column's entry: a path (relative to ``root`` unless absolute), {image: path}, {path: ...} or {bytes: ...}.

    Raises DataFailure for anything else.
    """
    if isinstance(entry, Mapping):
        data = entry.get("bytes")
        if isinstance(data, bytes):
            return ImageSource(data=data)
        entry = entry.get("image", entry.get("path"))
    if not isinstance(entry, str) or not entry:
        raise DataFailure(where, f"an image must be a path, {{image: path}} or {{bytes: ...}}, found {entry!r:.80}")
    return ImageSource(path=str(root / entry.removeprefix("file://")))


def place_images(contents: Sequence[tuple[str, str]], images: Sequence[ImageSource], where: str) -> tuple[Message, ...]:
    """Messages from (role, text) pairs, each ``<image>`` replaced by the next image.

    Raises DataFailure when placeholders and images differ in number.
    """
    for role, text in contents:
        if not (isinstance(role, str) and isinstance(text, str)):
            raise DataFailure(where, f"a message's role and content must be texts, found {role!r} and {text!r}")
    if (places := sum(text.count(PLACEHOLDER) for _, text in contents)) != len(images):
        raise DataFailure(where, f"{places} {PLACEHOLDER} placeholders for {len(images)} images")
    remaining = iter(images)
    messages = []
    for role, text in contents:
        first, *others = text.split(PLACEHOLDER)
        parts: list[str | ImageSource] = [first]
        for other in others:
            parts += [next(remaining), other]
        messages.append(Message(role, tuple(part for part in parts if part != "")))
    return tuple(messages)


def _identity(row: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> str:
    for holder in (row, extra):
        if holder.get("id") is not None:
            return str(holder["id"])
    if extra.get("index") is not None:
        parts = (row.get("data_source"), extra.get("split"), extra["index"])
        return "/".join(str(part) for part in parts if part is not None)
    return Path(where).name


class TaskCursor:
    """Which task comes next: each epoch is a permutation of 0 .. count - 1 that follows from the seed and the epoch."""

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        if count < 1:
            raise ValueError(f"a cursor needs at least one task, not {count}")
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._begin(0, 0)

    def next(self) -> int:
        """The index of the next task; begins another epoch when all have been visited."""
        if self._position == self._count:
            self._begin(self._epoch + 1, 0)
        self._position += 1
        return self._order[self._position - 1]

    def visits(self, index: int) -> int:
        """How often ``next`` has returned ``index``."""
        return self._epoch + (self._rank[index] < self._position)

    def state(self) -> dict[str, int | bool]:
        """Plain values for a checkpoint."""
        return {
            "count": self._count,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: Mapping[str, int | bool]) -> None:
        """Continue where ``state`` was taken. Raises CheckpointError when data, seed or shuffling have changed."""
        here = self.state()
        fixed = [name for name in ("count", "seed", "shuffle") if state[name] != here[name]]
        changed = [f"{name}: {state[name]} then, {here[name]} now" for name in fixed]
        if changed:
            raise CheckpointError(f"the checkpoint visits other tasks than this run ({'; '.join(changed)})")
        self._begin(int(state["epoch"]), int(state["position"]))

    def _begin(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = list(range(self._count))
        if self._shuffle:
            random.Random(derive(self._seed, "epoch", epoch)).shuffle(self._order)
        self._rank = {index: rank for rank, index in enumerate(self._order)}
