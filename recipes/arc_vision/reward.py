"""Rewards for UI grounding: the overlap of the answered box with the true one, and Arc Vision's
formula on top of it.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError

from rayloop.chat.calls import tagged
from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import Box, ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.recipes.arc_vision.boxes import Size, answered, area, confidence, grounding, parse_box
from rayloop.recipes.arc_vision.data import box
from rayloop.recipes.arc_vision.original import (
    library_box,
    library_small,
    looks_like_box,
    step_rewards,
    trained_box,
    true_box,
)

_SPECIAL = re.compile(r"<\|\w+\|>")
ORIGINALS: Mapping[str, Callable[[str], Box | None]] = {
    "original": trained_box,
    "library": library_box,
}
"""How they find the answer's box."""
_NO_AREA = 0.01
"""The area of a true box that has none; only the originals' variants score such boxes."""


class IoUReward:
    """Intersection over union with the task's box; 0 with the flag ``unparsable`` when the last
    turn has no valid box. Components: ``iou``, ``click`` (1 when the answer's centre lies in the
    true box), ``format`` (1 for a valid box). The flag ``unknown_size``: an answer in pixels of an
    image whose size nobody says.
    """

    class Settings(SettingsModel):
        pixels: Literal["none", "image", "shown", "thousandths"] = "none"
        """Whether numbers above 1, and Qwen's ``"bbox_2d": [x1, y1, x2, y2]``, are read, and what
        they are: pixels of the image file, of the copy that the model was shown (Qwen2.5-VL writes
        these), or thousandths of its sides (Qwen3-VL). none: fractions within ``<bbox>`` alone.
        """
        patch: int = Field(14, ge=1)
        """Pixels of a patch's side, for the size of the copy that the model was shown: 14 for
        Qwen2.5-VL, 16 for Qwen3-VL.
        """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or IoUReward.Settings()

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """Raises DataFailure when the ground truth is no box."""
        truth, text = box(task.ground_truth, f"ground truth of task {task.id}"), context.texts[-1]
        if self._settings.pixels == "none":
            found = parse_box(text)
            why = "" if found else "unparsable"
        else:
            found, why = answered(text, size_of(trajectory, task, self._settings))
        components = grounding(found, truth)
        return Scored(components["iou"], components, (why,) if why else ())


class ArcVisionWeights(SettingsModel):
    """Weights of the three terms in the reward."""

    task: float = 0.6
    """Weight of the overlap with the true box."""
    tool: float = 0.3
    """Weight of calls before an answer that overlaps."""
    gate: float = 0.1
    """Weight of the penalties for calls that are missing, unneeded or too many."""


class ToolShares(SettingsModel):
    """r_tool of an answer after a call, as a share of its IoU, by the kind of the true box."""

    small: float = 0.4
    """For a box of less than a twentieth of the page."""
    edge: float = 0.2
    """For a box near the page's border."""
    other: float = 0.1
    """For all remaining boxes, which are seen without a closer look."""
    most: float = 0.4
    """r_tool after a call is at most this."""


class Decay(SettingsModel):
    """Decay of r_tool over the steps: it is multiplied by ``max(least, 1 - step / steps)``."""

    steps: int = Field(0, ge=0)
    """Steps over which paying for tools fades, for example 1000; 0 pays the same at every step."""
    least: float = Field(0.1, ge=0, le=1)
    """The share of r_tool that is paid however late it is."""


class CompletionPenalty(SettingsModel):
    """The penalty for calls without an answer."""

    penalty: float = Field(0.0, ge=0)
    """Subtracted from an episode that called tools and gave no box, for example 0.2; 0 for none."""
    after: int = Field(50, ge=0)
    """It costs nothing up to this step, so that a young policy may explore its tools."""


