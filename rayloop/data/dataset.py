"""Rows of a data file as tasks. A row that cannot become a task is quarantined with its place and the reason."""

import base64
import binascii
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
from rayloop.data.rows import rows

PLACEHOLDER = "<image>"
"""Where an image goes inside a text, in verl's and TRL's datasets."""


TRUTHS = ("reward_model.ground_truth", "ground_truth", "answer", "answers", "solution", "label", "target")
"""Columns in which datasets keep the answer; the first that a row has counts."""
_ENCODED = ("iVBORw0KGgo", "/9j/", "UklGR")
"""How PNG, JPEG and WebP begin in base64."""
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
_LONGEST_PATH = 4096
"""Characters; Linux has no longer ones."""


class Reader(Protocol):
    """Turns one row into a task. ``where`` is the row's file:line; relative image paths start at ``root``. A task whose
    ``environment`` is empty gets the text in the row's column of that name. Raises DataFailure."""

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task."""


class Dataset:
    """The tasks of one file, without images. ``quarantine`` receives each bad row; with ``strict`` the first raises DataFailure.
    A row may name files of its own folder only, links followed, unless they may lie ``anywhere``: it may be a stranger's, who
    would have any file of this machine shown to the policy. Raises ConfigError when no row is left, ids are equal, or a row names
    an environment outside ``kinds``."""

    def __init__(
        self, path: str | Path, reader: Reader, strict: bool, quarantine: Callable[[DataFailure], None],
        kinds: Collection[str] = (), *, anywhere: bool = False,
    ) -> None:  # fmt: skip
        self.path = Path(path)
        root = self.path.resolve().parent
        tasks: dict[str, Task] = {}
        lines: dict[str, str] = {}
        read, first = 0, ""
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
                raise ConfigError(f"{where}: the id {task.id!r} is that of {lines[task.id]} too; ids must be unique")
            if kinds and task.environment and task.environment not in kinds:
                known = ", ".join(kinds)
                raise ConfigError(
                    f"{where}: the row names the environment {task.environment!r}, and environment.kinds has {known}. "
                    "Add it there, or correct the row"
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
        """What may be wrong though every row can be read; empty when nothing is. ``compares``: the reward reads answers of rows."""
        return ". ".join(filter(None, (self._without_truth() if compares else "", self._without_images())))

    def _without_truth(self) -> str:
        bare = [task for task in self._tasks if task.ground_truth is None]
        if not bare:
            return ""
        if len(bare) < len(self):
            return f"{len(bare)} of the {len(self)} rows of {self.path} have no answer, the first at {self.where(bare[0])}"
        columns = ", ".join(name for name in self._tasks[0].extra if name != "prompt") or "none"
        return (
            f"none of the {len(self)} rows of {self.path} has an answer: right where the environment gives the result, but a "
            f"reward that compares cannot work. ChatRows looks for {', '.join(TRUTHS)}; the rows' other columns: {columns}. Name "
            "the right one with data.reader.with.truth"
        )

    def _without_images(self) -> str:
        """Columns that look like images when the policy is shown none."""
        if any(task.images for task in self._tasks):
            return ""
        found = dict.fromkeys(name for task in self._tasks for name, value in task.extra.items() if like_images(value))
        if not found:
            return ""
        return (
            f"none of the {len(self)} rows of {self.path} shows the policy an image, though these columns look like images: "
            f"{', '.join(found)}. Name the right one with data.reader.with.images"
        )


def like_images(value: Any) -> bool:
    """Whether a column's value is what datasets keep images as, in a list or by itself."""
    match value:
        case list() | tuple():
            return any(map(like_images, value))
        case Mapping():
            return any(map(like_images, (value.get("bytes"), value.get("path"))))
        case str():
            return value.startswith(("data:image/", *_ENCODED)) or value.lower().endswith(_SUFFIXES)
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
        raise DataFailure(where, f"{type(reader).__name__} cannot read the row: {short(error, 200)}") from error


def _below(root: Path, task: Task, where: str) -> None:
    """Raises DataFailure when the task names a file outside of ``root``."""
    paths = [image.path for image in task.images if image.path]
    for video in _several(task.extra.get("videos")):
        paths += [path for path in _several(video) if isinstance(path, str)]
    for path in paths:
        if not Path(os.path.realpath(path)).is_relative_to(root):
            why = f"{path} lies outside the folder of its data; data.anywhere=true allows it, for rows that you trust"
            raise DataFailure(where, why)


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


class ChatRows:
    """Reads rows ``{prompt, images, answer, ...}``: the columns of verl, TRL and the Hub. ``prompt``: a text, or a list of {role,
    content} or its JSON. The k-th ``<image>`` (or image part) is the row's k-th image; without any, images come first. The id:
    ``id``, ``extra_info``'s id or data_source/split/index, or file:line. ``extra`` has every column but
    pictures that the row itself holds, and ``extra_info``."""

    class Settings(SettingsModel):
        prompt: str = "prompt"
        """Column of the messages. Set it when yours is called otherwise, for example ``question``."""
        images: str = "images"
        """Column of the images, a list or one alone; may be absent or empty. By default ``image`` will do too."""
        truth: str | None = None
        """Column of the answer (``a.b``: key ``b`` of column ``a``), which every row must then have. None: the first
        that a row has of reward_model.ground_truth, ground_truth, answer, answers, solution, label, target; it may have none."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task. Raises DataFailure."""
        prompt = self._settings.prompt
        if prompt not in row:
            present = ", ".join(list(row)[:20]) or "none"
            raise DataFailure(where, f"no column {prompt!r}; the row's: {present}. Name the right one with data.reader.with.prompt")
        value = field(row, prompt, where)
        messages = _listed(value, where)
        plain = {"prompt": value} if isinstance(value, str) and messages is None else {}
        images = self._images(row, where, root)
        info = _mapping(row, "extra_info", where)
        shown = _messages([{"role": "user", "content": value}] if messages is None else messages, images, where, root)
        apart = {"prompt"}
        if any(isinstance(part, ImageSource) and part.data is not None for message in shown for part in message.parts):
            # The task has these pictures; beside it they would cost their size once more.
            apart |= {self._image_column(row), *([] if messages is None else [prompt])}
        columns = {name: value for name, value in row.items() if name not in apart}
        return Task(
            _identity(row, info, where), shown, self._truth(row, where), str(row.get("data_source") or ""),
            {**columns, **plain, **info},
        )  # fmt: skip

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
        return next((value for known in TRUTHS if not _blank(value := _at(row, known, where))), None)


