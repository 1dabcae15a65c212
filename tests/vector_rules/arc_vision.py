"""Rules for Arc Vision's vectors: its training reward, the library's variant of it, and its simulated tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.arc_vision.data import box
from recipes.arc_vision.reward import ArcVisionReward, Penalties, arc_vision, parse_box
from tests.vector_rules.entries import Deviation, Entry, Rule

TRAINED = ArcVisionReward.Settings()
LIBRARY = ArcVisionReward.Settings(tool_only=0.0, penalties=Penalties(wrong=0.0, excessive=0.0))
"""The variant also subtracts 0.4 from r_tool for each call beyond two, which no setting expresses and no vector shows."""

ONLY_TAGGED = (
    "a box is a <bbox> tag with fractions in order; pixels, swapped corners and other notations are not guessed at"
)
LAST_COUNTS = "of several boxes the last is the answer, because the reasoning before it may mention others"
NO_STEP_REWARDS = (
    "the simulated tools' step rewards never reached the original's trainer; tools here act, and pay nothing"
)


def _deviation(response: str) -> str | None:
    """Why our reading of a response may differ, None when it must not."""
    if len(re.findall("<bbox>", response)) > 1:
        return LAST_COUNTS
    return ONLY_TAGGED if parse_box(response) is None and re.search(r"\[[\d.,\s]+\]", response) else None


def _reward(entry: Entry, settings: ArcVisionReward.Settings) -> Any:
    entry.only("response", "ground_truth")
    response = entry.need("response")
    scored = arc_vision([response], box(entry.need("ground_truth"), "ground_truth"), settings)
    kind = "tool_only" if "tool_only" in scored.flags else "bbox_response"
    values = {"score": scored.value, **scored.components, "response_type": kind}
    got = values if isinstance(entry.expected, Mapping) else scored.value
    why = _deviation(response)
    return got if why is None else Deviation(got, why)


def trained(entry: Entry, file: Sequence[Entry]) -> Any:
    return _reward(entry, TRAINED)


def library(entry: Entry, file: Sequence[Entry]) -> Any:
    return _reward(entry, LIBRARY)


def step_reward(entry: Entry, file: Sequence[Entry]) -> Deviation:
    return Deviation(None, NO_STEP_REWARDS)


RULES: dict[str, Rule] = {
    r"^arc_vision_custom_reward\.": trained,
    r"^arc_vision_reward\.": library,
    r"^(Zoom|Wait|Inspect)Tool\.": step_reward,
}
