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
from rayloop.core.types import ImageSource, Message, Task
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
"""Columns in which datasets keep the question.

The first that a row has counts, unless the settings name another.
"""
TASK = "task"
"""The key of a prompt that only says what to do."""
_FROM_PARQUET = re.compile(r"\.parquet:\d+$")
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


class Reader(Protocol):
    """Turns one row into a task.

    ``where`` is the row's file:line; relative image paths start at ``root``. A task with an empty
    ``environment`` gets the text in the row's column of that name. Raises DataFailure.
    """

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task."""


class Dataset:
    """The tasks of one file, without images.

    ``quarantine`` receives each bad row; with ``strict`` the first raises DataFailure. A row may
    only name files in the folder of its file, links followed, unless they may be ``anywhere``: the
    author of the rows may be a stranger, who could have any file of this machine shown to the
    policy. Raises ConfigError when no row is left, ids are equal, or a row names an environment
    outside ``kinds``.
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
        row_count = 0
        first_failure = ""
        for where, row in rows(self.path):
            row_count += 1
            try:
                task = _task(reader, row, where, root)
                if not anywhere:
                    _check_files_below(root, task, where)
            except DataFailure as failure:
                if strict:
                    raise
                quarantine(failure)
                first_failure = first_failure or str(failure)
                continue
            if task.id in tasks:
                raise ConfigError(
                    f"{where}: the id {task.id!r} is that of {lines[task.id]} too; ids must be"
                    " unique"
                )
            _check_environment(task, kinds, where)
            tasks[task.id] = task
            lines[task.id] = where
        if not row_count:
            raise ConfigError(f"{self.path} holds no rows")
        if not tasks:
            raise ConfigError(
                f"{self.path} holds no usable row among {row_count}. The first: {first_failure}"
            )
        self._tasks = tuple(tasks.values())
        self._lines = lines

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def where(self, task: Task) -> str:
        """file:line of a task of this dataset; the id of a task of another one."""
        return self._lines.get(task.id, task.id)

    def warning(self, compares: bool = True) -> str:
        """A likely mistake in rows that can all be read; empty when nothing looks wrong.

        ``compares``: the reward reads answers of rows.
        """
        warnings = [self._without_truth() if compares else "", self._without_images()]
        return ". ".join(filter(None, warnings))

    def _without_truth(self) -> str:
        """A warning when rows have no answer."""
        unanswered = [task for task in self._tasks if task.ground_truth is None]
        if not unanswered:
            return ""
        if len(unanswered) < len(self):
            return (
                f"{len(unanswered)} of the {len(self)} rows of {self.path} have no answer, the"
                f" first at {self.where(unanswered[0])}"
            )
        columns = ", ".join(name for name in self._tasks[0].extra if name != "prompt") or "none"
        return (
            f"none of the {len(self)} rows of {self.path} has an answer: right where the"
            " environment gives the result, but a reward that compares cannot work. ChatRows looks"
            f" for {', '.join(TRUTHS)}; the rows' other columns: {columns}. Name the right one with"
            " data.reader.with.truth"
        )

    def _without_images(self) -> str:
        """A warning about columns that look like images when the policy is shown none."""
        if any(task.images for task in self._tasks):
            return ""
        columns: dict[str, None] = {}
        for task in self._tasks:
            columns |= dict.fromkeys(name for name, v in task.extra.items() if like_images(v))
        if not columns:
            return ""
        return (
            f"none of the {len(self)} rows of {self.path} shows the policy an image, though these"
            f" columns look like images: {', '.join(columns)}. Name the right one with"
            " data.reader.with.images"
        )


def like_images(value: Any) -> bool:
    """Whether a column's value, or one in its list, has a form in which datasets store images."""
    match value:
        case list() | tuple():
            return any(map(like_images, value))
        case Mapping():
            return like_images(value.get("bytes")) or like_images(value.get("path"))
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
        environment = task.environment
        column = row.get("environment")
        if isinstance(column, str) and not environment:
            environment = column
        return dataclasses.replace(task, id=str(task.id), environment=environment)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataFailure(
            where, f"{type(reader).__name__} cannot read the row: {short(error, 200)}"
        ) from error


def _check_environment(task: Task, kinds: Collection[str], where: str) -> None:
    """Raises ConfigError when the row names an environment outside ``kinds``."""
    if kinds and task.environment and task.environment not in kinds:
        raise ConfigError(
            f"{where}: the row names the environment {task.environment!r}, and"
            f" environment.kinds has {', '.join(kinds)}. Add it there, or correct the row"
        )


def _check_files_below(root: Path, task: Task, where: str) -> None:
    """Raises DataFailure when the task names a file outside of ``root``."""
    paths = [image.path for image in task.images if image.path]
    for video in _as_sequence(task.extra.get("videos")):
        paths += [path for path in _as_sequence(video) if isinstance(path, str)]
    for path in paths:
        # Links are followed first: one in the folder could lead to any file.
        if not Path(os.path.realpath(path)).is_relative_to(root):
            raise DataFailure(
                where,
                f"{path} lies outside the folder of its data; data.anywhere=true allows it, for"
                " rows that you trust",
            )


def _as_sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


