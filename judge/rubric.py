"""Rubrics (judge/rubrics), and items with a known verdict (judge/data).

Each rubric is a versioned YAML file.
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

from rayloop.config.settings import SettingsModel, local_path
from rayloop.core.failures import ConfigError
from rayloop.judge.api import JudgeItem, JudgeMessage, VerdictKind

FOLDER = Path(__file__).parent / "rubrics"
DEFAULT = "default"
_DIGEST_CHARACTERS = 12
_SIZE_AT_END = re.compile(r"(?<=[a-z])[0-9]+k?$")


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
    """Instructions and examples for the model.

    A verdict of ``binary`` is correct or incorrect, a verdict of ``scored`` is one of SCORES.
    """

    name: str = Field(pattern=r"^[a-z0-9_]{1,64}$")
    """The name of the file without its suffix."""
    version: int = Field(ge=1)
    """Raise it with every change of meaning."""
    kind: Literal["binary", "scored"]
    instructions: str
    sees_images: bool = False
    """Whether the model is shown the item's images, for judges that accept images."""
    max_answer: int = Field(1000, ge=1)
    """Characters from which an answer is wrong without a question to the model."""
    tolerance: float = Field(0.0, ge=0)
    """Relative, for numbers that a rule compares; 0 compares exactly.

    Raise it only where answers are read off a scale.
    """
    tolerances: dict[str, float] = {}
    """Tolerances of single data sources, by a whole word of the source's name.

    They never apply to counts, years and codes.
    """
    formulas: list[str] = []
    """Sets of examples whose answers are formulas: the case of a letter counts there."""
    sources: dict[str, list[str]] = {}
    """The data sources that a set of examples serves, by whole words of the source's name.

    One of the words must be in the name; a size such as "8k" at the end of a word is ignored.
    """
    examples: dict[str, list[Example]]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        missing = {DEFAULT, *self.sources, *self.formulas} - set(self.examples)
        if missing:
            raise ValueError(f"examples: no set named {', '.join(sorted(missing))}")
        for name, examples in self.examples.items():
            if not all(map(self._has_grade, examples)):
                field = "score" if self.kind == "scored" else "verdict"
                raise ValueError(
                    f"examples.{name}: a {self.kind} rubric's examples need a {field} and nothing"
                    " else"
                )
        return self

    def _has_grade(self, example: Example) -> bool:
        """Whether an example has the grade of this kind of rubric, and no other."""
        needs_score = self.kind == "scored"
        has_score = example.score is not None
        has_verdict = example.verdict is not None
        return has_score == needs_score and has_verdict != needs_score

    def family(self, source: str) -> str:
        """The name of the set of examples for a data source; ``default`` without such a set."""
        name = _words(source)
        for family, words in self.sources.items():
            if any(_words(word) in name for word in words):
                return family
        return DEFAULT

    def tolerance_for(self, source: str) -> float:
        """The relative tolerance for numbers of a data source."""
        name = _words(source)
        for word, tolerance in self.tolerances.items():
            if _words(word) in name:
                return tolerance
        return self.tolerance

    def is_formula(self, source: str) -> bool:
        """Whether the answers of a data source are formulas."""
        return self.family(source) in self.formulas

    @cached_property
    def digest(self) -> str:
        """The version and a hash of the complete rubric.

        The hash shows a change without a new version.
        """
        content_hash = hashlib.sha256(self.model_dump_json().encode()).hexdigest()
        return f"{self.version}-{content_hash[:_DIGEST_CHARACTERS]}"


def _words(name: str) -> str:
    """A source's words, each between underscores and without a size at its end.

    ``_math_8k_`` for Math-8k, ``_gsm_`` for gsm8k.
    """
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return "_" + "".join(f"{_SIZE_AT_END.sub('', word)}_" for word in words)


def chosen_rubric(folder: str, name: str) -> Rubric:
    """The rubric of this name in the folder, "" for the shipped ones. Raises ConfigError."""
    place = local_path(folder) if folder else FOLDER
    rubrics = load_rubrics(place)
    if name not in rubrics:
        raise ConfigError(f"rubric: {name!r} is not in {place}, which holds {', '.join(rubrics)}")
    return rubrics[name]


def load_rubrics(folder: Path = FOLDER) -> dict[str, Rubric]:
    """Every rubric of a folder, by name.

    Raises ConfigError for an invalid file and for a folder without rubrics.
    """
    rubrics = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            rubric = Rubric.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (ValidationError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: not a valid rubric: {error}") from error
        if rubric.name != path.stem:
            raise ConfigError(
                f"{path}: the rubric calls itself {rubric.name!r}; give file and rubric the same"
                " name"
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
    """The class of the item: exact, synonym, unit, number, wrong, empty, opener, injection, ..."""
    attack: bool = False

    @property
    def family(self) -> str:
        """The group of data sources, which begins the id."""
        return self.id.rpartition("-")[0]


def calibration() -> list[Labelled]:
    """The whole set (judge/data/calibration.jsonl), written for this project."""
    return _shipped("calibration.jsonl")


def canary(rubrics: Iterable[Rubric] = ()) -> list[Labelled]:
    """A few items with a certain verdict, for the model itself.

    Each of ``rubrics`` that shows images adds items with an image.
    """
    items = _shipped("canary.jsonl")
    for rubric in rubrics:
        if rubric.sees_images:
            items += [_with_image(labelled, rubric) for labelled in _shipped("canary_seeing.jsonl")]
    return items


def _with_image(labelled: Labelled, rubric: Rubric) -> Labelled:
    item = labelled.item.model_copy(update={"rubric": rubric.name, "images": (CANARY_IMAGE,)})
    return labelled.model_copy(update={"id": f"{labelled.id}-{rubric.name}", "item": item})


def _shipped(name: str) -> list[Labelled]:
    """The items of a shipped file, one JSON object per line.

    An object has the keys of JudgeItem and of Labelled.
    """
    labelled = []
    for line in _DATA.joinpath(name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        item = {key: row.pop(key) for key in JudgeItem.model_fields if key in row}
        labelled.append(Labelled.model_validate({**row, "item": item}))
    return labelled
