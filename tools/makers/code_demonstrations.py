"""Demonstrations for PyVision's tiny model: ``python -m tools.makers.code_demonstrations OUT
--rows N`` writes demos.jsonl.

Each row is a scene with an expert's code and with the answer to it of the interpreter of
``--config`` (quickstart.yaml).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from rayloop.config.settings import SettingsModel, load
from rayloop.core.failures import EnvironmentFailed
from rayloop.core.protocols import Environment
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.messages import field
from rayloop.envs.interpreter.text import CLOSED, clue, opened
from rayloop.recipes import write_rows
from rayloop.recipes.pyvision.data import QuestionRows, answered
from rayloop.recipes.pyvision.prepare import (
    COUNTED_DOT_PIXELS,
    DOTS,
    KINDS,
    MAX_DOTS,
    PLACES,
    box,
    drawn,
)
from rayloop.run.config import RunConfig

QUICKSTART = Path(__file__).parents[2] / "recipes/pyvision/quickstart.yaml"
CLUES = (*clue(0), *clue(1))
"""The tags that the interpreter puts around the first images that it shows."""
RESULT = (opened("|").split("|")[0], CLOSED)
"""The tags that it puts around the result of code."""


class CluedRows(QuestionRows):
    """``QuestionRows`` with the image between the interpreter's tags: the supervised stage runs
    without the interpreter.
    """

    def _shown(self, images: list[ImageSource]) -> tuple[str | ImageSource, ...]:
        return (CLUES[0], *super()._shown(images), CLUES[1])


def code(kind: str, part: Sequence[int]) -> str:
    """Code that looks at ``part`` (left, top, right, bottom) of the first image: counts its dots,
    or shows it.
    """
    cut = f"image_clue_0.crop({tuple(part)})"
    lines = {
        "count": (
            f'import numpy as np\nprint((np.array({cut}.convert("L")) < 40).sum()'
            f" // {COUNTED_DOT_PIXELS**2})"
        ),
        "dot": f"plt.imshow({cut})\nplt.show()",
    }
    return f"<code>\n```python\n{lines[kind]}\n```\n</code>"


def _tokens() -> tuple[str, ...]:
    """Each part of the demonstrations' texts that always stands together."""
    boxes = [str(box(kind, place)) for kind in KINDS for place in range(len(PLACES))]
    parts = [part for kind in KINDS for part in code(kind, (0, 0, 0, 0)).split("(0, 0, 0, 0)")]
    before, after = answered("|").split("|")
    return (*parts, *boxes, before, after, *DOTS, *CLUES, *RESULT)


class CodeDemonstrations:
    """The supervised answers: an expert's turns in the interpreter, or, with the share
    ``hesitant``, an answer at once.
    """

    class Settings(SettingsModel):
        hesitant: float = Field(0.6, ge=0, le=1)
        """Share of answers without code.

        A warm policy that often guesses leaves something to be learned by reward.
        """
        unsure: float = Field(0.0, ge=0, le=1)
        """Share of the answers without code that are drawn at random instead of being right."""

    tokens = _tokens()

    def __init__(self, settings: CodeDemonstrations.Settings) -> None:
        self._settings = settings

    def answer(self, task: Task, rng: random.Random) -> str | Sequence[Message]:
        """Raises DataFailure for a row without the columns of a demonstration (``main``)."""
        if rng.random() < self._settings.hesitant:
            return answered(self._guess(task, rng))
        seen = field(task.extra, "seen", f"demonstration {task.id}")
        root = Path(task.extra["root"])
        parts = tuple(
            p if isinstance(p, str) else ImageSource(str(root / p["image"])) for p in seen["parts"]
        )
        return [
            Message("assistant", (str(field(task.extra, "code", f"demonstration {task.id}")),)),
            Message(seen["role"], parts),
            Message("assistant", (answered(task.ground_truth),)),
        ]

    def _guess(self, task: Task, rng: random.Random) -> str:
        if rng.random() >= self._settings.unsure:
            return str(task.ground_truth)
        return rng.choice(
            list(DOTS) if task.source == "dot" else [str(n) for n in range(1, MAX_DOTS + 1)]
        )


def demonstrated(
    out: Path, rows: Sequence[dict[str, Any]], config: Path = QUICKSTART
) -> Iterator[dict[str, Any]]:
    """The rows with ``code`` and with ``seen``, the interpreter's answer to it.

    Raises EnvironmentFailed if it showed none.
    """
    configured = load(config, (), RunConfig).environment.episode.environment
    reader = QuestionRows(QuestionRows.Settings())
    for row in rows:
        environment: Environment = configured.build()
        try:
            said = code(row["kind"], row["box"])
            yield {
                **row,
                "code": said,
                "seen": seen(environment, reader.task(row, row["id"], out), said, out),
            }
        finally:
            environment.close()


def seen(environment: Environment, task: Task, said: str, out: Path) -> dict[str, Any]:
    """The message that the environment answers ``said`` with, its images as files below ``out``."""
    environment.reset(task)
    step: Any = environment.step(said)
    if step.observation is None or step.error is not None:
        raise EnvironmentFailed(
            f"demonstration {task.id}: the interpreter answered {step.error or 'nothing'}"
        )
    (message,) = step.observation.messages
    parts: list[Any] = []
    for number, part in enumerate(message.parts):
        if isinstance(part, ImageSource):
            file = f"images/{task.id}-seen-{number}.png"
            (out / file).write_bytes(part.data or b"")
            parts.append({"image": file})
        else:
            parts.append(part)
    return {"role": message.role, "parts": parts}


def main() -> int:
    """Write ``OUT/demos.jsonl`` and its images. Raises EnvironmentFailed."""
    parser = argparse.ArgumentParser(prog="python -m tools.makers.code_demonstrations")
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument(
        "--config", type=Path, default=QUICKSTART, help="the run whose interpreter answers"
    )
    chosen = parser.parse_args()
    write_rows(
        chosen.out,
        "demos",
        demonstrated(chosen.out, list(drawn(chosen.out, "demos", chosen.rows)), chosen.config),
    )
    return 0


if __name__ == "__main__":
    main()
