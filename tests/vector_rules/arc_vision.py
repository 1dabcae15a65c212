"""Rules for Arc Vision's vectors: its training reward, the library's variant of it, and its simulated tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from rayloop.core.failures import DataFailure
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext, StepResult
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId
from recipes.arc_vision.reward import ArcVisionReward
from tests.vector_rules.entries import Deviation, Entry, Rule, Unknown

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
CROP_LOOKS_CLOSER = "a call that names crop looks closer, as one that names zoom does: crop is the tool that there is"
ONLY_TAGS_ANSWER = "only a <bbox> makes more of a call than a call; a list of numbers is no answer"
UNFINISHED_ANSWER = "what was begun with <bbox> is an answer, also when it is cut off or holds no list of numbers"
NO_STEP_REWARDS = (
    "the simulated tools' step rewards never reached the original's trainer; tools here act, and pay nothing"
)
SINGLE_PRECISION = "whether the true box covers 5 % is worked out in double precision, not in single"
REVERSED_IS_NO_AREA = "a true box with its corners the wrong way round has no area (it counts as 1 % of the screen)"

TAGGED = re.compile(r"<bbox>\s*\[" + ",".join([r"\s*(\d+(?:\.\d+)?)\s*"] * 4) + r"\]\s*</bbox>")
FOUR_NUMBERS = re.compile(r"-?[\d.]+(?:\s*,\s*-?[\d.]+){3}")
BOX_LIKE = re.compile(r"<bbox>.*?</bbox>|\[[\d.\s,-]+\]", re.IGNORECASE)


# By hand: what the text says, without the functions under test ------------------------------------------------------


def _is_box(numbers: Any) -> bool:
    """Four fractions in order."""
    if not isinstance(numbers, list) or len(numbers) != 4 or any(type(n) not in (int, float) for n in numbers):
        return False
    x1, y1, x2, y2 = numbers
    return bool(0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1)


def _last_tag(response: str) -> list[float] | None:
    found = [[float(number) for number in match] for match in TAGGED.findall(response)]
    return found[-1] if found and _is_box(found[-1]) else None


def _calls(response: str) -> list[str]:
    return [c.lower() for t in ("use_tool", "tool_call") for c in re.findall(rf"<{t}>(.*?)</{t}>", response, re.DOTALL)]


def _reasons(response: str, truth: Any) -> list[str]:
    """Why our default may differ from the original; none when it must not."""
    if not _is_box(truth):
        return [NO_BOX]
    calls, begun, box_like = _calls(response), "<bbox>" in response, BOX_LIKE.search(response) is not None
    conditions = {
        LAST_COUNTS: len(re.findall("<bbox>", response, re.IGNORECASE)) > 1,
        ONLY_TAGGED: _last_tag(response) is None and FOUR_NUMBERS.search(response) is not None,
        CROP_LOOKS_CLOSER: any("crop" in call for call in calls),
        ONLY_TAGS_ANSWER: bool(calls) and box_like and not begun,
        UNFINISHED_ANSWER: bool(calls) and begun and not box_like,
    }
    return [reason for reason, holds in conditions.items() if holds]


def _default_by_hand(response: str, truth: Sequence[float]) -> dict[str, Any]:
    """The formula on the last tag's box, for a true box with area."""
    x1, y1, x2, y2 = truth
    area, answer, calls = (x2 - x1) * (y2 - y1), _last_tag(response), _calls(response)
    small, edge = area < 0.05, x1 < 0.1 or y1 < 0.1 or x2 > 0.9 or y2 > 0.9
    if calls and "<bbox>" not in response:
        paid = 0.1 if small or edge else 0.0
        return {
            "score": paid, "r_task": 0.0, "r_tool": paid, "r_gate": 0.0, "iou": 0.0, "response_type": "tool_only"
        }  # fmt: skip
    overlap = 0.0
    if answer:
        a1, b1, a2, b2 = answer
        shared = max(0.0, min(a2, x2) - max(a1, x1)) * max(0.0, min(b2, y2) - max(b1, y1))
        overlap = shared / ((a2 - a1) * (b2 - b1) + area - shared)
    tool = overlap * (0.4 if small else 0.2 if edge else 0.1) if calls else 0.1 * (not small and overlap > 0.7)
    gate = -0.3 * (small and not calls and overlap < 0.5) - 0.25 * (not small and not edge and len(calls) > 1)
    waits, closer = "wait" in " ".join(calls), re.search("zoom|crop", " ".join(calls))
    gate -= 0.05 * (small and waits and not closer) + 0.4 * (len(calls) > 2)
    score = 0.6 * overlap + 0.3 * tool + 0.1 * gate
    return {
        "score": score, "r_task": overlap, "r_tool": tool, "r_gate": gate, "iou": overlap,
        "response_type": "bbox_response",
    }  # fmt: skip


# Rules ---------------------------------------------------------------------------------------------------------------


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
    response, truth = entry.need("response"), entry.need("ground_truth")
    reasons = _reasons(response, truth)
    instead: Any = {"raises": "bad data"} if NO_BOX in reasons else _default_by_hand(response, truth)
    if NO_BOX not in reasons and not isinstance(entry.expected, Mapping):
        instead = instead["score"]
    return Deviation(_score(entry, DEFAULT), "; ".join(reasons), _score(entry, TRAINED), instead)


def library(entry: Entry, file: Sequence[Entry]) -> Any:
    """The library works in single precision and takes the area as it comes out: what is small for it is set by hand."""
    entry.only("response", "ground_truth")
    ours = _score(entry, LIBRARY)
    x1, y1, x2, y2 = entry.need("ground_truth")
    left, top, right, bottom = np.array([x1, y1, x2, y2], dtype=np.float32)
    reverse = x2 < x1 and y2 < y1
    area = 0.01 if x2 <= x1 or y2 <= y1 else (x2 - x1) * (y2 - y1)
    small_there = bool((right - left) * (bottom - top) < np.float32(0.05))
    if small_there == (area < 0.05):
        return ours
    as_there = LIBRARY.model_copy(update={"small_area": float(small_there)})
    return Deviation(ours, REVERSED_IS_NO_AREA if reverse else SINGLE_PRECISION, _score(entry, as_there))


def step_reward(entry: Entry, file: Sequence[Entry]) -> Deviation:
    """Ours is that an environment's answer to a turn has no reward in it."""
    entry.only("region", "zoom_factor", "duration", "type")
    steps = entry.expected if isinstance(entry.expected, list) else [entry.expected]
    if not steps or any(type(step) not in (int, float) for step in steps):
        raise Unknown(f"{entry.expected!r} are no rewards of steps")
    paid = [field.name for field in fields(StepResult) if "reward" in field.name]
    return Deviation(paid or None, NO_STEP_REWARDS, instead=None)


RULES: dict[str, Rule] = {
    r"^arc_vision_custom_reward\.": trained,
    r"^arc_vision_reward\.": library,
    r"^(Zoom|Wait|Inspect)Tool\.": step_reward,
}
