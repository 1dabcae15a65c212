"""Rewards for UI grounding: the overlap with the true box, and Arc Vision's formula."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from pydantic import Field, ValidationError

from rayloop.chat.calls import tagged
from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import Box, ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.recipes.arc_vision.boxes import Size, answered, confidence, grounding, parse_box
from rayloop.recipes.arc_vision.data import box
from rayloop.recipes.arc_vision.original import (
    library_box,
    library_small,
    looks_like_box,
    trained_box,
    true_box,
)
from rayloop.recipes.arc_vision.settings import ArcVisionSettings, ArcVisionWeights
from rayloop.recipes.arc_vision.terms import (
    Reading,
    all_penalties,
    at_edge,
    base_components,
    covered,
    look_penalties,
    published_components,
    reward_terms,
    scored,
    tool_only,
    tool_term,
    weighted_sum,
)

_SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")
ORIGINALS: Mapping[str, Callable[[str], Box | None]] = {
    "original": trained_box,
    "library": library_box,
}
"""Published variant -> its parser of the answer's box."""


class IoUReward:
    """Intersection over union with the task's box.

    It is 0 with the flag ``unparsable`` when the last turn has no valid box. Components: ``iou``,
    ``click`` (1 when the answer's centre is inside the true box), ``format`` (1 for a valid box).
    The flag ``unknown_size`` marks an answer in pixels of an image whose size is unknown.
    """

    class Settings(SettingsModel):
        pixels: Literal["none", "image", "shown", "thousandths"] = "none"
        """Unit of numbers above 1, also in Qwen's ``"bbox_2d": [x1, y1, x2, y2]``.

        They are pixels of the image file, pixels of the copy that the model was shown (Qwen2.5-VL
        writes these), or thousandths of its sides (Qwen3-VL). none: only fractions within
        ``<bbox>`` are read.
        """
        patch: int = Field(14, ge=1)
        """Pixels of a patch's side, for the size of the copy that the model was shown.

        14 for Qwen2.5-VL, 16 for Qwen3-VL.
        """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or IoUReward.Settings()

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The overlap, 0..1. Raises DataFailure when the ground truth is not a box."""
        truth = box(task.ground_truth, f"ground truth of task {task.id}")
        text = context.texts[-1]
        if self._settings.pixels == "none":
            answer = parse_box(text)
            flag = "" if answer else "unparsable"
        else:
            answer, flag = answered(text, size_of(trajectory, task, self._settings))
        components = grounding(answer, truth)
        return Scored(components["iou"], components, (flag,) if flag else ())


class ArcVisionReward:
    """``weights.task r_task + weights.tool r_tool + weights.gate r_gate``, not clamped or scaled.

    Components: all of ``IoUReward``, the three terms, ``tools`` (calls that count), ``known_tools``
    (calls that name a tool), ``asked`` (calls that were written), ``penalties`` (how many applied),
    of the true box ``small`` and ``edge`` (0 or 1) and ``area``. Where the policy says how sure it
    is, also ``confidence`` and ``right`` (as ``click``), which are never paid: the run makes
    ``reward/calibration_error`` of them. ``simulated`` is what the original's tools would have
    paid, which it logs. Flags name each penalty that applied, ``unparsable``, ``unknown_size`` (an
    answer in pixels of an image whose size is unknown), ``tool_only`` and ``incomplete``.
    """

    Settings = ArcVisionSettings

    def __init__(self, settings: ArcVisionSettings) -> None:
        self._settings = settings
        self.transcript = settings.variant in ORIGINALS

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The reward of the configured variant.

        Raises DataFailure for a ground truth that is not a box (originals: not four numbers), or
        wrong weights in the row.
        """
        settings = self._settings
        corrected = settings.variant == "corrected"
        weights = _row_weights(task) if corrected and settings.row_weights else None
        texts = context.texts
        if self.transcript and context.transcript is not None:
            texts = [_SPECIAL_TOKEN.sub("", context.transcript)]
        episode = EpisodeTexts(
            texts,
            _executed(trajectory, texts),
            size_of(trajectory, task, settings),
            context.step,
        )
        read_truth = box if corrected else true_box
        truth = read_truth(task.ground_truth, f"ground truth of task {task.id}")
        return arc_vision(episode, truth, settings, weights)


@dataclass(frozen=True)
class EpisodeTexts:
    """An episode: the texts of its sampled turns, and what is known about them.

    ``executed``: whether each turn's call was executed (None: unknown, all count). ``size``: the
    image's, in the unit of answers that are not fractions (None: unknown).
    """

    texts: Sequence[str]
    executed: Sequence[bool] | None = None
    size: Size | None = None
    step: int = 0


def arc_vision(
    episode: EpisodeTexts,
    truth: Box,
    settings: ArcVisionSettings,
    weights: ArcVisionWeights | None = None,
) -> Scored:
    """Arc Vision's training reward (jbarnes850/verl at b2577e0) in the configured variant."""
    rewards = {
        "corrected": corrected_reward,
        "original": original_reward,
        "library": library_reward,
    }
    return rewards[settings.variant](episode, truth, settings, weights or settings.weights)


