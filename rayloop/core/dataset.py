"""Datasets: rows of a JSONL or parquet file as tasks, and the order in which a run visits them.

A row that cannot become a task is quarantined with its file, line and reason, or ends the run when ``strict`` is set.
"""

from __future__ import annotations

import base64
import binascii
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rayloop.core.config import Settings as _Settings
from rayloop.core.failures import CheckpointError, ConfigError, DataFailure
from rayloop.core.schema import short
from rayloop.core.seeds import derive
from rayloop.core.types import ImageSource, Message, Task

PLACEHOLDER = "<image>"
"""Where an image goes inside a text, in verl's and TRL's datasets."""


TRUTHS = ("reward_model.ground_truth", "ground_truth", "answer", "answers", "solution", "label", "target")
"""Columns in which datasets keep the answer; the first that a row has counts."""
_ENCODED = ("iVBORw0KGgo", "/9j/", "UklGR")
"""How PNG, JPEG and WebP begin in base64."""
_LONGEST_PATH = 4096
"""Characters; Linux has no longer ones."""


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
        """file:line of a task of this dataset; the id of one that is not."""
        return self._lines.get(task.id, task.id)

    def warning(self) -> str:
        """What may be wrong though every row can be read, in words; empty when nothing is."""
        if any(task.ground_truth is not None for task in self._tasks):
            return ""
        columns = ", ".join(name for name in self._tasks[0].extra if name != "prompt") or "none"
        return (
            f"none of the {len(self)} rows of {self.path} has an answer, so a reward that compares with it cannot work. ChatRows "
            f"looks for {', '.join(TRUTHS)}; the rows' other columns: {columns}. Name the right one with data.reader.with.truth"
        )


def _task(reader: Reader, row: Any, where: str, root: Path) -> Task:
    if isinstance(row, DataFailure):
        raise row
    if not isinstance(row, Mapping):
        raise DataFailure(where, f"expected an object, found {type(row).__name__}")
    try:
        return reader.task(row, where, root)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataFailure(where, f"{type(reader).__name__} cannot read the row: {short(error, 200)}") from error


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
    """Reads rows ``{prompt, images, answer, ...}``: the columns of verl, TRL and most datasets of the Hub.

    ``prompt`` is a text, or a list of {role, content}, possibly as a JSON string; the k-th ``<image>`` of all contents is the
    k-th entry of ``images`` (see ``image_entry``). The id is ``id``, else that of ``extra_info`` (its id, or
    data_source/split/index), else file:line. ``data_source`` splits the metrics. Every column, and what is in
    ``extra_info``, is in the task's ``extra``, for rewards and environments; ``prompt`` only when it is a text.
    """

    class Settings(_Settings):
        prompt: str = "prompt"
        """Column of the messages. Set it when yours is called otherwise, for example ``question``."""
        images: str = "images"
        """Column of the images; may be absent or empty."""
        truth: str | None = None
        """Column of the answer (``a.b``: key ``b`` of column ``a``), which every row must then have. None: the first
        that a row has of reward_model.ground_truth, ground_truth, answer, answers, solution, label, target; it may have none."""

    def __init__(self, settings: ChatRows.Settings) -> None:
        self._settings = settings

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        settings = self._settings
        prompt = field(row, settings.prompt, where)
        plain = {}
        if isinstance(prompt, str) and prompt.lstrip().startswith("["):
            prompt = json.loads(prompt)
        elif isinstance(prompt, str):
            plain, prompt = {"prompt": prompt}, [{"role": "user", "content": prompt}]
        images = [image_entry(entry, where, root) for entry in row.get(settings.images) or ()]
        info = row.get("extra_info") or {}
        columns = {name: value for name, value in row.items() if name != "prompt"}
        return Task(
            _identity(row, info, where),
            place_images([(field(m, "role", where), field(m, "content", where)) for m in prompt], images, where),
            self._truth(row, where),
            str(row.get("data_source") or ""),
            {**columns, **plain, **info},
        )

    def _truth(self, row: Mapping[str, Any], where: str) -> Any:
        if self._settings.truth is not None:
            return field({self._settings.truth: _at(row, self._settings.truth)}, self._settings.truth, where)
        return next((value for name in TRUTHS if (value := _at(row, name)) is not None), None)


def _at(row: Mapping[str, Any], name: str) -> Any:
    """The value of column ``a``, or for ``a.b`` of key ``b`` in it; None where there is none."""
    if name in row:
        return row[name]
    column, _, key = name.partition(".")
    inner = row.get(column) or {}
    return inner.get(key) if key else None


def field(row: Mapping[str, Any], name: str, where: str) -> Any:
    """A required, non-empty field of a row. Raises DataFailure."""
    value = row.get(name)
    if value is None or value == "" or value == []:
        raise DataFailure(where, f"the field {name!r} is missing or empty")
    return value


def image_entry(entry: Any, where: str, root: Path) -> ImageSource:
    """An image column's entry: a path (relative to ``root`` unless absolute), a data URL or base64, as such, or in a mapping as
    ``image``, ``path`` or ``bytes``.

    Raises DataFailure for anything else, URLs included: nothing is downloaded.
    """
    value: Any = entry
    if isinstance(entry, Mapping):
        value = next((entry[key] for key in ("bytes", "image", "path") if entry.get(key) is not None), None)
        if isinstance(value, bytes):
            return ImageSource(data=value)
        if isinstance(value, str) and entry.get("bytes") is not None:
            return ImageSource(data=_decoded(value, where))
    if not isinstance(value, str) or not value:
        expected = "a path, a data URL, {image: path}, {path: ...} or {bytes: ...}"
        raise DataFailure(where, f"an image must be {expected}, found {short(entry)}")
    if value.startswith("data:") or (value.startswith(_ENCODED) and re.fullmatch(r"[\w+/=\s-]{100,}", value)):
        return ImageSource(data=_decoded(value, where))
    if re.match("https?://", value):
        raise DataFailure(where, f"images are not downloaded: {short(value)}. Save it beside the data and give its path")
    if len(value) > _LONGEST_PATH:
        raise DataFailure(where, f"a path of {len(value)} characters: {short(value)}")
    return ImageSource(path=str(root / value.removeprefix("file://")))


def _decoded(text: str, where: str) -> bytes:
    """The bytes of base64 text, line breaks allowed, or of a data URL. Raises DataFailure."""
    head, _, body = text.partition(",") if text.startswith("data:") else ("base64", "", text)
    try:
        if not head.endswith("base64"):
            raise ValueError("a data URL must end in ;base64 before the comma")
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataFailure(where, f"the image is no base64: {error}, in {short(text)}") from error


def place_images(contents: Sequence[tuple[str, str]], images: Sequence[ImageSource], where: str) -> tuple[Message, ...]:
    """Messages from (role, text) pairs, each ``<image>`` replaced by the next image.

    Raises DataFailure when placeholders and images differ in number.
    """
    for role, text in contents:
        if not (isinstance(role, str) and isinstance(text, str)):
            found = f"found {short(role)} and {short(text)}"
            raise DataFailure(where, f"a message's role and content must be texts, {found}")
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
