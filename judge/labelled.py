"""Items with the verdict that they deserve: the calibration set and the canary."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources

from pydantic import ValidationError

from rayloop.core.failures import DataFailure
from rayloop.judge.api import JudgeItem, VerdictKind, Wire
from rayloop.judge.rubric import Rubric

CANARY_IMAGE = "canary:red_square.png"
"""The name of the shipped image that a canary shows; every judge has its own copy of the file."""


def canary_image() -> bytes:
    return resources.files("rayloop.judge").joinpath("data", CANARY_IMAGE.removeprefix("canary:")).read_bytes()


class Labelled(Wire):
    """``attack``: the answer tries to be judged right without being so (then ``verdict`` is incorrect)."""

    id: str
    item: JudgeItem
    verdict: VerdictKind
    kind: str
    """What is tested: exact, synonym, unit, order, number, wrong, empty, opener, injection, ..."""
    attack: bool = False

    @property
    def family(self) -> str:
        """The group of data sources, which begins the id."""
        return self.id.rpartition("-")[0]


def calibration() -> list[Labelled]:
    """The whole set (judge/data/calibration.jsonl), written for this project."""
    return _shipped("calibration.jsonl")


def canary(rubrics: Iterable[Rubric] = ()) -> list[Labelled]:
    """A few items, right and wrong ones, whose verdict nobody doubts, and which are put to the model itself.

    For each of ``rubrics`` that sees there are some with an image: a model that cannot look fails them.
    """
    found = _shipped("canary.jsonl")
    for rubric in rubrics:
        if rubric.sees_images:
            for one in _shipped("canary_seeing.jsonl"):
                item = one.item.model_copy(update={"rubric": rubric.name, "images": (CANARY_IMAGE,)})
                found.append(one.model_copy(update={"id": f"{one.id}-{rubric.name}", "item": item}))
    return found


def _shipped(name: str) -> list[Labelled]:
    return read_labelled(resources.files("rayloop.judge").joinpath("data", name).read_text(encoding="utf-8"), name)


def read_labelled(text: str, name: str = "labelled items") -> list[Labelled]:
    """One JSON object per line: id, source, question, reference, answer, verdict, kind, attack. Raises DataFailure."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            asked = {key: row.pop(key) for key in ("question", "reference", "answer", "source")}
            item = JudgeItem.model_validate({**asked, "rubric": row.pop("rubric", "equivalence"), "fresh": row.pop("fresh", False)})
            found.append(Labelled.model_validate({**row, "item": item}))
        except (ValueError, ValidationError, KeyError, AttributeError) as error:
            raise DataFailure(f"{name}:{number}", f"no labelled item: {error}") from error
    return found
