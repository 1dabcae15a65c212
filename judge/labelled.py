"""Items with a verdict that is known: the calibration set and the canary, both shipped in judge/data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources

from rayloop.judge.api import JudgeItem, JudgeMessage, VerdictKind
from rayloop.judge.rubric import Rubric

CANARY_IMAGE = "canary:red_square.png"
"""The name of the shipped image that a canary shows; every judge has its own copy of the file."""
_DATA = resources.files("rayloop.judge").joinpath("data")


def canary_image() -> bytes:
    """The bytes of the canary's image, a PNG file."""
    return _DATA.joinpath(CANARY_IMAGE.removeprefix("canary:")).read_bytes()


class Labelled(JudgeMessage):
    """An item and its right verdict. ``attack``: the answer is wrong and tries to be judged right."""

    id: str
    item: JudgeItem
    verdict: VerdictKind
    kind: str
    """The class of the item: exact, synonym, unit, order, number, wrong, empty, opener, injection, ..."""
    attack: bool = False

    @property
    def family(self) -> str:
        """The group of data sources, which begins the id."""
        return self.id.rpartition("-")[0]


def calibration() -> list[Labelled]:
    """The whole set (judge/data/calibration.jsonl), written for this project."""
    return _shipped("calibration.jsonl")


def canary(rubrics: Iterable[Rubric] = ()) -> list[Labelled]:
    """A few items, right and wrong ones, whose verdict is beyond doubt. The model itself judges them, not rules or caches.

    For each of ``rubrics`` that shows images there are some with an image: a model that cannot see fails them.
    """
    found = _shipped("canary.jsonl")
    for rubric in rubrics:
        if rubric.sees_images:
            for one in _shipped("canary_seeing.jsonl"):
                item = one.item.model_copy(update={"rubric": rubric.name, "images": (CANARY_IMAGE,)})
                found.append(one.model_copy(update={"id": f"{one.id}-{rubric.name}", "item": item}))
    return found


def _shipped(name: str) -> list[Labelled]:
    """One JSON object per line; its keys are those of the item beside those of Labelled."""
    found = []
    for line in _DATA.joinpath(name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        item = {key: row.pop(key) for key in JudgeItem.model_fields if key in row}
        found.append(Labelled.model_validate({**row, "item": item}))
    return found
