"""Every number of a configuration is finite, but for those that may be infinite by name; and a text
may look like a number.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from rayloop.config.explain import keys, short, walk
from rayloop.config.settings import Component, SettingsModel, check_components, dump, load
from rayloop.core.failures import ConfigError
from rayloop.core.groups import Unscored
from rayloop.grpo.losses.settings import Correction
from rayloop.rewards.functions import as_outcome
from rayloop.run.config import RunConfig
from rayloop.run.records.jsonl import encode
from rayloop.serve_apps.settings import ServeFile
from rayloop.sft.stage import SftConfig
from tools.pages.config import COMPONENTS

INFINITE = {("Correction", "high"), ("Correction", "veto")}
"""No upper bound of a correction is one: the only numbers that may be infinite."""


def spoiled(annotation: Any, bad: float) -> Iterator[Any]:
    """Values of this annotation with ``bad`` wherever it has a float."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is float:
        yield bad
    elif origin is Annotated:
        yield from spoiled(inner[0], bad)
    elif origin in (Union, types.UnionType):
        for part in inner:
            yield from spoiled(part, bad)
    elif origin is tuple and Ellipsis not in inner:
        for at, part in enumerate(inner):
            for value in spoiled(part, bad):
                yield [value if at == place else 0.5 for place in range(len(inner))]
    elif origin in (tuple, list, frozenset, set):
        yield from ([value] for value in spoiled(inner[0], bad))
    elif origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        yield from ({"a": value} for value in spoiled(inner[1], bad))


def classes() -> list[type[BaseModel]]:
    """All settings classes: of a run, a supervised stage, a server, and those of every shipped
    component.
    """
    found = {model for root in (RunConfig, SftConfig, ServeFile) for _, model in walk(root)}
    for uses in COMPONENTS.values():
        for use in uses:
            if (own := Component(use=use).settings_class()) is not None:
                found |= {model for _, model in walk(own)}
    return sorted(found, key=lambda model: model.__qualname__)


def test_no_number_of_a_configuration_is_infinite_or_nan() -> None:
    tried, accepted = 0, []
    for model in classes():
        for key, annotation in keys(model).items():
            if (model.__name__, key) in INFINITE:
                continue
            for bad in (math.nan, math.inf, -math.inf):
                for value in spoiled(annotation, bad):
                    tried += 1
                    try:
                        model.model_validate({key: value})
                        refused = False
                    except ValidationError as error:
                        refused = any(
                            detail["loc"] and detail["loc"][0] == key for detail in error.errors()
                        )
                    if not refused:
                        accepted.append(f"{model.__qualname__}.{key}={value}")
    assert accepted == []
    assert tried > 300, "the walk has lost its way"


def test_the_exceptions_are_upper_bounds_that_are_none() -> None:
    made = TypeAdapter(Correction).validate_python(
        {"action": "mask", "high": math.inf, "veto": [0.1, math.inf]}
    )
    assert (made.high, made.veto) == (math.inf, (0.1, math.inf))
    for wrong in (
        {"high": math.nan},
        {"veto": [0.1, math.nan]},
        {"veto": [math.inf, math.inf]},
        {"low": math.nan},
    ):
        with pytest.raises(ValidationError):
            TypeAdapter(Correction).validate_python(wrong)


@pytest.mark.parametrize("betas", [[0.9, 1.0], [0.9, 1.5], [-0.1, 0.9], [1.0, 0.9]])
def test_betas_lie_below_one(betas: list[float]) -> None:
    with pytest.raises(ValidationError, match="betas"):
        RunConfig.model_validate({"policy": {"optimizer": {"betas": betas}}})


class Named(SettingsModel):
    name: str
    more: tuple[str, ...] = ()
    kind: Literal["a", "b"] = "a"
    count: int = 0


@pytest.mark.parametrize("text", ["123456", "0042", "1.50", "1e5", "true", "+7", ".5", "-0"])
def test_a_number_where_a_text_belongs_is_read_as_it_was_written(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: x\n", encoding="utf-8")
    assert load(file, [f"name={text}", "count=3"], Named).name == text
    file.write_text(f"name: {text}\nmore: [{text}, b]\ncount: 3\n", encoding="utf-8")
    made = load(file, [], Named)
    assert (made.name, made.more, made.count) == (text, (text, "b"), 3)
    (tmp_path / "again.yaml").write_text(dump(made), encoding="utf-8")
    assert load(tmp_path / "again.yaml", [], Named) == made
    below = tmp_path / "below.yaml"
    below.write_text("extends: run.yaml\ncount: 4\n", encoding="utf-8")
    assert load(below, [], Named).name == text
    assert load(below, ["name=other"], Named).name == "other"


def test_what_no_text_was_written_for_is_still_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: [1]\nkind: 3\n", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load(file, ["count=x"], Named)
    for said in (
        r"name: got [1], expected a text (a number as a text is written in quotes: '7')",
        "kind: got 3",
        "count: got 'x'",
    ):
        assert said in str(raised.value)
    check_components(load(file, ["name=1", "kind=a"], Named))


def test_a_whole_number_of_too_many_digits_is_named_and_ends_nothing() -> None:
    huge = 10**5000
    outcome = as_outcome(huge)
    assert isinstance(outcome, Unscored)
    assert (
        outcome.reason
        == "the reward source returned int of too many digits to show, not a finite number"
    )
    assert short([huge]) == "list of too many digits to show"
    assert encode({"reward": huge, "count": 2**1023}) == f'{{"reward":null,"count":{2**1023}}}'