def _listed(prompt: Any, where: str) -> Any:
    """The prompt as a list of messages; None when it is a text. A text in brackets is a list only when it reads as one."""
    if not isinstance(prompt, str | Sequence) and not hasattr(prompt, "tolist"):
        raise DataFailure(where, f"cannot read the row: its prompt is {short(prompt)}, neither a text nor a list of messages")
    if not isinstance(prompt, str):
        return prompt
    if not prompt.lstrip().startswith("["):
        return None
    try:
        found = json.loads(prompt)
    except (ValueError, RecursionError) as error:
        if re.match(r"\s*\[\s*\{\s*['\"]role['\"]", prompt):
            raise DataFailure(where, f"the prompt begins like a list of messages, but is no JSON: {error}") from error
        return None
    messages = isinstance(found, list) and found and all(isinstance(m, Mapping) and "role" in m for m in found)
    return found if messages else None


def _mapping(row: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """A column of keys and values; empty when there is none. Raises DataFailure for one that is something else."""
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


def _blank(value: Any) -> bool:
    """Whether a value is there only in form: null, NaN or a text of white space."""
    return value is None or (isinstance(value, float) and value != value) or (isinstance(value, str) and not value.strip())


def field(row: Mapping[str, Any], name: str, where: str) -> Any:
    """A required, non-empty field of a row. Raises DataFailure."""
    value = row.get(name)
    if _blank(value) or value == []:
        raise DataFailure(where, f"the field {name!r} is missing or empty")
    return value


def image_entry(entry: Any, where: str, root: Path) -> ImageSource:
    """An image column's entry: a path (relative to ``root`` unless absolute), a data URL, base64 or bytes, also in a mapping as
    ``image``, ``path`` or ``bytes``. Raises DataFailure for anything else, URLs included: nothing is downloaded."""
    value: Any = entry
    if isinstance(entry, Mapping):
        value = next((entry[key] for key in ("bytes", "image", "path") if entry.get(key) is not None), None)
        if isinstance(value, str) and entry.get("bytes") is not None:
            return ImageSource(data=_decoded(value, where))
    if isinstance(value, bytes):
        return ImageSource(data=value)
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


def _messages(listed: Sequence[Mapping[str, Any]], images: Sequence[ImageSource], where: str, root: Path) -> tuple[Message, ...]:
    """The messages, with the row's images at their places. Raises DataFailure when places and images differ in number."""
    contents = []
    for message in listed:
        role, content = field(message, "role", where), field(message, "content", where)
        if not isinstance(role, str):
            raise DataFailure(where, f"a message's role must be a text, found {short(role)}")
        contents.append((role, _pieces(content, where, root)))
    if contents[-1][0] == "assistant":
        why = "the prompt ends with the assistant's turn, which the policy would be shown"
        raise DataFailure(where, f"{why}: remove the last turn, or use it as the answer")
    shown = sum(not isinstance(piece, str) for _, pieces in contents for piece in pieces)
    places = sum(piece is None for _, pieces in contents for piece in pieces)
    if images and not shown:  # as TRL does
        first = next((pieces for role, pieces in contents if role == "user"), contents[-1][1])
        first[:0] = [None] * len(images)
    elif places != len(images):
        raise DataFailure(where, f"{places} {PLACEHOLDER} placeholders for {len(images)} images")
    remaining = iter(images)
    return tuple(
        Message(role, tuple(next(remaining) if piece is None else piece for piece in pieces if piece != ""))
        for role, pieces in contents
    )


def _pieces(content: Any, where: str, root: Path) -> list[str | ImageSource | None]:
    """A message's content as texts and images in reading order; None is a place for the next of the row's images."""
    pieces: list[str | ImageSource | None] = []
    if isinstance(content, str):
        for text in content.split(PLACEHOLDER):
            pieces += [None, text]
        return pieces[1:]
    for part in content if isinstance(content, list | tuple) else (content,):
        match part:
            case {"type": "text", "text": str(text)}:
                pieces += _pieces(text, where, root)
            case {"type": "image"}:
                inline = any(part.get(key) is not None for key in ("image", "path", "bytes", "url"))
                pieces.append(image_entry(part, where, root) if inline else None)
            case _:
                parts = 'a text, or a list of {"type": "text", "text": ...} and {"type": "image"}'
                raise DataFailure(where, f"a message's content must be {parts}, found {short(part)}")
    return pieces


def _identity(row: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> str:
    for holder in (row, extra):
        if holder.get("id") is not None:
            return str(holder["id"])
    if extra.get("index") is not None:
        parts = (row.get("data_source"), extra.get("split"), extra["index"])
        return "/".join(str(part) for part in parts if part is not None)
    return Path(where).name
