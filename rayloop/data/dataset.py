"""Rows of a data file as tasks.

A row that cannot become a task is quarantined with its place and the reason.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rayloop.config.explain import short
from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.types import ImageSource, Task
from rayloop.data.messages import (
    ENCODED,
    blank,
    field,
    image_entry,
    messages,
    offered,
    without_nulls,
)
from rayloop.data.rows import parsed, rows

TRUTHS = (
    "reward_model.ground_truth",
    "ground_truth",
    "answer",
    "answers",
    "solution",
    "label",
    "target",
)
"""Columns in which datasets keep the answer; the first that a row has counts."""
PROMPTS = ("prompt", "messages", "problem")
"""Columns in which datasets keep the question; the first that a row has counts, unless another is
named.
"""
_FROM_PARQUET = re.compile(r"\.parquet:\d+$")
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


class Reader(Protocol):
    """Turns one row into a task.

    ``where`` is the row's file:line; relative image paths start at ``root``. A task whose
    ``environment`` is empty gets the text in the row's column of that name. Raises DataFailure.
    """

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task."""


class Dataset:
    """The tasks of one file, without images.

    ``quarantine`` receives each bad row; with ``strict`` the first raises DataFailure. A row may
    name files of its own folder only, links followed, unless they may lie ``anywhere``: it may be a
    stranger's, who would have any file of this machine shown to the policy. Raises ConfigError when
    no row is left, ids are equal, or a row names an environment outside ``kinds``.
    """

    def __init__(
        self,
        path: str | Path,
        reader: Reader,
        strict: bool,
        quarantine: Callable[[DataFailure], None],
        kinds: Collection[str] = (),
        *,
        anywhere: bool = False,
    ) -> None:
        self.path = Path(path)
        root = self.path.resolve().parent
        tasks: dict[str, Task] = {}
        lines: dict[str, str] = {}
        read = 0
        first = ""  # why the first row was left out
        for where, row in rows(self.path):
            read += 1
            try:
                task = _task(reader, row, where, root)
                if not anywhere:
                    _below(root, task, where)
            except DataFailure as failure:
                if strict:
                    raise
                quarantine(failure)
                first = first or str(failure)
                continue
            if task.id in tasks:
                raise ConfigError(
                    f"{where}: the id {task.id!r} is that of {lines[task.id]} too; ids must be"
                    " unique"
                )
            if kinds and task.environment and task.environment not in kinds:
                known = ", ".join(kinds)
                raise ConfigError(
                    f"{where}: the row names the environment {task.environment!r}, and"
                    f" environment.kinds has {known}. Add it there, or correct the row"
                )
            tasks[task.id], lines[task.id] = task, where
        if not tasks:
            why = f"no usable row among {read}. The first: {first}" if read else "no rows"
            raise ConfigError(f"{self.path} holds {why}")
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

    def warning(self, compares: bool = True) -> str:
        """What may be wrong though every row can be read; empty when nothing is.

        ``compares``: the reward reads answers of rows.
        """
        return ". ".join(
            filter(None, (self._without_truth() if compares else "", self._without_images()))
        )

    def _without_truth(self) -> str:
        bare = [task for task in self._tasks if task.ground_truth is None]
        if not bare:
            return ""
        if len(bare) < len(self):
            return (
                f"{len(bare)} of the {len(self)} rows of {self.path} have no answer, the first at"
                f" {self.where(bare[0])}"
            )
        columns = ", ".join(name for name in self._tasks[0].extra if name != "prompt") or "none"
        return (
            f"none of the {len(self)} rows of {self.path} has an answer: right where the"
            " environment gives the result, but a reward that compares cannot work. ChatRows looks"
            f" for {', '.join(TRUTHS)}; the rows' other columns: {columns}. Name the right one with"
            " data.reader.with.truth"
        )

    def _without_images(self) -> str:
        """Columns that look like images when the policy is shown none."""
        if any(task.images for task in self._tasks):
            return ""
        found = dict.fromkeys(
            name for task in self._tasks for name, value in task.extra.items() if like_images(value)
        )
        if not found:
            return ""
        return (
            f"none of the {len(self)} rows of {self.path} shows the policy an image, though these"
            f" columns look like images: {', '.join(found)}. Name the right one with"
            " data.reader.with.images"
        )


