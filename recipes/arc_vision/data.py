"""UI grounding rows: a screenshot, an instruction, and the box of the element that it means."""

import dataclasses
import random
import re
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.protocols import Box
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import probe
from rayloop.data.messages import PLACEHOLDER, field, image_entry
from rayloop.envs.grammar.family import ANY_MODEL, INSTRUCTION, LANGUAGE, LanguageChoice

PROMPTS = Path(__file__).parent / "prompts"
"""Texts that ``template`` names."""
_FIELD = re.compile(r"\{(\w+)\}")


class GroundingRows:
    """Reads rows in Arc Vision's schema, or flat ones {id, image, instruction, bbox, page}.

    Other columns are in the task's ``extra``. The page type (``extra_info.element_type``, or
    ``page``) is the task's source, which splits the metrics.
    """

    class Settings(SettingsModel):
        prompt: str = (
            "{instruction}\nAnswer with the element's box: <bbox>[x1,y1,x2,y2]</bbox>, each number"
            " a fraction of width or height."
        )
        """The user's text.

        ``{instruction}`` and every other column of the row can be written in it, ``{width}`` and
        ``{height}`` (the image's, in pixels), and ``<image>`` where the image goes.
        """
        template: str = ""
        """In place of ``prompt``: a file, or the name of a text of ``recipes/arc_vision/prompts``.

        ``arc_vision`` is the original's, byte for byte; ``qwen2_5_vl`` and ``qwen3_vl`` ask for the
        boxes that these models write.
        """
        image_first: bool = False
        """Whether the image comes before a text without ``<image>``.

        Text first: a small model knows what to look for in the image.
        """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._prompt = _template(settings.template) if settings.template else settings.prompt

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task with a box. Raises DataFailure."""
        flat = _flat(row, where) if "extra_info" in row else row
        instruction = str(field(flat, "instruction", where))
        image = image_entry(field(flat, "image", where), where, root)
        task_id = str(field(flat, "id", where))
        parts = self._parts({**flat, "instruction": instruction}, image)
        truth = box(field(flat, "bbox", where), where)
        columns = {name: value for name, value in flat.items() if name not in ("image", "bbox")}
        extra = {**columns, "instruction": instruction, **_weights(row)}
        return Task(
            task_id,
            (Message("user", parts),),
            truth,
            str(flat.get("page", "")),
            extra,
        )

    def _parts(self, flat: Mapping[str, Any], image: ImageSource) -> tuple[str | ImageSource, ...]:
        """The prompt with its fields replaced, and the image in its place.

        Raises DataFailure for an image that cannot be read.
        """
        text = self._prompt
        values = {
            name: value for name, value in flat.items() if isinstance(value, str | int | float)
        }
        if "{width}" in text or "{height}" in text:
            _, values["width"], values["height"] = probe(image)
        # The text is split before the columns are filled in, since they may hold the placeholder.
        head, placeholder, tail = text.partition(PLACEHOLDER)
        if not placeholder:
            head, tail = ("", text) if self._settings.image_first else (text, "")

        def value_of(match: re.Match[str]) -> str:
            return str(values.get(match[1], match[0]))

        head = _FIELD.sub(value_of, head)
        tail = _FIELD.sub(value_of, tail)
        return tuple(part for part in (head, image, tail) if part)


class ScreenRows(GroundingRows):
    """Grounding rows that are asked with the prompt of the model's language."""

    class Settings(GroundingRows.Settings):
        prompt: str = INSTRUCTION
        """The task, around which the language has its prompt; otherwise like GroundingRows."""
        language: Annotated[LanguageChoice, LANGUAGE] = ANY_MODEL
        """The model's language. A run sets it to ``environment.language``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._language = settings.language

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """As ``GroundingRows.task``."""
        # The other readers of this module need no action language.
        from rayloop.envs.grammar.screens import asked_in

        task = super().task(row, where, root)
        return asked_in(self._language, dataclasses.replace(task, bare=True))


def _template(name: str) -> str:
    """The shipped text of that name, or that file. Raises ConfigError that says where it looked."""
    places = (PROMPTS / f"{name}.txt", Path(name).expanduser())
    for place in places:
        if place.is_file():
            return place.read_bytes().decode()
    searched = " and ".join(map(str, places))
    raise ConfigError(
        f"data.reader.with.template: the text {name!r} was not found; looked for {searched}"
    )


def _flat(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row in Arc Vision's schema as a flat one.

    Its id is ``extra_info.id``, else ``<split>-<index>``.
    """
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
    """The row's weights for the reward's terms, if it has any."""
    style = row.get("reward_model")
    weights = style.get("reward_weights") if isinstance(style, Mapping) else None
    return {} if weights is None else {"reward_weights": weights}


def box(values: Any, where: str) -> Box:
    """Four fractions in order.

    Raises DataFailure for anything else: pixel boxes are never guessed at or clamped.
    """
    numbers = list(values) if isinstance(values, (list, tuple)) else []
    if len(numbers) == 4 and all(map(_is_number, numbers)):
        x1, y1, x2, y2 = map(float, numbers)
        if 0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1:
            return x1, y1, x2, y2
    raise DataFailure(
        where,
        f"bbox must be [x1, y1, x2, y2], 0 <= x1 < x2 <= 1, 0 <= y1 < y2 <= 1, not {values!r}",
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class BoxAnswers:
    """The supervised answer: the task's box, rounded to two decimals.

    ``tokens``: one token per coordinate and bracket.
    """

    class Settings(SettingsModel):
        loose: float = Field(0.0, ge=0)
        """Sides are drawn outside the true ones by up to this share.

        A hasty annotator makes such labels, and a reward can improve on them.
        """

    tokens = ("<bbox>[", "]</bbox>", *(f"{hundredths / 100:.2f}" for hundredths in range(101)))

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def answer(self, task: Task, rng: random.Random) -> str:
        """The task's box in ``<bbox>``."""
        x1, y1, x2, y2 = task.ground_truth
        if self._settings.loose:
            margins = [self._settings.loose * rng.random() for _ in range(4)]
            width = x2 - x1
            height = y2 - y1
            x1 = max(0.0, x1 - margins[0] * width)
            y1 = max(0.0, y1 - margins[1] * height)
            x2 = min(1.0, x2 + margins[2] * width)
            y2 = min(1.0, y2 + margins[3] * height)
        sides = ",".join(f"{value:.2f}" for value in (x1, y1, x2, y2))
        return f"<bbox>[{sides}]</bbox>"


class LargeFirst:
    """Orders the rows of the first epoch by the area of the true box.

    Rows whose box covers more than the first of ``areas`` come first, then those above the second,
    then all others.
    """

    class Settings(SettingsModel):
        areas: tuple[float, ...] = (0.05, 0.03)
        """Shares of the image's area, falling.

        Change them for boxes of other sizes, so that each tier fills some steps.
        """

    def __init__(self, settings: Settings) -> None:
        self._areas = settings.areas

    def tier(self, task: Task) -> int:
        """The row's place in ``areas``. Raises DataFailure when the ground truth is not a box."""
        x1, y1, x2, y2 = box(task.ground_truth, f"ground truth of task {task.id}")
        return sum((x2 - x1) * (y2 - y1) <= area for area in self._areas)
