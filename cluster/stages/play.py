"""One episode of an environment, played by a person: what the policy would see, its actions from the keyboard, and the result."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Task
from rayloop.data.images import decode, probe
from rayloop.envs.instance import Instance
from rayloop.envs.instance import Environments
from rayloop.envs.settings import EnvironmentKind, EpisodeSettings
from rayloop.view.pictures import Colours, blocks, colours
from rayloop.view.words import visible

QUIT = ("quit", "exit")
DEFAULTS = EpisodeSettings()
Ask = Callable[[], str | None]
Write = Callable[[str], None]


class PictureView:
    """Shows a picture: as half blocks where the terminal has colours, else as a file in ``folder``."""

    def __init__(self, folder: Path, kind: Colours | None, write: Write) -> None:
        self._folder, self._kind, self._write = folder, kind, write
        self._shown = 0

    def show(self, source: ImageSource) -> None:
        """Raises DataFailure for what is no picture."""
        data, width, height = probe(source)
        picture = decode(data)
        if self._kind is not None:
            room = shutil.get_terminal_size()
            columns = min(room.columns, max(40, 2 * (room.lines - 8) * width // height))
            self._write(blocks(picture, columns, self._kind))
            return
        self._shown += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{self._shown:02d}.png"
        encoded = io.BytesIO()
        picture.save(encoded, "PNG")
        file.write_bytes(encoded.getvalue())
        self._write(f"picture of {width}x{height} pixels: {file}")


async def play(kind: EnvironmentKind, task: Task, ask: Ask, write: Write, pictures: PictureView, example: str = "") -> float | None:
    """Play until the environment ends the episode, or ``ask`` gives None or ``quit``. Returns what ``evaluate`` did.

    Raises DataFailure, EnvironmentFailed, DeadlineExceeded and whatever the environment raises.
    """
    environments = Environments(kind, {})
    instance = environments.of(task)
    try:
        await instance.make(DEFAULTS.reset_timeout)
        first: Observation = await instance.call("reset", task, timeout=DEFAULTS.reset_timeout)
        _show(first, write, pictures)
        write(f"Type what the policy would, one turn a line{f', such as {example}' if example else ''}; quit ends it.")
        await _turns(instance, ask, write, pictures)
        result: float | None = await instance.call("evaluate", timeout=DEFAULTS.step_timeout)
        write("the environment gives no result" if result is None else f"result: {result:g}")
        return result
    finally:
        await instance.close(DEFAULTS.reset_timeout)
        environments.end()


async def _turns(instance: Instance, ask: Ask, write: Write, pictures: PictureView) -> None:
    while (text := ask()) is not None and text.strip().lower() not in QUIT:
        if not text.strip():
            continue
        step: StepResult = await instance.call("step", text, timeout=DEFAULTS.step_timeout)
        if step.error is not None:
            write(f"not carried out: {visible(step.error)}")
        if step.observation is not None:
            _show(step.observation, write, pictures)
        if step.done or step.observation is None:
            write("the episode is over")
            return


def _show(observation: Observation, write: Write, pictures: PictureView) -> None:
    for message in observation.messages:
        for part in message.parts:
            if isinstance(part, str):
                write(f"{message.role}: {visible(part)}")
            else:
                pictures.show(part)


def keyboard(echo: bool) -> str | None:
    """The next line; None at the end of input. ``echo`` writes it too, where no terminal does."""
    print("> ", end="", flush=True)
    line = sys.stdin.readline()
    if echo or not line:
        print(visible(line.rstrip("\n")), flush=True)
    return line.rstrip("\n") if line else None


def shown_as(environment: Mapping[str, str] = os.environ) -> Colours | None:
    """What standard output can show."""
    return colours(environment, sys.stdout.isatty())
