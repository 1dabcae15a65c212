"""Desktop tasks: their instruction, the home and programs at the start, and their checks."""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from rayloop.config.settings import SettingsModel
from rayloop.envs.desktop.session import HomeEntry

SHIPPED = Path(__file__).parent / "shipped" / "tasks.yaml"
MAX_START_BYTES = 64 << 20
"""Bytes of all start files of a task."""


class Check(SettingsModel):
    """One path of the home, and all that must hold of it."""

    path: str
    """Below the home folder, as the instruction calls it: Documents/notes.txt."""
    text: str | None = None
    """The whole text of the file. One line end at its end may be missing or added."""
    margins: bool = False
    """Ignore blanks at the beginning and end of each line when ``text`` is compared.

    For tasks that may leave some.
    """
    contains: tuple[str, ...] = ()
    """Texts that must all occur in the file, in any place."""
    lacks: tuple[str, ...] = ()
    """Texts of which none may occur in the file, which must exist."""
    number: float | None = None
    """The file holds this number and nothing else but blanks and line ends."""
    same_as: str | None = None
    """The file has the same bytes as this file had at the beginning of the episode."""
    names: tuple[str, ...] | None = None
    """The path is a folder that holds files and folders of exactly these names."""
    is_: Literal["file", "folder", "nothing"] | None = Field(None, alias="is")
    """The path is a file, a folder, or does not exist (nothing)."""

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        values = (self.text, self.number, self.same_as, self.names, self.is_)
        if all(value is None for value in values) and not (self.contains or self.lacks):
            raise ValueError(
                f"the check of {self.path} asks nothing: give text, contains, lacks, number,"
                " same_as, names or is"
            )
        return self

    def holds(self, home: Mapping[str, HomeEntry], start: Mapping[str, bytes]) -> bool:
        """Return whether the check holds. ``start``: the files at the start, by path."""
        entry = home.get(self.path)
        kind = entry.kind if entry else "nothing"
        if self.is_ is not None and kind != self.is_:
            return False
        if self.names is not None and kind != "folder":
            return False
        if self.names is not None and _inside(home, self.path) != set(self.names):
            return False
        needs_text = (
            self.text is not None or self.number is not None or bool(self.contains or self.lacks)
        )
        if not needs_text and self.same_as is None:
            return True
        if entry is None or entry.content is None:
            return False
        if self.same_as is not None and entry.content != start[self.same_as]:
            return False
        try:
            return self._reads(entry.content.decode())
        except UnicodeDecodeError:
            return not needs_text

    def _reads(self, text: str) -> bool:
        if self.text is not None and self._lines(text) != self._lines(self.text):
            return False
        if self.number is not None and _number(text) != self.number:
            return False
        has_all = all(part in text for part in self.contains)
        return has_all and not any(part in text for part in self.lacks)

    def _lines(self, text: str) -> list[str]:
        lines = text.removesuffix("\n").split("\n")
        return [line.strip() for line in lines] if self.margins else lines


def score(
    checks: Sequence[Check],
    home: Mapping[str, HomeEntry],
    start: Mapping[str, bytes],
    partial: bool,
) -> float:
    """Return 1 when all checks hold, else 0; the share of checks that hold when ``partial``."""
    held = [check.holds(home, start) for check in checks]
    return sum(held) / len(held) if partial else float(all(held))


def _inside(home: Mapping[str, HomeEntry], folder: str) -> set[str]:
    below = f"{folder}/"
    return {path.removeprefix(below).partition("/")[0] for path in home if path.startswith(below)}


def _number(text: str) -> float | None:
    try:
        return float(text.strip())
    except ValueError:
        return None


class DesktopTask(SettingsModel):
    """A task for a desktop, as a task file has it."""

    id: str = Field(min_length=1)
    """The name by which a row or a command asks for the task; unique in its file."""
    instruction: str = Field(min_length=1)
    """What the policy is asked to do on the screen, in plain words."""
    start: str | None = None
    """A folder in the task file's folder; its files are in the home at the beginning.

    None for an empty home.
    """
    open: tuple[tuple[str, ...], ...] = ()
    """Programs, with their arguments, that are on the screen at the beginning.

    They start in this order: the last one has the focus.
    """
    checks: tuple[Check, ...] = Field(min_length=1)
    """What must hold of the files that the episode leaves."""
    partial: bool = False
    """The result is the share of checks that hold, instead of 1 for all of them and else 0."""

    @model_validator(mode="after")
    def _can_fail(self) -> Self:
        if all(check.is_ == "nothing" for check in self.checks):
            raise ValueError(
                f"task {self.id}: an emptied home would pass: check also for a file or folder"
            )
        return self


class TaskFile:
    """The tasks of a YAML or JSON file, by id.

    Raises ValueError for a wrong file or a missing start file, and OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            tasks = TypeAdapter(list[DesktopTask]).validate_python(content)
        except (ValidationError, yaml.YAMLError) as error:
            raise ValueError(f"{path} is not a file of desktop tasks: {error}") from error
        self.tasks = {task.id: task for task in tasks}
        if len(self.tasks) < len(tasks):
            ids = [task.id for task in tasks]
            duplicate = next(id_ for id_ in ids if ids.count(id_) > 1)
            raise ValueError(f"{path} has two tasks with the id {duplicate!r}")
        for task in tasks:
            start_files = self.start(task)
            for check in task.checks:
                if check.same_as is not None and check.same_as not in start_files:
                    raise ValueError(
                        f"{path}: task {task.id} compares with {check.same_as}, which is not a"
                        " start file"
                    )

    def start(self, task: DesktopTask) -> Mapping[str, "StartFile"]:
        """Return the files of a task's home at the beginning, by path. Raises ValueError."""
        if task.start is None:
            return {}
        folder = self.path.parent / task.start
        if not folder.is_dir():
            raise ValueError(
                f"{self.path}: task {task.id} starts with the folder {folder}, which does not exist"
            )
        files = {
            str(file.relative_to(folder)): StartFile(file.read_bytes(), os.access(file, os.X_OK))
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        if sum(len(file.content) for file in files.values()) > MAX_START_BYTES:
            raise ValueError(
                f"{self.path}: the start files of {task.id} have more than {MAX_START_BYTES} bytes"
            )
        return files


class StartFile(NamedTuple):
    """A file of the home at the beginning; a script is ``executable``."""

    content: bytes
    executable: bool


@functools.cache
def task_file(path: Path) -> TaskFile:
    """Read a task file, once per process. Raises as ``TaskFile``."""
    return TaskFile(path)


PROMPT = "You see the screen of a computer. {instruction}"


def rows(path: Path = SHIPPED, prompt: object = PROMPT) -> list[dict[str, Any]]:
    """Return the rows of a data file, one for each task: its id in the column ``desktop``.

    Raises as ``TaskFile``.
    """
    return [
        {"id": task.id, "prompt": prompt, "desktop": task.id}
        for task in task_file(path).tasks.values()
    ]
