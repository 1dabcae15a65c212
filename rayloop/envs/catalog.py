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

PICTURE_PIXELS = 640
"""Pixels of a side of the interpreter's picture."""
DOT_RADIUS_PIXELS = 7
"""Pixels of the radius of a dot in it."""


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

    def environment_and_task(self, name: str, seed: int) -> tuple[EnvironmentKind, Task]:
        """Return the environment of a task, and the task. ``name`` is one of ``names``."""
        kind = EnvironmentKind.model_validate({"use": self.use, "with": dict(self.settings)})
        return kind, self.task(name, seed)


def _scripted() -> Family:
    from rayloop.envs.scripted import ScriptedImage

    def task(name: str, seed: int) -> Task:
        return _task(name, seed, f"Turn 1 of seed {seed}.", ScriptedImage().source())

    steps = [{"text": f"Turn {turn}.", "images": [{"width": 40 * turn}]} for turn in (2, 3)]
    return Family(
        "pictures that follow a script whatever is typed; needs nothing",
        "anything",
        ("three-turns",),
        "rayloop.envs.scripted:ScriptedTool",
        {"steps": steps, "result": 1.0},
        task,
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

    def task(name: str, seed: int) -> Task:
        return _task(name, seed, "{instruction}", extra={"page": name, "seed": seed})

    return Family(
        'MiniWoB++, small web pages in a real Chromium; needs pip install "rayloop[browser]" and'
        " chromium-headless-shell",
        "click(start_box='(80,120)'), type(content='text') or finished()",
        pages(),
        "rayloop.envs.browser.miniwob:MiniWob",
        {"pointing": {"factor": 1}},
        task,
        screen_turn,
    )


def _desktop() -> Family:
    from rayloop.envs.desktop.session import missing
    from rayloop.envs.desktop.tasks import PROMPT, SHIPPED, task_file

    def task(name: str, seed: int) -> Task:
        return _task(name, seed, PROMPT, extra={"desktop": name})

    about = "tasks on a local X desktop with an editor, a file manager and a terminal"
    install_command = missing()
    if install_command:
        about += f"; missing here: {install_command}"
    return Family(
        about,
        "type(content='hello')",
        tuple(task_file(SHIPPED).tasks),
        "rayloop.envs.desktop.environment:DesktopTasks",
        {"pointing": {"coordinates": "absolute", "factor": 1, "max_pixels": 1 << 30}},
        task,
        screen_turn,
    )


def _phone() -> Family:
    from rayloop.envs.browser.phone import PROMPT, tasks

    def task(name: str, seed: int) -> Task:
        return _task(name, seed, PROMPT, extra={"phone": name, "seed": seed})

    return Family(
        "a phone with five apps in a real Chromium, which is touched; needs what miniwob needs",
        "click(start_box='(500,300)'), press_back() or open_app(app_name='Clock')",
        tuple(tasks()),
        "rayloop.envs.browser.phone:Phone",
        {"pointing": {"coordinates": "relative"}},
        task,
        screen_turn,
    )


FAMILIES: Mapping[str, Callable[[], Family]] = {
    "desktop": _desktop,
    "interpreter": _interpreter,
    "miniwob": _miniwob,
    "phone": _phone,
    "scripted": _scripted,
}
"""The word before the colon -> the family. A new family is one line here."""


def family(name: str) -> Family:
    """Return a family.

    Raises ConfigError for one that does not exist, or whose packages or pages are not installed.
    """
    if name not in FAMILIES:
        raise ConfigError(
            f"no environments are called {name!r}{nearest(name, list(FAMILIES))}; there are"
            f" {', '.join(FAMILIES)}"
        )
    try:
        return FAMILIES[name]()
    except (ImportError, EnvironmentFailed) as error:
        raise ConfigError(f"{name}: {error}") from error


def named_environment(written: str, seed: int) -> tuple[Family, EnvironmentKind, Task]:
    """Return the environment and the task of ``family:name``. Raises ConfigError."""
    word, _, name = written.partition(":")
    environments = family(word)
    if name not in environments.names:
        similar = [other for other in environments.names if name and name in other]
        names = similar or list(environments.names)
        examples = ", ".join(names[:10])
        if len(names) > 10:
            examples += " ..."
        suggestion = nearest(name, environments.names)
        raise ConfigError(f"{word} has no {name!r}; there is {examples}{suggestion}")
    return environments, *environments.environment_and_task(name, seed)


def screen_turn(typed: str) -> str:
    """Return a typed action as the turn of a policy; points are pixels of the screen."""
    return typed if "Action:" in typed else f"Action: {typed}"


def interpreter_turn(typed: str) -> str:
    """Return a typed line as the turn of a policy with an interpreter.

    The line is Python, or ``answer`` and the answer.
    """
    word, _, rest = typed.strip().partition(" ")
    if word == "answer":
        return f"<answer>\n\\boxed{{{rest}}}\n</answer>"
    if typed.lstrip().startswith("<"):
        return typed
    return f"<code>\n```python\n{typed}\n```\n</code>"


def dots(seed: int) -> tuple[bytes, int]:
    """Return a PNG of 5 to 30 dots on white that do not overlap, and their number."""
    generator = random.Random(seed)
    cells = generator.sample(range(100), generator.randint(5, 30))
    image = Image.new("RGB", (PICTURE_PIXELS, PICTURE_PIXELS), "white")
    cell_pixels = PICTURE_PIXELS // 10
    for cell in cells:
        x, y = (cell_pixels * part + PICTURE_PIXELS // 20 for part in divmod(cell, 10))
        box = (
            x - DOT_RADIUS_PIXELS,
            y - DOT_RADIUS_PIXELS,
            x + DOT_RADIUS_PIXELS,
            y + DOT_RADIUS_PIXELS,
        )
        ImageDraw.Draw(image).ellipse(box, fill="black")
    return png(image), len(cells)


def _task(name: str, seed: int, *parts: str | ImageSource, **more: Any) -> Task:
    return Task(f"{name}-{seed}", (Message("user", parts),), **more)
