"""Whether what a policy says about its own certainty is true."""

from __future__ import annotations

from collections.abc import Sequence

BINS = 10


def calibration_error(confidences: Sequence[float], right: Sequence[float], bins: int = BINS) -> float:
    """The expected calibration error (Guo et al. 2017, equation 3), 0 to 1: the mean over ``bins`` equal ranges of confidence of
    |share of right answers - mean confidence|, weighted by how many answers are in the range.

    ``confidences`` [N] from 0 to 1, ``right`` [N] 0 or 1. Raises ValueError when there is none, or their numbers differ.
    """
    if not confidences or len(confidences) != len(right):
        raise ValueError(f"{len(confidences)} confidences and {len(right)} answers: there must be as many, and at least one")
    gaps = [0.0] * bins
    for confidence, value in zip(confidences, right, strict=True):
        gaps[min(int(confidence * bins), bins - 1)] += value - confidence
    return sum(map(abs, gaps)) / len(confidences)
