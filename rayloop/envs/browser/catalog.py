"""The pages of MiniWoB++ by name, for ``env list`` and ``env play``."""

from __future__ import annotations

from collections.abc import Sequence

from rayloop.core.types import Message, Task
from rayloop.envs.browser.miniwob import pages
from rayloop.envs.grammar.screens import INSTRUCTION
from rayloop.envs.settings import EnvironmentKind


class MiniWobPages:
    """Points are pixels of the screen, as a person counts them."""

    about = 'MiniWoB++, small web pages in a real Chromium; needs pip install "rayloop[browser]" and chromium-headless-shell'
    example = "click(start_box='(80,120)'), type(content='text') or finished()"

    @property
    def names(self) -> Sequence[str]:
        return pages()

    def play(self, name: str, seed: int) -> tuple[EnvironmentKind, Task]:
        settings = {"pointing": {"factor": 1}}
        kind = EnvironmentKind(use="rayloop.envs.browser.miniwob:MiniWob", **{"with": settings})
        return kind, Task(f"{name}-{seed}", (Message("user", (INSTRUCTION,)),), extra={"page": name, "seed": seed})

    def turn(self, typed: str) -> str:
        return typed if "Action:" in typed else f"Action: {typed}"


MINIWOB = MiniWobPages()
