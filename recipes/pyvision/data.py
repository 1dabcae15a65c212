"""Questions about images, to be answered with code: PyVision's rows and flat ones, and demonstrations of how it is done."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.dataset import field, image_entry
from rayloop.envs.interpreter.text import CLOSED, clue, opened
from rayloop.recipes.pyvision.scenes import COUNTED, DOTS, KINDS, MOST, PLACES, box

CLUES = (*clue(0), *clue(1))
"""What the interpreter puts around the first images that the policy is shown."""
RESULT = (opened("|").split("|")[0], CLOSED)
"""What it puts around the result of code."""


class QuestionRows:
    """Reads PyVision's rows (``mm_hint``, ``reward_model``, ``extra_info``) or flat ones {id, image, question, answer, kind}.

    A flat row may have ``videos`` in place of the image: paths of animated pictures, or lists of frames; only the policy's code
    sees them. ``kind``, or ``data_source``, becomes the task's source, and splits the metrics.
    """

    class Settings(SettingsModel):
        prompt: str = "{question}"
        """The user's text behind the image; ``{question}`` is replaced by the row's."""
        clues: bool = False
        """Whether the image stands between the tags that the interpreter puts around it: on for demonstrations, which are trained
        without the interpreter, and off otherwise."""

    def __init__(self, settings: QuestionRows.Settings) -> None:
        self._settings = settings

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        flat = _flat(row, where) if "mm_hint" in row else row
        text = self._settings.prompt.replace("{question}", str(field(flat, "question", where)))
        return Task(
            str(field(flat, "id", where)),
            (Message("user", (*self._shown(flat, where, root), text)),),
            str(field(flat, "answer", where)),
            str(flat.get("kind", "")),
            {**flat, "root": str(root), **({"videos": _videos(flat["videos"], where, root)} if flat.get("videos") else {})},
        )

    def _shown(self, flat: Mapping[str, Any], where: str, root: Path) -> tuple[str | ImageSource, ...]:
        if flat.get("videos") and not flat.get("image"):
            return ()
        image = image_entry(field(flat, "image", where), where, root)
        before, after = CLUES[:2]
        return (before, image, after) if self._settings.clues else (image,)


def _videos(entries: Any, where: str, root: Path) -> list[str | list[str]]:
    """Their files below ``root``, as the interpreter wants them: one animated picture, or a list of frames. Raises DataFailure."""
    if not isinstance(entries, list | tuple) or not all(isinstance(one, str | list | tuple) for one in entries):
        raise DataFailure(where, f"videos must be a list of paths, or of lists of frames, not {entries!r:.100}")
    return [str(root / one) if isinstance(one, str) else [str(root / str(frame)) for frame in one] for one in entries]


def _flat(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    hint, extra = field(row, "mm_hint", where), field(row, "extra_info", where)
    if field(hint, "hint_type", where) != "image":
        raise DataFailure(where, f"only hints that are images are read, not {hint['hint_type']!r}")
    return {
        "id": str(field(extra, "index", where)),
        "image": field(hint, "hint_path", where),
        "question": field(extra, "question", where),
        "answer": field(field(row, "reward_model", where), "ground_truth", where),
        "kind": str(row.get("data_source", "")),
    }


def answered(text: str) -> str:
    """The last turn of an episode: the answer as PyVision's verifier reads it."""
    return f"<answer>\n\\boxed{{{text}}}\n</answer>"


def code(kind: str, part: Sequence[int]) -> str:
    """What looks at ``part`` (left, top, right, bottom) of the first image: counts its dots, or shows it."""
    cut = f"image_clue_0.crop({tuple(part)})"
    lines = {
        "count": f'import numpy as np\nprint((np.array({cut}.convert("L")) < 40).sum() // {COUNTED**2})',
        "dot": f"plt.imshow({cut})\nplt.show()",
    }
    return f"<code>\n```python\n{lines[kind]}\n```\n</code>"


def _tokens() -> tuple[str, ...]:
    """Each part of the demonstrations' texts that always stands together."""
    boxes = [str(box(kind, place)) for kind in KINDS for place in range(len(PLACES))]
    parts = [part for kind in KINDS for part in code(kind, (0, 0, 0, 0)).split("(0, 0, 0, 0)")]
    before, after = answered("|").split("|")
    return (*parts, *boxes, before, after, *DOTS, *CLUES, *RESULT)


class Demonstrations:
    """The supervised answers: what an expert did in the interpreter, or, as often as ``hesitant``, an answer at once."""

    class Settings(SettingsModel):
        hesitant: float = Field(0.6, ge=0, le=1)
        """Share of answers without code. A warm policy that often guesses leaves something to be learned by reward."""
        unsure: float = Field(0.0, ge=0, le=1)
        """Share of the answers without code that are drawn at random instead of being right."""

    tokens = _tokens()

    def __init__(self, settings: Demonstrations.Settings) -> None:
        self._settings = settings

    def answer(self, task: Task, rng: random.Random) -> str | Sequence[Message]:
        """Raises DataFailure for a row without the columns of a demonstration (``prepare.py --demos``)."""
        if rng.random() < self._settings.hesitant:
            return answered(self._guess(task, rng))
        seen = field(task.extra, "seen", f"demonstration {task.id}")
        root = Path(task.extra["root"])
        parts = tuple(p if isinstance(p, str) else ImageSource(str(root / p["image"])) for p in seen["parts"])
        return [
            Message("assistant", (str(field(task.extra, "code", f"demonstration {task.id}")),)),
            Message(seen["role"], parts),
            Message("assistant", (answered(task.ground_truth),)),
        ]

    def _guess(self, task: Task, rng: random.Random) -> str:
        if rng.random() >= self._settings.unsure:
            return str(task.ground_truth)
        return rng.choice(list(DOTS) if task.source == "dot" else [str(n) for n in range(1, MOST + 1)])