class Penalties(SettingsModel):
    """Penalties subtracted from r_gate; several add up."""

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
    """``weights.task r_task + weights.tool r_tool + weights.gate r_gate``, neither clamped nor
    scaled (``arc_vision``).

    Components: those of ``IoUReward``, the three terms, ``tools`` (calls that count),
    ``known_tools`` (those that name a tool), ``asked`` (calls that were written), ``penalties``
    (how many applied), of the true box ``small`` and ``edge`` (0 or 1) and ``area``; and where the
    policy says how sure it is, ``confidence`` and ``right`` (as ``click``), which are never paid:
    the run makes ``reward/calibration_error`` of them. ``simulated`` is what the original's tools
    would have paid, which it logs. Flags name each penalty that applied, ``unparsable``,
    ``unknown_size`` (an answer in pixels of an image whose size nobody says), ``tool_only`` and
    ``incomplete``.
    """

    class Settings(SettingsModel):
        """The numbers are those that Arc Vision trained with."""

        variant: Literal["corrected", "original", "library"] = "corrected"
        """corrected: the original's mistakes fixed (README.md).

        To reproduce published numbers: ``original`` reads and pays as Arc Vision's training
        function does, ``library`` as the second function of its repository, which has neither
        ``tool_only`` nor the penalties ``wrong`` and ``excessive``, but takes ``excessive`` from
        r_tool for each call beyond ``max_tools``.
        """
        weights: ArcVisionWeights = ArcVisionWeights()
        row_weights: bool = True
        """Whether a row's own ``reward_weights`` go before ``weights``; the originals never read
        them. Off: all are set here.
        """
        pixels: Literal["image", "shown", "thousandths"] = "image"
        """What numbers above 1 are: pixels of the image file, of the copy that the model was shown
        (Qwen2.5-VL writes these), or thousandths of its sides (Qwen3-VL). The originals guess a
        screen.
        """
        patch: int = Field(14, ge=1)
        """Pixels of a patch's side, for the size of the copy that the model was shown: 14 for
        Qwen2.5-VL, 16 for Qwen3-VL.
        """
        small_area: float = Field(0.05, ge=0, le=1)
        """A true box that covers less of the image than this is small: looking closer is worth a
        call.
        """
        edge_margin: float = Field(0.1, ge=0, lt=0.5)
        """A true box that reaches this close to the image's border is at the edge."""
        shares: ToolShares = ToolShares()
        restraint: float = 0.1
        """r_tool without a call, for a box that is not small and is found: IoU above
        ``restraint_iou``.
        """
        restraint_iou: float = Field(0.7, ge=0, le=1)
        """Above this overlap an answer without a call is paid ``restraint``, unless the box is
        small.
        """
        penalties: Penalties = Penalties()
        max_tools: int = Field(2, ge=0)
        """More calls than this cost ``penalties.excessive``, once."""
        tool_only: float | None = None
        """The whole reward of calls without an answer, when the true box is small or at the edge
        (else 0). None: 0, and in the originals 0.1, which taught to ask and never to answer. Set it
        to ablate that.
        """
        decay: Decay = Decay()
        completion: CompletionPenalty = CompletionPenalty()
        call_tags: tuple[str, ...] = Field(("use_tool", "tool_call"), min_length=1)
        """Tags that count as a call: the original's prompt has the first, environments here carry
        out the second.
        """
        waiting: str = "wait"
        """A call whose text contains this word waits."""
        closer: tuple[str, ...] | None = None
        """A call whose text contains one of these words looks closer.

        None: zoom and crop; the originals know zoom alone.
        """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.transcript = settings.variant in ORIGINALS

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """Raises DataFailure for a ground truth that is no box (originals: not four numbers), or
        wrong weights in the row.
        """
        settings, weights = self._settings, None
        read = box if settings.variant == "corrected" else true_box
        if settings.variant == "corrected" and settings.row_weights:
            weights = _row_weights(task)
        texts = context.texts
        if self.transcript and context.transcript is not None:
            texts = [_SPECIAL.sub("", context.transcript)]
        played = Played(
            texts, _executed(trajectory, texts), size_of(trajectory, task, settings), context.step
        )
        return arc_vision(
            played, read(task.ground_truth, f"ground truth of task {task.id}"), settings, weights
        )


