"""Every function that reads a text takes time in proportion to its length: a policy that repeats
itself must not stop its host.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
import typing
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest

import rayloop
from tests.support.growth import grows_with_length, times
from tests.support.hostile import texts

PACKAGES = ("rayloop.chat", "rayloop.envs", "rayloop.judge", "rayloop.recipes", "rayloop.rewards")
"""Where the texts of models are read."""
APART = ("driver", "keyboard", "memory", "math_child")
"""Modules of other processes: of a desktop, and of mathematics, which is ended at a deadline."""
MODULES = [
    found.name
    for found in pkgutil.walk_packages(rayloop.__path__, "rayloop.")
    if found.name.startswith(PACKAGES)
    and not found.ispkg
    and found.name.rpartition(".")[2] not in APART
]
OF_OTHERS = {
    "name",
    "kind",
    "path",
    "use",
    "python",
    "package",
    "program",
    "folder",
    "page",
    "url",
    "header",
    "key",
    "where",
    "what",
    "tag",
    "module",
    "method",
    "role",
    "message",
    "pattern",
    "source",
    "split",
    "model",
    "written",
    "typed",
    "character",
    "category",
    "index",
    "out",
    "task",
    "word",
    "pid",
    "command",
    "value",
}
"""Parameters that are never the text of a model."""
LENGTH = 500
"""Characters of the shorter text; the longer one has four times as many."""

SOON = 2e-4
"""Processor seconds of the longer text below which nothing grows with its square."""
GIVEN: dict[Any, tuple[Any, ...]] = {int: (3, 1 << 20), bool: (True,), float: (1.0,)}
"""What a reader gets for parameters beside its texts."""

Reader = tuple[str, Callable[..., Any], list[Any]]


def readers(module: ModuleType) -> Iterator[Reader]:
    """Functions that need texts, and numbers at most: their names, and the types of what they need."""
    for name, function in vars(module).items():
        function = (
            function.__wrapped__ if hasattr(function, "cache_info") else function
        )  # a cache would measure itself
        if not inspect.isfunction(function) or function.__module__ != module.__name__:
            continue
        needed = [
            one
            for one in inspect.signature(function).parameters.values()
            if one.default is one.empty
        ]
        hints = typing.get_type_hints(function)
        kinds = [
            str if hints.get(one.name) == str | None else hints.get(one.name) for one in needed
        ]
        of_models = [
            kind is str and one.name not in OF_OTHERS
            for one, kind in zip(needed, kinds, strict=True)
        ]
        if any(of_models) and all(
            yes or kind in GIVEN for yes, kind in zip(of_models, kinds, strict=True)
        ):
            yield name, function, kinds


def patterns(module: ModuleType) -> list[re.Pattern[str]]:
    values = [
        value
        for one in vars(module).values()
        for value in (one if isinstance(one, tuple | list) else [one])
    ]
    return [
        value
        for value in values
        if isinstance(value, re.Pattern) and isinstance(value.pattern, str)
    ]


def reading(function: Callable[..., Any], kinds: list[Any], place: int) -> Callable[[str], object]:
    """A call with the text at one place, and short ones at the others.

    What it raises is another test's.
    """
    others = list(itertools.product(*(("7",) if kind is str else GIVEN[kind] for kind in kinds)))

    def read(text: str) -> None:
        for values in others:
            with contextlib.suppress(Exception):
                function(*values[:place], text, *values[place + 1 :])

    return read


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MODULES)
def test_readers_take_time_in_proportion_to_the_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some readers import what a text names: the folders that they search are this test's only.
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = importlib.import_module(name)
    found = list(readers(module))
    hard = list(texts(inspect.getsource(module), patterns(module))) if found else []
    for reader, function, kinds in found:
        for place in (at for at, kind in enumerate(kinds) if kind is str):
            read = reading(function, kinds, place)
            slow = [text for text in hard if times(partial(read, text(4 * LENGTH))) > SOON]
            assert [
                (reader, text(80)) for text in slow if not grows_with_length(read, text, LENGTH)
            ] == []


def test_the_walk_finds_the_readers_of_each_kind() -> None:
    """Of calls, answers, code, boxes, actions, rewards and the judge's rules."""
    for place in (
        "chat.calls.bodies",
        "envs.tools.tool_call",
        "envs.interpreter.text.code",
        "envs.grammar.scanner.read",
        "envs.grammar.arpo.parsed",
        "judge.rules.plain.boxed",
        "recipes.arc_vision.boxes.parse_box",
        "recipes.chart_rvr.rewards.reading.parsed_table",
        "recipes.pyvision.original.deepeyes_math",
        "judge.prompt.sanitise",
        "rewards.shaped.repeated",
    ):
        module, _, name = f"rayloop.{place}".rpartition(".")
        assert module in MODULES
        assert name in {found for found, _, _ in readers(importlib.import_module(module))}