def corrected_reward(
    episode: EpisodeTexts,
    truth: Box,
    settings: ArcVisionSettings,
    weights: ArcVisionWeights,
) -> Scored:
    """The reward without the original's mistakes.

    It counts executed calls (a turn's last one) and reads the last turn's answer.
    """
    text = episode.texts[-1]
    calls_by_turn = _calls_by_turn(episode.texts, settings.call_tags)
    written = list(chain.from_iterable(calls_by_turn))
    calls = written
    if episode.executed is not None:
        turns = zip(calls_by_turn, episode.executed, strict=True)
        calls = [turn[-1] for turn, executed in turns if executed and turn]
    answer, flag = answered(text, episode.size)
    reading = Reading(
        truth=truth,
        small=covered(truth) < settings.small_area,
        edge=at_edge(truth, settings.edge_margin),
        written=written,
        calls=calls,
        closer=("zoom", "crop") if settings.closer is None else settings.closer,
        answer=answer,
        flag=flag,
        step=episode.step,
    )
    components = base_components(reading, settings)
    certainty = confidence(text)
    if certainty is not None:
        components |= {"confidence": certainty, "right": components["click"]}

    if written and "<bbox>" not in text and '"bbox_2d"' not in text:
        return tool_only(components, reading, settings, default=0.0)
    overlap = components["iou"]
    tool = tool_term(reading, overlap, settings)
    penalties = all_penalties(reading, overlap, settings)
    terms = reward_terms(reading, overlap, tool, penalties, settings)
    return scored(weighted_sum(terms, weights), components | terms, penalties, reading, settings)


def original_reward(
    episode: EpisodeTexts,
    truth: Box,
    settings: ArcVisionSettings,
    weights: ArcVisionWeights,
) -> Scored:
    """The reward of the training function, mistakes included.

    It counts written calls, and reads an answer anywhere in the episode, tools included.
    """
    text = "\n".join(episode.texts)
    small = covered(truth) < settings.small_area
    reading = _published_reading(episode, text, trained_box(text), truth, small, settings)
    components = published_components(reading, settings)

    if reading.written and not looks_like_box(text):
        return tool_only(components, reading, settings, default=0.1)
    overlap = components["iou"]
    tool = tool_term(reading, overlap, settings)
    penalties = all_penalties(reading, overlap, settings)
    terms = reward_terms(reading, overlap, tool, penalties, settings)
    value = weighted_sum(terms, weights)
    if not math.isfinite(value):
        value = -1.0
    return scored(value, components | terms, penalties, reading, settings)


def library_reward(
    episode: EpisodeTexts,
    truth: Box,
    settings: ArcVisionSettings,
    weights: ArcVisionWeights,
) -> Scored:
    """The reward of the library's function, mistakes included.

    It reads as ``original_reward`` does, with the library's parser and sizes. Calls without an
    answer have no rule, and calls beyond ``max_tools`` cost r_tool instead of r_gate.
    """
    text = "\n".join(episode.texts)
    small = library_small(truth, settings.small_area)
    reading = _published_reading(episode, text, library_box(text), truth, small, settings)
    components = published_components(reading, settings)

    overlap = components["iou"]
    tool = tool_term(reading, overlap, settings)
    if reading.calls:
        excess = max(0, len(reading.calls) - settings.max_tools)
        tool -= settings.penalties.excessive * excess
    penalties = look_penalties(reading, overlap, settings)
    terms = reward_terms(reading, overlap, tool, penalties, settings)
    return scored(weighted_sum(terms, weights), components | terms, penalties, reading, settings)


def _published_reading(
    episode: EpisodeTexts,
    text: str,
    answer: Box | None,
    truth: Box,
    small: bool,
    settings: ArcVisionSettings,
) -> Reading:
    """What both published functions read: each written call counts, and only zooms look closer."""
    written = list(chain.from_iterable(_calls_by_turn(episode.texts, settings.call_tags)))
    return Reading(
        truth=truth,
        small=small,
        edge=at_edge(truth, settings.edge_margin),
        written=written,
        calls=written,
        closer=("zoom",) if settings.closer is None else settings.closer,
        answer=answer,
        flag="unparsable",
        step=episode.step,
    )


def _calls_by_turn(texts: Iterable[str], tags: Sequence[str]) -> list[list[str]]:
    """The lower-case texts of each turn's calls, by tag."""
    turns = []
    for text in texts:
        calls = chain.from_iterable(inside(tag, text) for tag in tags)
        turns.append([call.lower() for call in calls])
    return turns


def inside(tag: str, text: str) -> list[str]:
    """All texts between ``<tag>`` and ``</tag>``."""
    return tagged(tag).findall(text)


def _row_weights(task: Task) -> ArcVisionWeights | None:
    """The row's weights, None without them. Raises DataFailure when they are not valid."""
    weights: Any = task.extra.get("reward_weights")
    if weights is None:
        return None
    try:
        return ArcVisionWeights.model_validate(weights)
    except ValidationError as error:
        raise DataFailure(
            f"task {task.id}", f"reward_weights must be task, tool and gate, not {weights!r}"
        ) from error


def _executed(trajectory: Trajectory, texts: Sequence[str]) -> list[bool] | None:
    """Whether each turn's call was executed; None for a saved completion, where it is unknown."""
    turns = trajectory.sampled_turns
    if not turns or len(turns) != len(texts):
        return None
    return [bool(turn.executed) for turn in turns]


def size_of(
    trajectory: Trajectory, task: Task, settings: ArcVisionSettings | IoUReward.Settings
) -> Size | None:
    """Size of the first image; for a saved completion the row's ``image_size`` (width, height)."""
    if settings.pixels == "thousandths":
        return 1000, 1000
    image = next((image for turn in trajectory.turns for image in turn.images), None)
    if image is None:
        return _row_size(task)
    _, rows, columns = image.grid
    width = columns * settings.patch
    height = rows * settings.patch
    if settings.pixels == "image":
        width = image.width
        height = image.height
    return (width, height) if width and height else None


def _row_size(task: Task) -> Size | None:
    size: Any = task.extra.get("image_size")
    if not isinstance(size, list | tuple) or len(size) != 2:
        return None
    return size[0], size[1]
