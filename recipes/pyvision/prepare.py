"""Draws the scenes: ``python -m rayloop data prepare pyvision --out DIR`` makes train, val and test.jsonl, and images, in DIR.

``--demos N`` adds demos.jsonl: N scenes with the code of an expert and what the interpreter of quickstart.yaml answered.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rayloop.config.settings import load
from rayloop.core.failures import EnvironmentFailed
from rayloop.core.protocols import Environment
from rayloop.core.types import ImageSource, Task
from rayloop.recipes.pyvision.data import QuestionRows, code
from rayloop.recipes.pyvision.scenes import KINDS, scene
from rayloop.run.config import RunConfig

QUICKSTART = Path(__file__).parent / "quickstart.yaml"
ROWS = {"train": 1000, "val": 64, "test": 128}
FIRST = {"train": 0, "val": 100_000, "test": 200_000, "demos": 300_000}
"""The first seed of each split: no scene is in two of them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the splits. Returns exit code 0; raises RayloopError."""
    parser = argparse.ArgumentParser(prog="python -m rayloop data prepare pyvision", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--demos", type=int, default=0, help="demonstrations to make as well, in the interpreter")
    chosen = parser.parse_args(arguments)
    for split, count in (*ROWS.items(), ("demos", chosen.demos)):
        if count:
            rows = list(drawn(chosen.out, split, count))
            made = [*demonstrated(chosen.out, rows)] if split == "demos" else rows
            (chosen.out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
            print(f"{chosen.out / f'{split}.jsonl'}: {len(made)} rows")
    return 0


def drawn(out: Path, split: str, count: int) -> Iterator[dict[str, Any]]:
    """Rows {id, image, question, answer, kind, box}; their images are written below ``out``."""
    (out / "images").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        made = scene(kind, FIRST[split] + number)
        image = f"images/{split}-{number}.png"
        made.image.save(out / image, compress_level=1)
        yield {
            "id": f"{split}-{number}", "image": image, "question": made.question, "answer": made.answer,
            "kind": kind, "box": made.box,
        }  # fmt: skip


def demonstrated(out: Path, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows with ``code`` and with ``seen``, what the interpreter showed for it. Raises EnvironmentFailed if it showed none."""
    configured = load(QUICKSTART, (), RunConfig).environment.episode.environment
    reader = QuestionRows(QuestionRows.Settings())
    for row in rows:
        environment: Environment = configured.build()
        try:
            said = code(row["kind"], row["box"])
            yield {**row, "code": said, "seen": seen(environment, reader.task(row, row["id"], out), said, out)}
        finally:
            environment.close()


def seen(environment: Environment, task: Task, said: str, out: Path) -> dict[str, Any]:
    """The message that the environment answers ``said`` with, its images as files below ``out``."""
    environment.reset(task)
    step: Any = environment.step(said)
    if step.observation is None or step.error is not None:
        raise EnvironmentFailed(f"demonstration {task.id}: the interpreter answered {step.error or 'nothing'}")
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


if __name__ == "__main__":
    sys.exit(main())
