"""Rules for Arc Vision's vectors: its training reward, the library's variant of it, and its
simulated tools.

The two rewards are asked as a run asks them, with ``variant``: what differs is a mismatch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rayloop.core.failures import DataFailure
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId
from rayloop.recipes.arc_vision.original import Simulated
from rayloop.recipes.arc_vision.reward import ArcVisionReward
from tests.vector_rules.entries import Entry, Rule, Unknown

TRAINED = ArcVisionReward.Settings(variant="original")
LIBRARY = ArcVisionReward.Settings(variant="library")
EMPTY_TRAJECTORY = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE)

# Rules --------------------------------------------------------------------------------------------


def _score(entry: Entry, settings: ArcVisionReward.Settings) -> Any:
    """In the shape of what is expected: a number, or the original's dictionary."""
    task = Task("t", (), ground_truth=entry.need("ground_truth"))
    try:
        scored = ArcVisionReward(settings).score(
            EMPTY_TRAJECTORY, task, ScoreContext(0, [entry.need("response")])
        )
    except DataFailure as error:
        return {"raises": str(error)}
    assert isinstance(scored, Scored)
    if not isinstance(entry.expected, Mapping):
        return scored.value
    asked_only, found = "tool_only" in scored.flags, scored.components
    names = {
        "is_small_object": "small",
        "is_edge_object": "edge",
        "bbox_area": "area",
        "tool_invocations": "tools",
        "num_tools_used": "known_tools",
        "num_gate_penalties": "penalties",
        "total_gate_penalty": "r_gate",
    }
    return {
        "score": scored.value,
        **found,
        **{theirs: found[ours] for theirs, ours in names.items()},
        "response_type": "tool_only" if asked_only else "bbox_response",
    }


def trained(entry: Entry, file: Sequence[Entry]) -> Any:
    entry.only("response", "ground_truth")
    return _score(entry, TRAINED)


def library(entry: Entry, file: Sequence[Entry]) -> Any:
    entry.only("response", "ground_truth")
    return _score(entry, LIBRARY)


def step_reward(entry: Entry, file: Sequence[Entry]) -> float | list[float]:
    """The same call again and again: as often as the name says, or as there are rewards."""
    entry.only("region", "zoom_factor", "duration", "type")
    if any(value is None for value in entry.inputs.values()):
        raise Unknown("an argument that is none")
    name = {"Zoom": "zoom_ui_element", "Wait": "wait_for_ui", "Inspect": "inspect_element"}[
        entry.reward.partition("Tool")[0]
    ]
    times = re.search(r"x(\d+)|(\d+) (?:times|calls)|those (\d+)", entry.reward)
    count = int(next(filter(None, times.groups()))) if times else 1
    tools = Simulated()
    paid = [tools.call(name, entry.inputs)[1] for _ in range(count)]
    if ".calc_reward" in entry.reward:
        return tools.gain
    return paid if isinstance(entry.expected, list) else paid[-1]


RULES: dict[str, Rule] = {
    r"^arc_vision_custom_reward\.": trained,
    r"^arc_vision_reward\.": library,
    r"^(Zoom|Wait|Inspect)Tool\.": step_reward,
}
