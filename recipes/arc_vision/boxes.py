"""What to draw over a screenshot: the true box and the answered one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayloop.core.protocols import Box
from recipes.arc_vision.data import box
from recipes.arc_vision.reward import parse_box


class GroundingBoxes:
    """The ground truth is a box, and a valid answer holds one."""

    def true(self, truth: Any) -> Sequence[Box]:
        """Raises DataFailure when the ground truth is no box."""
        return (box(truth, "ground truth"),)

    def answered(self, text: str) -> Sequence[Box]:
        answer = parse_box(text)
        return () if answer is None else (answer,)
