"""Every function that reads a text takes time in proportion to its length: a policy that repeats itself must not stop its host."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import rayloop
from tests.support.growth import grows_with_length
from tests.support.hostile import texts

PACKAGES = ("rayloop.chat", "rayloop.envs", "rayloop.judge", "rayloop.recipes", "rayloop.rewards")
"""Where the texts of models are read."""
MODULES = [
    found.name
    for found in pkgutil.walk_packages(rayloop.__path__, "rayloop.")
    if found.name.startswith(PACKAGES) and ".inside" not in found.name and not found.ispkg
]
OF_OTHERS = {
    "name", "kind", "path", "use", "python", "package", "program", "folder", "page", "url", "header", "key", "where", "what", "tag",
    "module", "method", "role", "message", "pattern", "source", "split", "model", "written", "typed", "character", "category",
    "index", "out", "task", "word", "pid", "command", "value",
}  # fmt: skip
"""Parameters that are never the text of a model."""
LENGTH = 1_000
"""Characters of the shorter text; the longer one has four times as many."""

Reader = tuple[str, Callable[..., Any], int]


def readers(module: ModuleType) -> Iterator[Reader]:
    """Functions all of whose needed parameters are texts: their names, and how many these are."""
    for name, function in vars(module).items():
        if not inspect.isfunction(function) or function.__module__ != module.__name__:
            continue
        needed = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
        hints = typing.get_type_hints(function)
        if needed and all(hints.get(one.name) in (str, str | None) and one.name not in OF_OTHERS for one in needed):
            yield name, function, len(needed)


def patterns(module: ModuleType) -> list[re.Pattern[str]]:
    values = [value for one in vars(module).values() for value in (one if isinstance(one, tuple | list) else [one])]
    return [value for value in values if isinstance(value, re.Pattern) and isinstance(value.pattern, str)]


def reading(function: Callable[..., Any], count: int, place: int) -> Callable[[str], object]:
    """A call with the text at one place, and a short one at the others. What it raises is another test's."""

    def read(text: str) -> None:
        with contextlib.suppress(Exception):
            function(*(text if at == place else "7" for at in range(count)))

    return read


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MODULES)
def test_readers_take_time_in_proportion_to_the_text(name: str) -> None:
    module = importlib.import_module(name)
    found = list(readers(module))
    hard = list(texts(inspect.getsource(module), patterns(module))) if found else []
    for reader, function, count in found:
        for place in range(count):
            read = reading(function, count, place)
            assert [(reader, text(80)) for text in hard if not grows_with_length(read, text, LENGTH)] == []


def test_the_walk_finds_the_readers_of_each_kind() -> None:
    """Of calls, answers, code, boxes, actions, rewards and the judge's rules."""
    for place in (
        "chat.calls.bodies", "envs.tools.tool_call", "envs.interpreter.text.code", "envs.grammar.scanner.read",
        "envs.grammar.arpo.parsed", "judge.rules.plain.boxed", "recipes.arc_vision.boxes.parse_box",
        "recipes.chart_rvr.rewards.reading.parsed_table", "recipes.pyvision.original.deepeyes_math",
    ):  # fmt: skip
        module, _, name = f"rayloop.{place}".rpartition(".")
        assert module in MODULES
        assert name in {found for found, _, _ in readers(importlib.import_module(module))}
