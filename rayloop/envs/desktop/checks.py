"""A task's checks: plain comparisons of the files that an episode leaves in the home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel
from rayloop.envs.desktop.session import HomeEntry


class Check(SettingsModel):
    """One path of the home, and all that must hold of it."""

    path: str
    """Below the home folder, as the instruction calls it: Documents/notes.txt."""
    text: str | None = None
    """The whole text of the file. One line end at the end may be there or not."""
    margins: bool = False
    """Ignore blanks at the beginning and end of each line when ``text`` is compared. For tasks that may leave some."""
    contains: tuple[str, ...] = ()
    """Texts that must all occur in the file, wherever they stand in it."""
    lacks: tuple[str, ...] = ()
    """Texts of which none may occur in the file, which must be there itself."""
    number: float | None = None
    """The file holds this number and nothing else but blanks and line ends."""
    same_as: str | None = None
    """The file has the same bytes as this file had at the beginning of the episode."""
    names: tuple[str, ...] | None = None
    """The path is a folder that holds files and folders of exactly these names."""
    is_: Literal["file", "folder", "nothing"] | None = Field(None, alias="is")
    """What lies at the path: a file, a folder, or nothing at all."""

    @model_validator(mode="after")
    def _asks_something(self) -> Check:
        asked = (self.text, self.number, self.same_as, self.names, self.is_)
        if all(value is None for value in asked) and not (self.contains or self.lacks):
            raise ValueError(f"the check of {self.path} asks nothing: give text, contains, lacks, number, same_as, names or is")
        return self

    def holds(self, home: Mapping[str, HomeEntry], start: Mapping[str, bytes]) -> bool:
        """``start``: the files of the beginning, by path."""
        entry = home.get(self.path)
        if self.is_ is not None and (entry.kind if entry else "nothing") != self.is_:
            return False
        if self.names is not None and not (
            entry is not None and entry.kind == "folder" and _inside(home, self.path) == set(self.names)
        ):
            return False
        if self.text is None and self.number is None and self.same_as is None and not (self.contains or self.lacks):
            return True
        if entry is None or entry.content is None:
            return False
        if self.same_as is not None and entry.content != start[self.same_as]:
            return False
        try:
            return self._reads(entry.content.decode())
        except UnicodeDecodeError:
            return self.text is None and self.number is None and not (self.contains or self.lacks)

    def _reads(self, text: str) -> bool:
        if self.text is not None and self._lines(text) != self._lines(self.text):
            return False
        if self.number is not None and _number(text) != self.number:
            return False
        return all(part in text for part in self.contains) and not any(part in text for part in self.lacks)

    def _lines(self, text: str) -> list[str]:
        lines = text.removesuffix("\n").split("\n")
        return [line.strip() for line in lines] if self.margins else lines


def score(checks: Sequence[Check], home: Mapping[str, HomeEntry], start: Mapping[str, bytes], partial: bool) -> float:
    """1 when all checks hold, else 0; the share of those that hold when ``partial``."""
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