@dataclass(frozen=True, slots=True)
class Played:
    """An episode: the sampled turns' ``texts``, whether each turn's call was executed (None:
    unknown, all count), and the image's ``size`` in the unit of answers that are no fractions
    (None: unknown).
    """

    texts: Sequence[str]
    executed: Sequence[bool] | None = None
    size: Size | None = None
    step: int = 0


def arc_vision(
    played: Played,
    truth: Box,
    settings: ArcVisionReward.Settings,
    weights: ArcVisionWeights | None = None,
) -> Scored:
    """Arc Vision's training reward (jbarnes850/verl at b2577e0).

    ``corrected`` counts executed calls (a turn's last one) and reads the last turn's answer; the
    originals count written calls, and read an answer anywhere in the episode, tools included.
    """
    corrected, weights = settings.variant == "corrected", weights or settings.weights
    text = played.texts[-1] if corrected else "\n".join(played.texts)
    written = [
        [call.lower() for tag in settings.call_tags for call in inside(tag, turn)]
        for turn in played.texts
    ]
    calls = asked = [call for turn in written for call in turn]
    if corrected and played.executed is not None:
        calls = [
            turn[-1] for turn, done in zip(written, played.executed, strict=True) if done and turn
        ]

    covered = area(truth) if truth[0] < truth[2] and truth[1] < truth[3] else _NO_AREA
    small = (
        library_small(truth, settings.small_area)
        if settings.variant == "library"
        else covered < settings.small_area
    )
    edge = min(truth[:2]) < settings.edge_margin or max(truth[2:]) > 1 - settings.edge_margin

    given, unreadable = (
        answered(text, played.size)
        if corrected
        else (ORIGINALS[settings.variant](text), "unparsable")
    )
    found = grounding(given, truth)
    about = found | {
        "tools": float(len(calls)),
        "known_tools": float(_known(calls, settings)),
        "penalties": 0.0,
    }
    about |= {
        "asked": float(len(asked)),
        "small": float(small),
        "edge": float(edge),
        "area": covered,
    }
    if corrected:
        sure = confidence(text)
        about |= {} if sure is None else {"confidence": sure, "right": found["click"]}
    elif asked:
        about["simulated"] = step_rewards(asked)

    if asked and not _answered(text, settings.variant):
        return _tool_only(about, truth, small or edge, settings, played.step)
    overlap = found["iou"]
    penalties = _penalties(calls, overlap, small, edge, settings)
    tool, gate = (
        _tool_term(len(calls), overlap, small, edge, settings),
        0.0 - sum(penalties.values()),
    )
    if settings.decay.steps:
        tool *= max(settings.decay.least, 1 - played.step / settings.decay.steps)

    value = weights.task * overlap + weights.tool * tool + weights.gate * gate
    if settings.variant == "original" and not math.isfinite(value):
        value = -1.0

    cost = _incomplete(settings, played.step) if asked and not found["format"] else 0.0
    flags = (
        *penalties,
        *(() if found["format"] else (unreadable,)),
        *(("incomplete",) if cost else ()),
    )
    terms = {"r_task": overlap, "r_tool": tool, "r_gate": gate, "penalties": float(len(penalties))}
    return Scored(value - cost, about | terms, flags)


def _tool_only(
    about: Mapping[str, float],
    truth: Box,
    hard: bool,
    settings: ArcVisionReward.Settings,
    step: int,
) -> Scored:
    """The reward of calls without anything that looks like an answer."""
    paid = (
        settings.tool_only
        if settings.tool_only is not None
        else 0.1 * (settings.variant != "corrected")
    )
    paid, cost = paid if hard else 0.0, _incomplete(settings, step)
    nothing = grounding(None, truth) | {"r_task": 0.0, "r_tool": paid, "r_gate": 0.0}
    return Scored(
        paid - cost, {**about, **nothing}, ("tool_only", *(("incomplete",) if cost else ()))
    )


