"""OSWorld as an environment: its tasks and results, UI-TARS actions and screenshots.

Never exercised on a real machine.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from rayloop.config.settings import local_path
from rayloop.core.failures import DataFailure, EnvironmentFailed
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.envs.grammar.actions import (
    Action,
    CallUser,
    Click,
    Drag,
    Finish,
    HoldKey,
    Hotkey,
    Hover,
    MouseButton,
    Point,
    Scroll,
    Sleep,
    Type,
)
from rayloop.envs.grammar.basic import notches
from rayloop.envs.grammar.family import BARE
from rayloop.envs.grammar.screens import Beginning, ScreenEnvironment
from rayloop.envs.osworld.machines import (
    Machine,
    MachineLost,
    OSWorldSettings,
    installed,
    machines_of,
)


@dataclass
class ResultFiles:
    """An episode's files as OSWorld's scripts write them.

    In DOMAIN/ID, traj.jsonl has a line for each action, and result.txt the number that OSWorld's
    show_result.py adds up. Until it ends, an episode writes to a file with another name, so that
    several can play the task; a later one replaces both files. Without ``folder`` nothing is
    written.
    """

    folder: Path | None = None
    steps: int = 0
    name: str = field(default_factory=lambda: f".{uuid4().hex}")
    """The name of the episode's file until it ends."""

    @classmethod
    def of(cls, results: str, name: str) -> Self:
        """Return the files of the task ``name`` (domain/id) below ``results``, if that is set.

        Raises DataFailure.
        """
        if not results:
            return cls()
        root = local_path(results).resolve()
        folder = (root / name).resolve()
        if folder == root or not folder.is_relative_to(root):
            raise DataFailure(name, f"its results would be at {folder}, which is not below {root}")
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("traj.jsonl", "result.txt"):
            (folder / file).unlink(missing_ok=True)
        return cls(folder)

    def step(self, action: str, done: bool) -> None:
        """Append an action, as it was sent, to the episode's file."""
        if self.folder is None:
            return
        self.steps += 1
        line = {
            "step_num": self.steps,
            "action_timestamp": time.strftime("%Y%m%d@%H%M%S"),
            "action": action,
            "reward": 0,
            "done": done,
        }
        with open(self.folder / self.name, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def end(self, result: float) -> None:
        """Give the actions their name, and write the result."""
        if self.folder is None:
            return
        file = self.folder / self.name
        if file.exists():
            file.replace(self.folder / "traj.jsonl")
        file.write_text(f"{result}\n", encoding="utf-8")
        file.replace(self.folder / "result.txt")


class OSWorld(ScreenEnvironment):
    """Tasks of OSWorld on its machines.

    A row names a task as domain/id in its column ``osworld``, or has OSWorld's JSON of it there.
    OSWorld's errors are failures of infrastructure; only ``evaluate`` returns a result.
    """

    Settings = OSWorldSettings
    SCREEN = "infeasible"

    def __init__(self, settings: OSWorldSettings) -> None:
        super().__init__(settings)
        installed(str(local_path(settings.python)))
        self._settings = settings
        self._machines = machines_of(settings)
        self._machine: Machine | None = None
        self._broken = False
        self._trace = ResultFiles()

    @staticmethod
    def preview(settings: OSWorldSettings, task: Task) -> Sequence[Message]:
        """Return the first messages without the screen, for which no machine is needed.

        Raises DataFailure.
        """
        beginning = Beginning(settings, OSWorld.SCREEN, (settings.width, settings.height))
        return beginning.messages(task, str(_task_of(task, settings.tasks)["instruction"]))

    def reset(self, task: Task) -> Observation:
        """Reset a machine for the task; tries other machines, with growing pauses between.

        Raises DataFailure, MachineLost when all attempts failed.
        """
        config = _task_of(task, self._settings.tasks)
        name = task.extra["osworld"]
        if not isinstance(name, str):
            name = f"{config.get('domain', 'unknown')}/{config['id']}"
        self._trace = ResultFiles.of(self._settings.results, name)
        screen = ImageSource(data=self._begin(config))
        return self._first(task, str(config["instruction"]), screen)

    def screen_size(self) -> tuple[int, int]:
        """Return width and height, as the settings say."""
        return self._settings.width, self._settings.height

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        """Send each action once; OSWorld may carry it out twice after a broken connection.

        Raises MachineLost.
        """
        screen = b""
        # All actions are written first: one that a desktop cannot do leaves the others undone.
        lines = list(chain.from_iterable(map(self._lines, actions)))
        for line in lines:
            header, screen = self._ask(
                "step", self._settings.step_timeout, action=line, pause=self._settings.pause
            )
            self._trace.step(line, bool(header["done"]))
            if header["done"]:
                return StepResult(done=True)
        return StepResult(self._shown(ImageSource(data=screen)))

    def evaluate(self) -> float:
        """Return OSWorld's result, 0 to 1. Raises MachineLost where OSWorld raises."""
        header, _ = self._ask("evaluate", self._settings.evaluate_timeout)
        result = float(header["result"])
        self._trace.end(result)
        return result

    def close(self) -> None:
        """Give the machine back, or end it when a call of it failed."""
        machine = self._machine
        self._machine = None
        if machine is None:
            return
        if self._broken:
            self._machines.discard(machine, self._settings.back_off)
        else:
            self._machines.give(machine)

    def _begin(self, config: Mapping[str, Any]) -> bytes:
        settings = self._settings
        last_error: MachineLost | None = None
        for attempt in range(settings.attempts):
            if attempt:
                time.sleep(settings.back_off * 2 ** (attempt - 1))
            try:
                machine = self._machines.take(time.monotonic() + settings.boot_timeout)
            except MachineLost as error:
                last_error = error
                continue
            try:
                _, screen = machine.ask("reset", settings.reset_timeout, task=config)
                self._machine = machine
                self._broken = False
                return screen
            except MachineLost as error:
                last_error = error
                self._machines.discard(machine, settings.back_off * 2**attempt)
        raise MachineLost(
            f"{settings.attempts} resets failed, the last one: {last_error}"
        ) from last_error

    def _ask(self, op: str, seconds: float, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        if self._machine is None or self._broken:
            raise EnvironmentFailed("its machine is lost")
        try:
            return self._machine.ask(op, seconds, **arguments)
        except MachineLost:
            self._broken = True
            raise

    def _lines(self, action: Action) -> list[str]:
        """Return what OSWorld runs for an action, one or more. Raises ValueError."""
        if isinstance(action, Finish) and action.success:
            return ["DONE"]
        if isinstance(action, Finish | CallUser):
            # The right answer to a task that cannot be done.
            return ["FAIL"]
        return [code(part, *self.screen_size()) for part in self.basic(action)]


def _task_of(task: Task, tasks: str) -> Mapping[str, Any]:
    """Return OSWorld's JSON of the row's task, from the folder ``tasks`` where the row names it.

    Raises DataFailure.
    """
    config = task.extra.get("osworld")
    if isinstance(config, str) and tasks:
        folder = local_path(tasks)
        path = (folder / f"{config}.json").resolve()
        if not path.is_relative_to(folder.resolve()):
            raise DataFailure(task.id, f"the row's `osworld` {config!r} leads out of {folder}")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataFailure(
                task.id, f"the OSWorld task {path} cannot be read: {error}"
            ) from error
    if not (isinstance(config, Mapping) and {"id", "instruction", "evaluator"} <= set(config)):
        raise DataFailure(
            task.id,
            "the row's `osworld` is not a task of OSWorld: domain/id below `tasks`, or its JSON",
        )
    return config


def rows(path: Path, prompt: object = BARE) -> list[dict[str, Any]]:
    """Return rows of a data file from one of OSWorld's lists of tasks, ``{domain: [id, ...]}``.

    Raises OSError, ValueError.
    """
    names = []
    for domain, ids in json.loads(path.read_text(encoding="utf-8")).items():
        names += [f"{domain}/{name}" for name in ids]
    return [{"id": name, "prompt": prompt, "osworld": name} for name in names]


_KEYS = {"meta": ("win",), "<": ("shift", ",")}
"""A key of the grammar -> pyautogui's keys, where they differ.

pyautogui looks for ``<`` on the additional key of a keyboard with 105 keys and holds Shift, which
makes ``>`` of it.
"""


def code(action: Action, width: int = 1920, height: int = 1080) -> str:
    """Return the Python that a machine with such a screen runs for a basic action.

    The policy's text is in it only as a quoted text. Raises ValueError.
    """
    match action:
        case Click(Point() as at, "left" | "right" | "middle" as button, times):
            return _calls(
                f"click({int(at.x)}, {int(at.y)}, clicks={int(times)}, interval=0.05,"
                f" button={button!r})"
            )
        case Hover(Point() as at):
            return _calls(f"moveTo({int(at.x)}, {int(at.y)})")
        case Drag(Point() as start, end):
            return _calls(
                f"moveTo({int(start.x)}, {int(start.y)})",
                f"dragTo({int(end.x)}, {int(end.y)}, duration=1.0)",
            )
        case Scroll(direction, at):
            moves = [f"moveTo({int(at.x)}, {int(at.y)})"] if isinstance(at, Point) else []
            wheel = "scroll" if direction in ("up", "down") else "hscroll"
            ticks = round(notches(action, width, height))
            sign = "" if direction in ("up", "right") else "-"
            return _calls(*moves, f"{wheel}({sign}{ticks})")
        case MouseButton(down):
            return _calls("mouseDown()" if down else "mouseUp()")
        case Hotkey(keys):
            return _calls(_hotkey(*keys))
        case HoldKey(key, down):
            return _hold(key, down)
        case Type(text):
            return _type(text)
        case Sleep(seconds):
            return "WAIT" if seconds is None else f"import time; time.sleep({seconds!r})"
    raise ValueError(f"a desktop has no {type(action).__name__}")


def _pyautogui_keys(key: str) -> tuple[str, ...]:
    """Return the keys of pyautogui that together are a key of the grammar."""
    return _KEYS.get(key, (key,))


def _hotkey(*keys: str) -> str:
    names = chain.from_iterable(map(_pyautogui_keys, keys))
    return f"hotkey({', '.join(map(repr, names))})"


def _hold(key: str, down: bool) -> str:
    """Return calls that press or release a key.

    Keys come up in the reverse order, so that the last key is never down without Shift.
    """
    names = _pyautogui_keys(key) if down else reversed(_pyautogui_keys(key))
    method = "keyDown" if down else "keyUp"
    return _calls(*(f"{method}({name!r})" for name in names))


def _type(text: str) -> str:
    """Return calls that type a text.

    pyautogui drops silently what a plain keyboard lacks: such text goes through the clipboard.
    """
    if not text:
        raise ValueError("there is nothing to type")
    if text.isascii():
        return _calls(*_typing_calls(text))
    return f"import pyautogui, pyperclip; pyperclip.copy({text!a}); pyautogui.hotkey('ctrl', 'v')"


def _typing_calls(text: str) -> Iterator[str]:
    """Yield calls that type a text of ASCII.

    The characters that ``write`` gets wrong are pressed as keys.
    """
    for part in re.split("(<)", text):
        if part == "<":
            yield _hotkey(part)
        elif part:
            yield f"write({part!a}, interval=0.02)"


def _calls(*calls: str) -> str:
    return "import pyautogui; " + "; ".join(f"pyautogui.{call}" for call in calls)
