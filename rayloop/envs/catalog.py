"""What environments there are to try by name, as ``miniwob:click-color``: families, each in a module of its own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from rayloop.core.failures import ConfigError
from rayloop.core.types import Task
from rayloop.envs.settings import EnvironmentKind

FAMILIES: Mapping[str, str] = {
    "desktop": "rayloop.envs.desktop.catalog:DESKTOPS",
    "interpreter": "rayloop.envs.interpreter.catalog:INTERPRETERS",
    "miniwob": "rayloop.envs.browser.catalog:MINIWOB",
    "scripted": "rayloop.envs.scripted:SCRIPTED",
}
"""Word before the colon -> where the family is. One that is added has one line here."""


class Family(Protocol):
    """Environments of one sort. Making the list is quick: no program is started for it."""

    about: str
    """One line: what they are, and what they need."""
    example: str
    """What a person can type as a turn."""

    @property
    def names(self) -> Sequence[str]:
        """Of its tasks, behind the colon."""
        ...

    def play(self, name: str, seed: int) -> tuple[EnvironmentKind, Task]:
        """How to make the environment of a task, and the task; equal seeds give equal ones. ``name`` is one of ``names``."""
        ...

    def turn(self, typed: str) -> str:
        """The policy's text that a person means by a typed line."""
        ...


def family(name: str) -> Family:
    """Raises ConfigError for one that does not exist, or whose packages are not installed."""
    if name not in FAMILIES:
        raise ConfigError(f"no environments are called {name!r}; there are {', '.join(FAMILIES)}")
    module, _, member = FAMILIES[name].partition(":")
    try:
        found: Family = getattr(importlib.import_module(module), member)
        return found
    except ImportError as error:
        raise ConfigError(f"{name}: {error}") from error


def playable(written: str, seed: int) -> tuple[Family, EnvironmentKind, Task]:
    """Of ``family:name``. Raises ConfigError."""
    word, _, name = written.partition(":")
    found = family(word)
    if name not in found.names:
        close = [known for known in found.names if name and name in known] or list(found.names)
        raise ConfigError(f"{word} has no {name!r}; there is {', '.join(close[:10])}{' ...' if close[10:] else ''}")
    return found, *found.play(name, seed)
