"""The Python interpreter by name, for ``env list`` and ``env play``: a picture to look at with code."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence

from PIL import Image, ImageDraw

from rayloop.core.types import ImageSource, Message, Task
from rayloop.envs.settings import EnvironmentKind

SIDE, RADIUS = 640, 7
"""Pixels of the picture, and of a dot in it."""


class Interpreters:
    """A typed line is Python, or ``answer`` and what the answer is."""

    about = "PyVision's Python interpreter with an image, in the sandbox; `result` counts the turns whose code was run"
    example = "print(image_clue_0.size), more statements behind a semicolon, or: answer 7"
    names: Sequence[str] = ("count-dots",)

    def play(self, name: str, seed: int) -> tuple[EnvironmentKind, Task]:
        kind = EnvironmentKind(use="rayloop.envs.interpreter.environment:PythonInterpreter")
        picture, count = dots(seed)
        question = Message("user", (ImageSource(data=picture), "How many black dots are there?"))
        return kind, Task(f"{name}-{seed}", (question,), ground_truth=str(count))

    def turn(self, typed: str) -> str:
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
        ImageDraw.Draw(picture).ellipse((x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS), fill="black")
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return encoded.getvalue(), len(cells)


INTERPRETERS = Interpreters()
