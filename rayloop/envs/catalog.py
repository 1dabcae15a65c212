"""Environments to try by name, as ``miniwob:click-color``, for ``env list`` and ``env play``."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

from rayloop.core.failures import ConfigError, EnvironmentFailed, nearest
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import png
from rayloop.envs.settings import EnvironmentKind

SIDE, RADIUS = 640, 7
"""Pixels of the interpreter's picture, and of a dot in it."""


@dataclass(frozen=True)
class Family:
    """Environments of one sort, and their tasks. Equal seeds give equal tasks."""

    about: str
    example: str
    names: Sequence[str]
    use: str
    settings: Mapping[str, Any]
    task: Callable[[str, int], Task]
    turn: Callable[[str], str]

    def play(self, name: str, seed: int) -> tuple[EnvironmentKind, Task]:
        """The environment of a task, and the task. ``name`` is one of ``names``."""
        return EnvironmentKind.model_validate(
            {"use": self.use, "with": dict(self.settings)}
        ), self.task(name, seed)


def _scripted() -> Family:
    from rayloop.envs.scripted import ScriptedImage

    steps = [{"text": f"Turn {turn}.", "images": [{"width": 40 * turn}]} for turn in (2, 3)]
    return Family(
        "pictures that follow a script whatever is typed; needs nothing",
        "anything",
        ("three-turns",),
        "rayloop.envs.scripted:ScriptedTool",
        {"steps": steps, "result": 1.0},
        lambda name, seed: _task(name, seed, f"Turn 1 of seed {seed}.", ScriptedImage().source()),
        str,
    )


def _interpreter() -> Family:
    def task(name: str, seed: int) -> Task:
        picture, count = dots(seed)
        return _task(
            name,
            seed,
            ImageSource(data=picture),
            "How many black dots are there?",
            ground_truth=str(count),
        )

    return Family(
        "PyVision's Python interpreter with an image, in the sandbox; `result` counts the turns"
        " whose code was run",
        "print(image_clue_0.size), more statements behind a semicolon, or: answer 7",
        ("count-dots",),
        "rayloop.envs.interpreter.environment:PythonInterpreter",
        {},
        task,
        interpreter_turn,
    )


def _miniwob() -> Family:
    from rayloop.envs.browser.miniwob import pages

    return Family(
        'MiniWoB++, small web pages in a real Chromium; needs pip install "rayloop[browser]" and'
        " chromium-headless-shell",
        "click(start_box='(80,120)'), type(content='text') or finished()",
        pages(),
        "rayloop.envs.browser.miniwob:MiniWob",
        {"pointing": {"factor": 1}},
        lambda name, seed: _task(name, seed, "{instruction}", extra={"page": name, "seed": seed}),
        screen_turn,
    )


def _desktop() -> Family:
    from rayloop.envs.desktop.session import missing
    from rayloop.envs.desktop.tasks import PROMPT, SHIPPED, task_file

    lacks = missing()
    return Family(
        "tasks on a local X desktop with an editor, a file manager and a terminal"
        + (f"; missing here: {lacks}" if lacks else ""),
        "type(content='hello')",
        tuple(task_file(SHIPPED).tasks),
        "rayloop.envs.desktop.environment:DesktopTasks",
        {"pointing": {"coordinates": "absolute", "factor": 1, "max_pixels": 1 << 30}},
        lambda name, seed: _task(name, seed, PROMPT, extra={"desktop": name}),
        screen_turn,
    )


FAMILIES: Mapping[str, Callable[[], Family]] = {
    "desktop": _desktop,
    "interpreter": _interpreter,
    "miniwob": _miniwob,
    "scripted": _scripted,
}
"""Word before the colon -> the family. One that is added has one line here."""


def family(name: str) -> Family:
    """Raises ConfigError for one that does not exist, or whose packages or pages are not installed."""
    if name not in FAMILIES:
        raise ConfigError(
            f"no environments are called {name!r}{nearest(name, list(FAMILIES))}; there are"
            f" {', '.join(FAMILIES)}"
        )
    try:
        return FAMILIES[name]()
    except (ImportError, EnvironmentFailed) as error:
        raise ConfigError(f"{name}: {error}") from error


def playable(written: str, seed: int) -> tuple[Family, EnvironmentKind, Task]:
    """The environment and the task of ``family:name``. Raises ConfigError."""
    word, _, name = written.partition(":")
    found = family(word)
    if name not in found.names:
        close = [known for known in found.names if name and name in known] or list(found.names)
        some = f"{', '.join(close[:10])}{' ...' if close[10:] else ''}"
        raise ConfigError(f"{word} has no {name!r}; there is {some}{nearest(name, found.names)}")
    return found, *found.play(name, seed)


def screen_turn(typed: str) -> str:
    """The turn of a policy that acts on a screen, of a typed action; points are pixels of the
    screen.
    """
    return typed if "Action:" in typed else f"Action: {typed}"


def interpreter_turn(typed: str) -> str:
    """The turn of a policy with an interpreter, of a typed line: Python, or ``answer`` and the
    answer.
    """
    word, _, rest = typed.strip().partition(" ")
    if word == "answer":
        return f"<answer>\n\\boxed{{{rest}}}\n</answer>"
    return typed if typed.lstrip().startswith("<") else f"<code>\n```python\n{typed}\n```\n</code>"


def dots(seed: int) -> tuple[bytes, int]:
    """A PNG of 5 to 30 dots on white, none on another, and their number."""
    draws = random.Random(seed)
    cells = draws.sample(range(100), draws.randint(5, 30))
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    for cell in cells:
        x, y = (SIDE // 10 * part + SIDE // 20 for part in divmod(cell, 10))
        ImageDraw.Draw(picture).ellipse(
            (x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS), fill="black"
        )
    return png(picture), len(cells)


def _task(name: str, seed: int, *parts: str | ImageSource, **more: Any) -> Task:
    return Task(f"{name}-{seed}", (Message("user", parts),), **more)
