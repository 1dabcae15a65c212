"""Trajectories whose context was restarted: each segment between two restarts is trained and scored as its own sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rayloop.core.protocols import TrainItem
from rayloop.core.types import Trajectory


def segmented(mini_batches: Sequence[Sequence[TrainItem]]) -> list[list[TrainItem]]:
    """Returns an item per segment, with the trajectory's advantage and the segment's part of the reference log-probs.

    A trajectory of several mini-batches has the same segments, as objects, in all of them. Raises ValueError when the reference
    log-probs are not one per sampled token.
    """
    known = {id(item.trajectory): item.trajectory.segments for items in mini_batches for item in items}
    return [[part for item in items for part in _parts(item, known[id(item.trajectory)])] for items in mini_batches]


def by_segment(
    trajectories: Sequence[Trajectory], score: Callable[[list[Trajectory]], Sequence[npt.NDArray[np.float32]]]
) -> list[npt.NDArray[np.float32]]:
    """Calls ``score`` with all segments at once, and returns one array [sampled_tokens] per trajectory."""
    segments = [trajectory.segments for trajectory in trajectories]
    scored = iter(score([segment for parts in segments for segment in parts]))
    return [np.concatenate([next(scored) for _ in parts]) for parts in segments]


def _parts(item: TrainItem, segments: Sequence[Trajectory]) -> list[TrainItem]:
    if len(segments) == 1 or item.reference is None:
        return [dataclasses.replace(item, trajectory=segment) for segment in segments]
    ends = np.cumsum([sum(len(turn.token_ids) for turn in segment.sampled_turns) for segment in segments])
    if len(item.reference) != ends[-1]:
        what = f"{len(item.reference)} reference log-probs for {ends[-1]} sampled tokens"
        raise ValueError(f"trajectory {item.trajectory.id}: {what}")
    parts = np.split(np.asarray(item.reference), ends[:-1])
    return [dataclasses.replace(item, trajectory=segment, reference=part) for segment, part in zip(segments, parts, strict=True)]