def _incomplete(settings: ArcVisionReward.Settings, step: int) -> float:
    return settings.completion.penalty if step > settings.completion.after else 0.0


def _row_weights(task: Task) -> ArcVisionWeights | None:
    """Raises DataFailure when the row has some and they are none."""
    found: Any = task.extra.get("reward_weights")
    if found is None:
        return None
    try:
        return ArcVisionWeights.model_validate(found)
    except ValidationError as error:
        raise DataFailure(
            f"task {task.id}", f"reward_weights must be task, tool and gate, not {found!r}"
        ) from error


def _executed(trajectory: Trajectory, texts: Sequence[str]) -> list[bool] | None:
    """None for a saved completion, where it is unknown."""
    turns = trajectory.sampled_turns
    return [bool(turn.executed) for turn in turns] if turns and len(turns) == len(texts) else None


def size_of(
    trajectory: Trajectory, task: Task, settings: ArcVisionReward.Settings | IoUReward.Settings
) -> Size | None:
    """Size of the first image; for a saved completion the row's ``image_size`` (width, height)."""
    if settings.pixels == "thousandths":
        return 1000, 1000
    image = next((image for turn in trajectory.turns for image in turn.images), None)
    if image is None:
        known: Any = task.extra.get("image_size")
        return (known[0], known[1]) if isinstance(known, list | tuple) and len(known) == 2 else None
    _, rows, columns = image.grid
    width, height = columns * settings.patch, rows * settings.patch
    if settings.pixels == "image":
        width, height = image.width, image.height
    return (width, height) if width and height else None


def inside(tag: str, text: str) -> list[str]:
    """All texts between ``<tag>`` and ``</tag>``."""
    return tagged(tag).findall(text)


def _answered(text: str, variant: str) -> bool:
    """Whether the text is more than calls. The library never asks."""
    if variant == "corrected":
        return "<bbox>" in text or '"bbox_2d"' in text
    return variant == "library" or looks_like_box(text)


def _closer(settings: ArcVisionReward.Settings) -> tuple[str, ...]:
    if settings.closer is not None:
        return settings.closer
    return ("zoom", "crop") if settings.variant == "corrected" else ("zoom",)


def _known(calls: Sequence[str], settings: ArcVisionReward.Settings) -> int:
    words = (*_closer(settings), settings.waiting, "inspect")
    return sum(any(word in call for word in words) for call in calls)


def _tool_term(
    calls: int, overlap: float, small: bool, edge: bool, settings: ArcVisionReward.Settings
) -> float:
    shares = settings.shares
    if not calls:
        return settings.restraint if not small and overlap > settings.restraint_iou else 0.0
    earned = min(
        shares.most, overlap * (shares.small if small else shares.edge if edge else shares.other)
    )
    beyond = max(0, calls - settings.max_tools) if settings.variant == "library" else 0
    return earned - settings.penalties.excessive * beyond


def _penalties(
    calls: Sequence[str],
    overlap: float,
    small: bool,
    edge: bool,
    settings: ArcVisionReward.Settings,
) -> dict[str, float]:
    """The penalties that apply, by the flag that names them. ``calls`` are lower-case texts."""
    costs = settings.penalties
    full = settings.variant != "library"
    waited = any(settings.waiting in call for call in calls)
    looked = any(word in call for call in calls for word in _closer(settings))
    cases = (
        ("missed_tool", small and not calls and overlap < costs.missed_iou, costs.missed),
        ("unneeded_tools", not small and not edge and len(calls) > 1, costs.unneeded),
        ("wrong_tool", full and small and waited and not looked, costs.wrong),
        ("excessive_tools", full and len(calls) > settings.max_tools, costs.excessive),
    )
    return {flag: cost for flag, applies, cost in cases if applies}
