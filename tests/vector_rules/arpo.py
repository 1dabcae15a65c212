"""Rules for ARPO's vectors: its reward, its action parser, its resize and its box tokens, with
``variant: original``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId
from rayloop.envs.grammar.arpo import Broken, add_box_token, parsed, resized
from rayloop.recipes.arpo.reward import ArpoReward
from tests.vector_rules.entries import Entry, Rule, Unknown

ORIGINAL = ArpoReward(ArpoReward.Settings(variant="original"))
TURNS = {0.0: "Action: wait()", -1.0: "I would rather not."}
"""A turn of each format."""


def _scored(result: float | None, turn: str) -> Scored:
    played = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE, result)
    scored = ORIGINAL.score(played, Task("t", ()), ScoreContext(0, [turn]))
    assert isinstance(scored, Scored)
    return scored


def trajectory_reward(entry: Entry, file: Sequence[Entry]) -> float:
    entry.only("eval_result", "format_reward")
    form = float(entry.need("format_reward"))
    if form not in TURNS:
        raise Unknown(f"a format of {form}")
    scored = _scored(entry.need("eval_result"), TURNS[form])
    assert scored.components["format"] == form
    return scored.value


def action(entry: Entry, file: Sequence[Entry]) -> Mapping[str, Any]:
    """Of several calls the first is reported."""
    entry.only("prediction")
    text = entry.need("prediction")
    form = {"format_reward": _scored(1.0, text).components["format"]}
    try:
        first, *others = parsed(text)
    except Broken as error:
        return form | {"error": str(error)}
    last_line = first.code.rstrip().rpartition("\n")[2]
    reported = {
        "action_type": first.name,
        "inputs": first.inputs,
        "last_line": last_line,
        "n_actions": 1 + len(others),
    }
    return form | reported


def resize(entry: Entry, file: Sequence[Entry]) -> tuple[int, int]:
    found = re.search(r"\((\d+), *(\d+)\)", entry.reward)
    if found is None and not {"height", "width"} <= set(entry.inputs):
        raise Unknown("no height and width")
    height, width = found.groups() if found else (entry.need("height"), entry.need("width"))
    return resized(int(height), int(width))


def box_token(entry: Entry, file: Sequence[Entry]) -> str:
    entry.only("text")
    return add_box_token(entry.need("text"))


RULES: dict[str, Rule] = {
    r"^trajectory reward = eval": trajectory_reward,
    r"^action parse": action,
    r"^smart_resize": resize,
    r"^add_box_token": box_token,
}
