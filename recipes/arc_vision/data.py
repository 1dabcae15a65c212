"""UI grounding rows: a screenshot, an instruction, and the box of the element that the instruction means."""

from __future__ import annotations

import random
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.protocols import Box
from rayloop.core.types import Message, Task
from rayloop.data.dataset import field, image_entry


class GroundingRows:
    """Reads rows in Arc Vision's schema, or flat ones {id, image, instruction, bbox, page}; other columns are in the task's
    ``extra``. The page type (``extra_info.element_type``, or ``page``) is the task's source, which splits the metrics."""

    class Settings(SettingsModel):
        prompt: str = (
            "{instruction}\nAnswer with the element's box: <bbox>[x1,y1,x2,y2]</bbox>, each number a fraction of width or height."
        )
        """The user's text; ``{instruction}`` is replaced by the row's."""
        image_first: bool = False
        """Image before text. Text first lets a small model read the image knowing what to look for."""

    def __init__(self, settings: GroundingRows.Settings) -> None:
        self._settings = settings

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task with a box. Raises DataFailure."""
        flat = _flat(row, where) if "extra_info" in row else row
        instruction = str(field(flat, "instruction", where))
        text = self._settings.prompt.replace("{instruction}", instruction)
        image = image_entry(field(flat, "image", where), where, root)
        return Task(
            str(field(flat, "id", where)),
            (Message("user", (image, text) if self._settings.image_first else (text, image)),),
            box(field(flat, "bbox", where), where),
            str(flat.get("page", "")),
            {
                **{name: value for name, value in flat.items() if name not in ("image", "bbox")},
                "instruction": instruction,
                **_weights(row),
            },
        )


def _flat(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row in Arc Vision's schema as a flat one. Its id is ``extra_info.id``, else ``<split>-<index>``."""
    extra = field(row, "extra_info", where)
    images = field(row, "images", where)
    if len(images) != 1:
        raise DataFailure(where, f"a grounding row has one image, not {len(images)}")
    return {
        "id": extra.get("id") or f"{field(extra, 'split', where)}-{field(extra, 'index', where)}",
        "page": extra.get("element_type") or "",
        "instruction": field(extra, "original_instruction", where),
        "image": images[0],
        "bbox": field(row, "ground_truth", where),
    }


def _weights(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's own weights for the reward's terms, if it has any."""
    style = row.get("reward_model")
    weights = style.get("reward_weights") if isinstance(style, Mapping) else None
    return {} if weights is None else {"reward_weights": weights}


def box(values: Any, where: str) -> Box:
    """Four fractions in order. Raises DataFailure for anything else: pixel boxes are never guessed at or clamped."""
    numbers = list(values) if isinstance(values, (list, tuple)) else []
    if len(numbers) == 4 and all(isinstance(v, Real) and not isinstance(v, bool) for v in numbers):
        x1, y1, x2, y2 = map(float, numbers)
        if 0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1:
            return x1, y1, x2, y2
    raise DataFailure(where, f"bbox must be [x1, y1, x2, y2], 0 <= x1 < x2 <= 1, 0 <= y1 < y2 <= 1, not {values!r}")


class BoxAnswers:
    """The supervised answer: the task's box, rounded to two decimals. ``tokens``: one token per coordinate and bracket."""

    class Settings(SettingsModel):
        loose: float = Field(0.0, ge=0)
        """Each side is drawn outside the true one, by up to this share of the box's width or height: labels of a hasty annotator,
        which leave a reward something to teach."""

    tokens = ("<bbox>[", "]</bbox>", *(f"{hundredths / 100:.2f}" for hundredths in range(101)))

    def __init__(self, settings: BoxAnswers.Settings) -> None:
        self._settings = settings

    def answer(self, task: Task, rng: random.Random) -> str:
        """The task's box in ``<bbox>``."""
        x1, y1, x2, y2 = task.ground_truth
        if self._settings.loose:
            left, top, right, bottom = (self._settings.loose * rng.random() for _ in range(4))
            wide, high = x2 - x1, y2 - y1
            x1, y1 = max(0.0, x1 - left * wide), max(0.0, y1 - top * high)
            x2, y2 = min(1.0, x2 + right * wide), min(1.0, y2 + bottom * high)
        return "<bbox>[" + ",".join(f"{value:.2f}" for value in (x1, y1, x2, y2)) + "]</bbox>"


class LargeFirst:
    """In the first epoch rows whose true box covers more than the first of ``areas``, then more than the second, then all
    others."""

    class Settings(SettingsModel):
        areas: tuple[float, ...] = (0.05, 0.03)
        """Shares of the image's area, falling. Change them for boxes of other sizes, so that each tier fills some steps."""

    def __init__(self, settings: LargeFirst.Settings) -> None:
        self._areas = settings.areas

    def tier(self, task: Task) -> int:
        """Raises DataFailure when the ground truth is no box."""
        x1, y1, x2, y2 = box(task.ground_truth, f"ground truth of task {task.id}")
        return sum((x2 - x1) * (y2 - y1) <= area for area in self._areas)
