"""Rewards for UI grounding: the overlap of the answered box with the true one, and Arc Vision's formula on top of it.

An answer is ``<bbox>[x1,y1,x2,y2]</bbox>`` in fractions of the image's width and height. Of several the last counts, and
anything else is no box: pixels, other notations and corners in the wrong order are not guessed at, except in the variants
that reproduce the originals (original.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import Box, ScoreContext
from rayloop.core.types import Task, Trajectory
from recipes.arc_vision.data import box
from recipes.arc_vision.original import library_box, looks_like_box, trained_box, true_box

_NUMBER = r"\s*(\d{1,4}(?:\.\d{1,20})?)\s*"
_ANSWER = re.compile(r"<bbox>\s*\[" + ",".join([_NUMBER] * 4) + r"\]\s*</bbox>")
_NO_AREA = 0.01
"""Counts as the area of a true box without any, which only the originals' variants score."""


class IoUReward:
    """Intersection over union with the task's box; 0 with the flag ``unparsable`` when the last turn has no valid box.

    Components: ``iou``, ``click`` (1 when the answer's centre lies in the true box), ``format`` (1 for a valid box).
    """

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """Raises DataFailure when the ground truth is no box."""
        components = grounding(parse_box(context.texts[-1]), box(task.ground_truth, f"ground truth of task {task.id}"))
        return Scored(components["iou"], components, () if components["format"] else ("unparsable",))


class Weights(SettingsModel):
    """Of the three terms in the reward."""

    task: float = 0.6
    """Of the overlap with the true box."""
    tool: float = 0.3
    """Of calls before an answer that overlaps."""
    gate: float = 0.1
    """Of what is subtracted for calls that are missing, unneeded or too many."""


class ToolShares(SettingsModel):
    """r_tool of an answer after a call, as a share of its IoU, by what the true box is."""

    small: float = 0.4
    """For a box of less than a twentieth of the page."""
    edge: float = 0.2
    """For a box near the page's border."""
    other: float = 0.1
    """For all remaining boxes, which are seen without a closer look."""
    most: float = 0.4
    """r_tool after a call is at most this."""


class Penalties(SettingsModel):
    """What is subtracted from r_gate; several add up."""

    missed: float = Field(0.3, ge=0)
    """A small box, no call, and IoU below ``missed_iou``."""
    missed_iou: float = Field(0.5, ge=0, le=1)
    """Below this overlap the answer counts as not having looked closely enough."""
    unneeded: float = Field(0.25, ge=0)
    """More than one call although the box is neither small nor at the edge."""
    wrong: float = Field(0.05, ge=0)
    """A small box, and a call that waits but none that looks closer."""
    excessive: float = Field(0.4, ge=0)
    """More than ``max_tools`` calls, however good the answer is."""


class ArcVisionReward:
    """``weights.task r_task + weights.tool r_tool + weights.gate r_gate``, neither clamped nor scaled (``arc_vision``).

    Components: those of ``IoUReward``, the three terms, ``tools`` (calls that were written), ``known_tools`` (those that name
    a tool), ``penalties`` (how many applied), and of the true box ``small`` and ``edge`` (0 or 1) and ``area``.
    Flags name each penalty that applied, ``unparsable`` and ``tool_only``.
    """

    class Settings(SettingsModel):
        """The defaults are those that Arc Vision trained with."""

        variant: Literal["strict", "original", "library"] = "strict"
        """strict: the box of the last turn, in one notation. To reproduce published numbers: ``original`` reads and pays as Arc
        Vision's training function does (with ``closer: [zoom]``, the only word it knows), ``library`` as the second function of
        its repository, which has neither ``tool_only`` nor the penalties ``wrong`` and ``excessive``, but takes ``excessive``
        from r_tool for each call beyond ``max_tools``."""
        weights: Weights = Weights()
        small_area: float = Field(0.05, ge=0, le=1)
        """A true box that covers less of the image than this is small: looking closer is worth a call."""
        edge_margin: float = Field(0.1, ge=0, lt=0.5)
        """A true box that reaches this close to the image's border is at the edge."""
        shares: ToolShares = ToolShares()
        restraint: float = 0.1
        """r_tool without a call, for a box that is not small and is found: IoU above ``restraint_iou``."""
        restraint_iou: float = Field(0.7, ge=0, le=1)
        """Above this overlap an answer without a call is paid ``restraint``, unless the box is small."""
        penalties: Penalties = Penalties()
        max_tools: int = Field(2, ge=0)
        """More calls than this cost ``penalties.excessive``, once."""
        tool_only: float = 0.1
        """The whole reward of calls without an answer, when the true box is small or at the edge (else 0).

        Paying for the question teaches to ask and never to answer: set 0 where calls are carried out.
        """
        call_tags: tuple[str, ...] = Field(("use_tool", "tool_call"), min_length=1)
        """Tags that count as a call: the original's prompt has the first, environments here carry out the second."""
        waiting: str = "wait"
        """A call whose text contains this word waits."""
        closer: tuple[str, ...] = ("zoom", "crop")
        """A call whose text contains one of these words looks closer."""

    def __init__(self, settings: ArcVisionReward.Settings) -> None:
        self._settings = settings

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """Raises DataFailure when the ground truth is no box; the originals' variants take any four numbers."""
        read = box if self._settings.variant == "strict" else true_box
        return arc_vision(context.texts, read(task.ground_truth, f"ground truth of task {task.id}"), self._settings)