def like_images(value: Any) -> bool:
    """Whether a column's value is what datasets keep images as, in a list or by itself."""
    match value:
        case list() | tuple():
            return any(map(like_images, value))
        case Mapping():
            return any(map(like_images, (value.get("bytes"), value.get("path"))))
        case str():
            return value.startswith(("data:image/", *ENCODED)) or value.lower().endswith(_SUFFIXES)
    return isinstance(value, bytes) and value.startswith(_MAGIC)


def _task(reader: Reader, row: Any, where: str, root: Path) -> Task:
    if isinstance(row, DataFailure):
        raise row
    if not isinstance(row, Mapping):
        raise DataFailure(where, f"expected an object, found {type(row).__name__}")
    try:
        task = reader.task(row, where, root)
        named = row.get("environment")
        environment = named if isinstance(named, str) and not task.environment else task.environment
        return dataclasses.replace(task, id=str(task.id), environment=environment)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataFailure(
            where, f"{type(reader).__name__} cannot read the row: {short(error, 200)}"
        ) from error


def _below(root: Path, task: Task, where: str) -> None:
    """Raises DataFailure when the task names a file outside of ``root``."""
    paths = [image.path for image in task.images if image.path]
    for video in _several(task.extra.get("videos")):
        paths += [path for path in _several(video) if isinstance(path, str)]
    for path in paths:
        # Links are followed first: one in the folder could lead to any file.
        if not Path(os.path.realpath(path)).is_relative_to(root):
            why = (
                f"{path} lies outside the folder of its data; data.anywhere=true allows it, for"
                " rows that you trust"
            )
            raise DataFailure(where, why)


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


