"""Rules for Arc Vision's vectors: its training reward, the library's variant of it, and its simulated tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rayloop.core.failures import DataFailure
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Sampling, Scored, Task, Trajectory, TrajectoryId
from recipes.arc_vision.data import box
from recipes.arc_vision.original import looks_like_box, trained_box
from recipes.arc_vision.reward import ArcVisionReward, parse_box
from tests.vector_rules.entries import Deviation, Entry, Rule

TRAINED = ArcVisionReward.Settings(variant="original", closer=("zoom",))
LIBRARY = ArcVisionReward.Settings(variant="library", closer=("zoom",))
DEFAULT = ArcVisionReward.Settings()
PLAYED = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE)

NO_BOX = (
    "a true box without area, or not within 0..1, is bad data: its task is put aside, and no score is made up for it"
)
LAST_COUNTS = "of several boxes the last is the answer, because the reasoning before it may mention others"
ONLY_TAGGED = (
    "a box is a <bbox> tag with fractions in order; pixels, swapped corners and other notations are not guessed at"
)
NO_STEP_REWARDS = (
    "the simulated tools' step rewards never reached the original's trainer; tools here act, and pay nothing"
)


def _why(entry: Entry) -> str:
    """Why our default may differ from the original; empty when it must not."""
    response = entry.need("response")
    try:
        box(entry.need("ground_truth"), "ground_truth")
    except DataFailure:
        return NO_BOX
    if len(re.findall("<bbox>", response)) > 1:
        return LAST_COUNTS
    return ONLY_TAGGED if parse_box(response) is None and (looks_like_box(response) or trained_box(response)) else ""


def _score(entry: Entry, settings: ArcVisionReward.Settings) -> Any:
    """In the shape of what is expected: a number, or the original's dictionary."""
    task = Task("t", (), ground_truth=entry.need("ground_truth"))
    try:
        scored = ArcVisionReward(settings).score(PLAYED, task, ScoreContext(0, [entry.need("response")]))
    except DataFailure as error:
        return {"raises": str(error)}
    assert isinstance(scored, Scored)
    if not isinstance(entry.expected, Mapping):
        return scored.value
    asked_only, found = "tool_only" in scored.flags, scored.components
    names = {
        "is_small_object": "small", "is_edge_object": "edge", "bbox_area": "area", "tool_invocations": "tools",
        "num_tools_used": "known_tools", "num_gate_penalties": "penalties", "total_gate_penalty": "r_gate",
    }  # fmt: skip
    return {
        "score": scored.value,
        **found,
        **{theirs: found[ours] for theirs, ours in names.items()},
        "response_type": "tool_only" if asked_only else "bbox_response",
    }


def trained(entry: Entry, file: Sequence[Entry]) -> Deviation:
    entry.only("response", "ground_truth")
    return Deviation(_score(entry, DEFAULT), _why(entry), _score(entry, TRAINED))


def library(entry: Entry, file: Sequence[Entry]) -> Any:
    entry.only("response", "ground_truth")
    return _score(entry, LIBRARY)


def step_reward(entry: Entry, file: Sequence[Entry]) -> Deviation:
    return Deviation(None, NO_STEP_REWARDS)


RULES: dict[str, Rule] = {
    r"^arc_vision_custom_reward\.": trained,
    r"^arc_vision_reward\.": library,
    r"^(Zoom|Wait|Inspect)Tool\.": step_reward,
}