def arc_vision(texts: Sequence[str], truth: Box, settings: ArcVisionReward.Settings) -> Scored:
    """Arc Vision's training reward (jbarnes850/verl, custom reward function at b2577e0) of an episode's sampled turns.

    Calls are counted over all turns; the answer is the last turn's, or anywhere in the episode for the originals' variants.
    """
    text = texts[-1] if settings.variant == "strict" else "\n".join(texts)
    calls = [call.lower() for tag in settings.call_tags for turn in texts for call in _inside(tag, turn)]
    known = sum(any(word in call for word in (*settings.closer, settings.waiting, "inspect")) for call in calls)
    area = _area(truth) if truth[0] < truth[2] and truth[1] < truth[3] else _NO_AREA
    small = area < settings.small_area
    edge = min(truth[:2]) < settings.edge_margin or max(truth[2:]) > 1 - settings.edge_margin
    found = grounding(READ[settings.variant](text), truth)
    about = found | {"tools": float(len(calls)), "known_tools": float(known), "penalties": 0.0}
    about |= {"small": float(small), "edge": float(edge), "area": area}
    if calls and not _answered(text, settings.variant):
        paid = settings.tool_only if small or edge else 0.0
        nothing = grounding(None, truth) | {"r_task": 0.0, "r_tool": paid, "r_gate": 0.0}
        return Scored(paid, about | nothing, ("tool_only",))
    overlap = found["iou"]
    penalties = _penalties(calls, overlap, small, edge, settings)
    tool, gate = _tool_term(len(calls), overlap, small, edge, settings), 0.0 - sum(penalties.values())
    weights = settings.weights
    value = weights.task * overlap + weights.tool * tool + weights.gate * gate
    if settings.variant == "original" and not math.isfinite(value):
        value = -1.0
    flags = (*penalties, *(() if found["format"] else ("unparsable",)))
    terms = {"r_task": overlap, "r_tool": tool, "r_gate": gate, "penalties": float(len(penalties))}
    return Scored(value, about | terms, flags)


def _inside(tag: str, text: str) -> list[str]:
    return re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)


def _answered(text: str, variant: str) -> bool:
    """Whether the text is more than calls. The library never asks."""
    return "<bbox>" in text if variant == "strict" else variant == "library" or looks_like_box(text)


def _tool_term(calls: int, overlap: float, small: bool, edge: bool, settings: ArcVisionReward.Settings) -> float:
    shares = settings.shares
    if not calls:
        return settings.restraint if not small and overlap > settings.restraint_iou else 0.0
    earned = min(shares.most, overlap * (shares.small if small else shares.edge if edge else shares.other))
    beyond = max(0, calls - settings.max_tools) if settings.variant == "library" else 0
    return earned - settings.penalties.excessive * beyond


def _penalties(
    calls: Sequence[str], overlap: float, small: bool, edge: bool, settings: ArcVisionReward.Settings
) -> dict[str, float]:
    """The penalties that apply, by the flag that names them. ``calls`` are lower-case texts."""
    costs = settings.penalties
    full = settings.variant != "library"
    waited = any(settings.waiting in call for call in calls)
    looked = any(word in call for call in calls for word in settings.closer)
    cases = (
        ("missed_tool", small and not calls and overlap < costs.missed_iou, costs.missed),
        ("unneeded_tools", not small and not edge and len(calls) > 1, costs.unneeded),
        ("wrong_tool", full and small and waited and not looked, costs.wrong),
        ("excessive_tools", full and len(calls) > settings.max_tools, costs.excessive),
    )
    return {flag: cost for flag, applies, cost in cases if applies}


def grounding(answer: Box | None, truth: Box) -> dict[str, float]:
    """``iou``, ``click`` and ``format`` of the answered box; all 0 when there is none."""
    if answer is None:
        return {"iou": 0.0, "click": 0.0, "format": 0.0}
    return {"iou": iou(answer, truth), "click": float(click_hits(answer, truth)), "format": 1.0}


def parse_box(text: str) -> Box | None:
    """The last ``<bbox>[x1,y1,x2,y2]</bbox>`` of a text; None without one, or when it is no box within 0..1."""
    found = _ANSWER.findall(text)
    if not found:
        return None
    x1, y1, x2, y2 = map(float, found[-1])
    return (x1, y1, x2, y2) if 0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1 else None


def iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes, 0..1."""
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    shared = width * height
    union = _area(a) + _area(b) - shared
    return shared / union if union > 0 else 0.0


def click_hits(answer: Box, truth: Box) -> bool:
    """Whether a click on the centre of ``answer`` lands in ``truth``."""
    x, y = (answer[0] + answer[2]) / 2, (answer[1] + answer[3]) / 2
    return truth[0] <= x <= truth[2] and truth[1] <= y <= truth[3]


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


READ: dict[str, Callable[[str], Box | None]] = {"strict": parse_box, "original": trained_box, "library": library_box}
"""How each variant finds the answer's box."""