class ChatRows:
    """Reads rows ``{prompt, images, answer, ...}``: the columns of verl, TRL and the Hub.

    ``prompt`` is a text, or a list of {role, content} (or its JSON) that may have calls of tools.
    ``tools`` has schemas, for environments without tools of their own. The k-th ``<image>`` (or
    image part) is the row's k-th image; without any, images come first. The id is ``id``,
    ``extra_info``'s id or data_source/split/index, or file:line. ``extra`` has the keys of
    ``extra_info`` and every column except pictures that the row itself holds.
    """

    class Settings(SettingsModel):
        prompt: str = "prompt"
        """Column of the messages; by default ``messages`` (whose last answer is the row's) and
        ``problem`` will do too. Set it when yours is called otherwise, for example ``question``.
        """
        images: str = "images"
        """Column of the images, a list or one alone; may be absent or empty.

        By default ``image`` will do too.
        """
        truth: str | None = None
        """Column of the answer (``a.b``: key ``b`` of column ``a``), which every row must then
        have. None: the first that a row has of reward_model.ground_truth, ground_truth, answer,
        answers, solution, label, target; it may have none.
        """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task. Raises DataFailure."""
        prompt = self._prompt(row, where)
        value = field(row, prompt, where)
        listed = _listed(value, where)
        plain = {"prompt": value} if isinstance(value, str) and listed is None else {}
        said = [{"role": "user", "content": value}] if listed is None else listed
        tools = parsed(row.get("tools"))
        if _FROM_PARQUET.search(where):
            said = without_nulls(said)
            tools = without_nulls(tools)
        answer = None
        if prompt == "messages":
            said, answer = _asked(said)
        _without_films(row, said, where)
        images = self._images(row, where, root)
        info = _mapping(row, "extra_info", where)
        shown = messages(said, images, where, root)
        apart = {"prompt"}
        if any(image.data is not None for message in shown for image in message.images):
            # The task has these pictures; beside it they would cost their size once more.
            apart.add(self._image_column(row))
            if listed is not None:
                apart.add(prompt)
        columns = {name: value for name, value in row.items() if name not in apart}
        truth = self._truth(row, where)
        return Task(
            _identity(row, info, where),
            shown,
            answer if truth is None else truth,
            str(row.get("data_source") or ""),
            {**columns, **plain, **info},
            tools=offered(tools),
        )

    def _prompt(self, row: Mapping[str, Any], where: str) -> str:
        """The column of the messages. Raises DataFailure for a row that has none."""
        prompt = self._settings.prompt
        usual = PROMPTS if prompt == ChatRows.Settings().prompt else (prompt,)
        found = next((name for name in usual if name in row), None)
        if found is None:
            present = ", ".join(list(row)[:20]) or "none"
            raise DataFailure(
                where,
                f"no column {prompt!r}; the row's: {present}. Name the right one with"
                " data.reader.with.prompt",
            )
        return found

    def _image_column(self, row: Mapping[str, Any]) -> str:
        column = self._settings.images
        if column == ChatRows.Settings().images and not row.get(column) and row.get("image"):
            return "image"
        return column

    def _images(self, row: Mapping[str, Any], where: str, root: Path) -> list[ImageSource]:
        entries = row.get(self._image_column(row)) or ()
        if isinstance(entries, str | bytes | Mapping):
            entries = (entries,)
        return [image_entry(entry, where, root) for entry in entries]

    def _truth(self, row: Mapping[str, Any], where: str) -> Any:
        name = self._settings.truth
        if name is not None:
            return field({name: _at(row, name, where)}, name, where)
        for known in TRUTHS:
            value = _at(row, known, where)
            if not blank(value):
                return value
        return None


def _asked(listed: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """The messages before a last answer, and that answer: a column ``messages`` has whole
    conversations.
    """
    last = listed[-1] if len(listed) > 1 else None
    if not (isinstance(last, Mapping) and last.get("role") == "assistant"):
        return listed, None
    said = last.get("content")
    if isinstance(said, list | tuple):
        said = "".join(str(part.get("text") or "") for part in said if isinstance(part, Mapping))
    return listed[:-1], said


def _without_films(row: Mapping[str, Any], listed: Sequence[Any], where: str) -> None:
    """Raises DataFailure for a text that has a place for a film or a sound of the row, of which the
    policy is shown nothing.
    """
    contents = [message.get("content") for message in listed if isinstance(message, Mapping)]
    texts = [content for content in contents if isinstance(content, str)]
    for kind in ("video", "audio"):
        has_one = row.get(kind) or row.get(f"{kind}s")
        if has_one and any(f"<{kind}>" in text for text in texts):
            raise DataFailure(
                where,
                f"<{kind}> in a text: the policy is shown no {kind}. Give frames as images, or"
                " another reader",
            )


def _listed(prompt: Any, where: str) -> Any:
    """The prompt as a list of messages; None when it is a text.

    A text in brackets is a list only when it reads as one.
    """
    if not isinstance(prompt, str | Sequence) and not hasattr(prompt, "tolist"):
        raise DataFailure(
            where,
            f"cannot read the row: its prompt is {short(prompt)}, neither a text nor a list of"
            " messages",
        )
    if not isinstance(prompt, str):
        return prompt
    if not prompt.lstrip().startswith("["):
        return None
    try:
        found = json.loads(prompt)
    except (ValueError, RecursionError) as error:
        # A question may begin with a bracket; only what looks like messages is an error.
        if re.match(r"\s*\[\s*\{\s*['\"]role['\"]", prompt):
            raise DataFailure(
                where, f"the prompt begins like a list of messages, but it is not JSON: {error}"
            ) from error
        return None
    messages = (
        isinstance(found, list)
        and found
        and all(isinstance(m, Mapping) and "role" in m for m in found)
    )
    return found if messages else None


def _mapping(row: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """A column of keys and values; empty when there is none.

    Raises DataFailure for one that is something else.
    """
    value = row.get(name) or {}
    if not isinstance(value, Mapping):
        raise DataFailure(where, f"the column {name!r} must be an object, found {short(value)}")
    return value


def _at(row: Mapping[str, Any], name: str, where: str) -> Any:
    """The value of column ``a``, or for ``a.b`` of key ``b`` in it; None where there is none."""
    if name in row:
        return row[name]
    column, _, key = name.partition(".")
    return _mapping(row, column, where).get(key) if key else None


def _identity(row: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> str:
    for holder in (row, extra):
        if holder.get("id") is not None:
            return str(holder["id"])
    if extra.get("index") is not None:
        parts = (row.get("data_source"), extra.get("split"), extra["index"])
        return "/".join(str(part) for part in parts if part is not None)
    # The file's name and line: the folder may differ between machines, and ids must not.
    return Path(where).name
