"""The shipped desktop tasks for ``env list`` and ``env play``."""

from __future__ import annotations

from collections.abc import Sequence

from rayloop.core.types import Message, Task
from rayloop.envs.desktop.session import missing
from rayloop.envs.desktop.tasks import PROMPT, SHIPPED, task_file
from rayloop.envs.settings import EnvironmentKind


class Desktops:
    """Coordinates that a person types are pixels of the screen."""

    about = "tasks on a local X desktop with an editor, a file manager and a terminal"
    example = "type(content='hello')"

    def __init__(self) -> None:
        if lacks := missing():
            self.about += f"; missing here: {lacks}"

    @property
    def names(self) -> Sequence[str]:
        return tuple(task_file(SHIPPED).tasks)

    def play(self, name: str, seed: int) -> tuple[EnvironmentKind, Task]:
        pointing = {"coordinates": "absolute", "factor": 1, "max_pixels": 1 << 30}
        kind = EnvironmentKind(use="rayloop.envs.desktop.environment:DesktopTasks", **{"with": {"pointing": pointing}})
        return kind, Task(f"{name}-{seed}", (Message("user", (PROMPT,)),), extra={"desktop": name})

    def turn(self, typed: str) -> str:
        return typed if "Action:" in typed else f"Action: {typed}"


DESKTOPS = Desktops()
