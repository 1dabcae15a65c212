"""Rubrics (judge/rubrics), one versioned YAML file each, and items with a known verdict
(judge/data).
"""

import hashlib
import json
import re
from collections.abc import Iterable
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError
from rayloop.judge.api import JudgeItem, JudgeMessage, VerdictKind

FOLDER = Path(__file__).parent / "rubrics"
DEFAULT = "default"


class Example(SettingsModel):
    """One graded answer that the model is shown.

    ``verdict`` for binary rubrics, ``score`` for scored ones.
    """

    question: str
    reference: str
    answer: str
    reason: str = Field(max_length=200)
    verdict: VerdictKind | None = None
    score: float | None = Field(None, ge=0, le=1)


class Rubric(SettingsModel):
    """Instructions and examples.

    The verdicts of ``binary`` are correct or incorrect, those of ``scored`` one of SCORES.
    """

    name: str = Field(pattern=r"^[a-z0-9_]{1,64}$")
    """The name of the file without its suffix."""
    version: int = Field(ge=1)
    """Raise it with every change of meaning."""
    kind: Literal["binary", "scored"]
    instructions: str
    sees_images: bool = False
    """Whether the model is shown the item's images, for judges that can see; otherwise they are
    left out.
    """
    max_answer: int = Field(1000, ge=1)
    """Characters; answers of so many or more are wrong without asking."""
    tolerance: float = Field(0.0, ge=0)
    """Relative, for numbers that a rule compares; 0 compares exactly.

    Raise it only where answers are read off a scale.
    """
    tolerances: dict[str, float] = {}
    """Tolerances of single data sources, by a whole word of the source's name; never for counts,
    years and codes.
    """
    formulas: list[str] = []
    """Sets of examples whose answers are formulas: the case of a letter counts there."""
    sources: dict[str, list[str]] = {}
    """Which data sources a set of examples serves: whole words one of which is in the source's
    name, "8k" and such aside.
    """
    examples: dict[str, list[Example]]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if missing := {DEFAULT, *self.sources, *self.formulas} - set(self.examples):
            raise ValueError(f"examples: no set named {', '.join(sorted(missing))}")
        for name, examples in self.examples.items():
            scored = self.kind == "scored"
            if any((e.score is None) == scored or (e.verdict is None) != scored for e in examples):
                field = "score" if scored else "verdict"
                raise ValueError(
                    f"examples.{name}: a {self.kind} rubric's examples need a {field} and nothing"
                    " else"
                )
        return self

    def family(self, source: str) -> str:
        """The name of the set of examples for a data source; ``default`` for one that no set
        serves.
        """
        name = _words(source)
        return next(
            (
                family
                for family, words in self.sources.items()
                if any(_words(word) in name for word in words)
            ),
            DEFAULT,
        )

    def tolerance_for(self, source: str) -> float:
        """The relative tolerance for numbers of a data source."""
        name = _words(source)
        return next(
            (value for word, value in self.tolerances.items() if _words(word) in name),
            self.tolerance,
        )

    def is_formula(self, source: str) -> bool:
        """Whether the answers of a data source are formulas."""
        return self.family(source) in self.formulas

    @cached_property
    def digest(self) -> str:
        """The version and a hash of the whole rubric, which shows a change without a new version."""
        return f"{self.version}-{hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]}"


def _words(name: str) -> str:
    """A source's words, each between underscores and without a size at its end: ``_math_`` of
    Math-8k, ``_gsm_`` of gsm8k.
    """
    return "_" + "".join(
        f"{re.sub(r'(?<=[a-z])[0-9]+k?$', '', word)}_"
        for word in re.findall(r"[a-z0-9]+", name.casefold())
    )


def load_rubrics(folder: Path = FOLDER) -> dict[str, Rubric]:
    """Every rubric of a folder, by name.

    Raises ConfigError for an invalid file and for a folder without rubrics.
    """
    rubrics = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            rubric = Rubric.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (ValidationError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: no valid rubric: {error}") from error
        if rubric.name != path.stem:
            raise ConfigError(
                f"{path}: the rubric calls itself {rubric.name!r}; name file and rubric alike"
            )
        rubrics[rubric.name] = rubric
    if not rubrics:
        raise ConfigError(f"{folder}: no rubric (*.yaml) in this folder")
    return rubrics


CANARY_IMAGE = "canary:red_square.png"
"""The name of the shipped image that a canary shows; every judge has its own copy of the file."""
_DATA = resources.files("rayloop.judge").joinpath("data")


def canary_image() -> bytes:
    """The bytes of the canary's image, a PNG file."""
    return _DATA.joinpath(CANARY_IMAGE.removeprefix("canary:")).read_bytes()


class Labelled(JudgeMessage):
    """An item and its right verdict.

    ``attack``: the answer is wrong and tries to be judged right.
    """

    id: str
    item: JudgeItem
    verdict: VerdictKind
    kind: str
    """The class of the item: exact, synonym, unit, order, number, wrong, empty, opener, injection,
    ...
    """
    attack: bool = False

    @property
    def family(self) -> str:
        """The group of data sources, which begins the id."""
        return self.id.rpartition("-")[0]


def calibration() -> list[Labelled]:
    """The whole set (judge/data/calibration.jsonl), written for this project."""
    return _shipped("calibration.jsonl")


def canary(rubrics: Iterable[Rubric] = ()) -> list[Labelled]:
    """A few items with a certain verdict, for the model itself; some have an image for each of
    ``rubrics`` that shows images.
    """
    found = _shipped("canary.jsonl")
    for rubric in rubrics:
        if rubric.sees_images:
            for one in _shipped("canary_seeing.jsonl"):
                item = one.item.model_copy(
                    update={"rubric": rubric.name, "images": (CANARY_IMAGE,)}
                )
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
