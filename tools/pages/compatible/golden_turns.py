"""Golden turns of every language, from tests/data/languages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayloop.envs.grammar import actions
from rayloop.envs.grammar.actions import Action, Mark, Point
from rayloop.envs.grammar.language import names
from rayloop.envs.grammar.rules import Extent

FOLDER = Path(__file__).parents[3] / "tests/data/languages"
FRACTIONS, PIXELS, THOUSAND = Extent(1, 1), Extent(4000, 4000), Extent(1000, 1000)
SCREENS = {
    "aguvis": FRACTIONS,
    "internvl": FRACTIONS,
    **dict.fromkeys(("ui_tars", "qwen2_5_vl", "opencua", "android_world"), PIXELS),
    **dict.fromkeys(("openai_computer", "anthropic_computer"), PIXELS),
}
FAMILIES = names()


@dataclass(frozen=True)
class GoldenTurn:
    family: str
    text: str
    actions: tuple[Action, ...]
    others: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.family}: {self.text[-60:]}"


def screen(family: str) -> Extent:
    return SCREENS.get(family, THOUSAND)


def golden_turns(family: str) -> list[GoldenTurn]:
    content = yaml.safe_load((FOLDER / f"{family}.yaml").read_text(encoding="utf-8"))
    return [
        GoldenTurn(family, turn["text"], tuple(map(_action, turn["actions"])), turn)
        for turn in content["golden"]
    ]


def _place(written: Any) -> Point | Mark:
    return Mark(str(written["mark"])) if isinstance(written, dict) else Point(*written)


def _action(written: dict[str, Any]) -> Action:
    [(name, fields)] = written.items()
    values = dict(fields)
    for field, value in fields.items():
        if field in ("at", "start", "end"):
            values[field] = _place(value)
        elif field == "path":
            values[field] = tuple(map(_place, value))
        elif field == "keys":
            values[field] = tuple(value)
        elif field == "arguments":
            values[field] = tuple(value.items())
    if name == "Drag":
        values.setdefault("start", None)
    action: Action = getattr(actions, name)(**values)
    return action