class ChatRows:
    """Reads rows ``{prompt, images, answer, ...}``: the columns of verl, TRL and the Hub.

    ``prompt`` is a text, or a list of {role, content} (or its JSON) that may have tool calls, or
    {task: text}, which only says what to do: the language of the model has the prompt around it.
    ``tools`` has schemas, for environments that have no tools themselves. The k-th ``<image>`` (or
    image part) is the row's k-th image; without any, images come first. The id is ``id``,
    ``extra_info``'s id or data_source/split/index, or file:line. ``extra`` has the keys of
    ``extra_info`` and every column except pictures that the row itself holds.
    """

    class Settings(SettingsModel):
        prompt: str = "prompt"
        """Column of the messages.

        By default ``messages`` (with the row's answer as its last message) and ``problem`` are read
        too. Set it when your column has another name, for example ``question``.
        """
        images: str = "images"
        """Column of the images, a list or a single one; may be absent or empty.

        By default ``image`` is read too.
        """
        truth: str | None = None
        """Column of the answer (``a.b``: key ``b`` of column ``a``), which every row then needs.

        None: the first that a row has of reward_model.ground_truth, ground_truth, answer, answers,
        solution, label, target; it may have none.
        """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task. Raises DataFailure."""
        prompt_column = self._prompt_column(row, where)
        prompt = field(row, prompt_column, where)
        is_bare = isinstance(prompt, Mapping) and set(prompt) == {TASK}
        if is_bare:
            prompt = str(field(prompt, TASK, where))
        listed = None if is_bare else _listed(prompt, where)
        conversation = [{"role": "user", "content": prompt}] if listed is None else listed
        tools = parsed(row.get("tools"))
        if _FROM_PARQUET.search(where):
            conversation = without_nulls(conversation)
            tools = without_nulls(tools)
        answer = None
        if prompt_column == "messages":
            conversation, answer = _split_answer(conversation)
        _check_only_images(row, conversation, where)
        images = self._images(row, where, root)
        info = _mapping(row, "extra_info", where)
        prompt_messages = messages(conversation, images, where, root)
        dropped = {"prompt"}
        if any(_holds_picture(message) for message in prompt_messages):
            # The task has these pictures; as columns they would cost their size once more.
            dropped.add(self._image_column(row))
            if listed is not None:
                dropped.add(prompt_column)
        extra = {name: value for name, value in row.items() if name not in dropped}
        if isinstance(prompt, str) and listed is None:
            extra["prompt"] = prompt
        truth = self._truth(row, where)
        return Task(
            _identity(row, info, where),
            prompt_messages,
            answer if truth is None else truth,
            str(row.get("data_source") or ""),
            {**extra, **info},
            tools=offered(tools),
            bare=is_bare,
        )

    def _prompt_column(self, row: Mapping[str, Any], where: str) -> str:
        """The column of the messages. Raises DataFailure for a row that has none."""
        prompt = self._settings.prompt
        candidates = PROMPTS if prompt == ChatRows.Settings().prompt else (prompt,)
        for name in candidates:
            if name in row:
                return name
        present = ", ".join(list(row)[:20]) or "none"
        raise DataFailure(
            where,
            f"no column {prompt!r}; the row's: {present}. Name the right one with"
            " data.reader.with.prompt",
        )

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
        for column in TRUTHS:
            value = _at(row, column, where)
            if not blank(value):
                return value
        return None


def _holds_picture(message: Message) -> bool:
    """Whether a message has the bytes of a picture, not its path."""
    return any(image.data is not None for image in message.images)


def _split_answer(listed: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """The messages before a last answer, and that answer.

    A column ``messages`` has whole conversations.
    """
    last = listed[-1] if len(listed) > 1 else None
    if not (isinstance(last, Mapping) and last.get("role") == "assistant"):
        return listed, None
    answer = last.get("content")
    if isinstance(answer, list | tuple):
        texts = [str(part.get("text") or "") for part in answer if isinstance(part, Mapping)]
        answer = "".join(texts)
    return listed[:-1], answer


def _check_only_images(row: Mapping[str, Any], listed: Sequence[Any], where: str) -> None:
    """Raises DataFailure for a text with a place for a video or a sound of the row.

    The policy is shown neither.
    """
    contents = [message.get("content") for message in listed if isinstance(message, Mapping)]
    texts = [content for content in contents if isinstance(content, str)]
    for kind in ("video", "audio"):
        in_row = row.get(kind) or row.get(f"{kind}s")
        if in_row and any(f"<{kind}>" in text for text in texts):
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
        value = json.loads(prompt)
    except (ValueError, RecursionError) as error:
        # A question may begin with a bracket; only what looks like messages is an error.
        if re.match(r"\s*\[\s*\{\s*['\"]role['\"]", prompt):
            raise DataFailure(
                where, f"the prompt begins like a list of messages, but it is not JSON: {error}"
            ) from error
        return None
    if not isinstance(value, list) or not value:
        return None
    are_messages = all(isinstance(message, Mapping) and "role" in message for message in value)
    return value if are_messages else None


def _mapping(row: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """A column of keys and values; empty when the row lacks it.

    Raises DataFailure for a column that is not an object.
    """
    value = row.get(name) or {}
    if not isinstance(value, Mapping):
        raise DataFailure(where, f"the column {name!r} must be an object, found {short(value)}")
    return value


def _at(row: Mapping[str, Any], name: str, where: str) -> Any:
    """The value of column ``a``, or for ``a.b`` of key ``b`` in it; None where it is missing."""
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
