"""DeepEyes' environment as its model was trained: the tools, arguments and texts of
``visual_toolbox_v2``.
"""

import json
from collections.abc import Sequence
from typing import Any

from PIL import Image

from rayloop.chat.calls import tagged
from rayloop.core.failures import DataFailure
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import decode, png, read
from rayloop.recipes.pyvision.data import published_text

_ANSWER, _CALL = tagged("answer"), tagged("tool_call")
SHORTEST, MOST_ASPECT = 30, 100
"""Pixels that a box's sides must exceed, and how many times the other one side may be."""


class VisualToolBoxV2:
    """Visual-Agent/DeepEyes at 6c5e796, mistakes included: ``image_zoom_in_tool(bbox_2d)`` in
    pixels of the first image and ``image_rotate_tool(angle)``, whose corners are black. ``label``
    and any other argument is ignored, an answer ends the episode even behind a call, and errors are
    Python's own. The prompt describes the tools. ``evaluate`` has no result.
    """

    tools: Sequence[Any] = ()
    """None for the chat template."""

    def __init__(self) -> None:
        self._image = Image.new("RGB", (1, 1))

    def reset(self, task: Task) -> Observation:
        """Show the task's messages. Raises DataFailure for a task without an image."""
        if not task.images:
            raise DataFailure(
                task.id, "DeepEyes' tools look at the first image, and the task has none"
            )
        self._image = decode(read(task.images[0]))
        return Observation(task.messages)

    def step(self, turn: str) -> StepResult:
        """Carry out the last call; an answer, or no call, ends the episode."""
        answers, calls = _ANSWER.findall(turn), _CALL.findall(turn)
        if (answers and answers[-1]) or not (calls and calls[-1]):
            return StepResult(done=True)
        said = calls[-1].strip()
        try:
            call = json.loads(said)
        except (ValueError, RecursionError) as error:
            return _failed(f"Invalid tool call format: {said}. Error: {error}")
        try:
            picture = self.result(call)
        except Exception as error:
            return _failed(str(error))
        shown = (
            "<tool_response>",
            ImageSource(data=png(picture)),
            published_text("deepeyes_user"),
            "</tool_response>",
        )
        return StepResult(Observation((Message("user", shown),)))

    def result(self, call: Any) -> Image.Image:
        """The picture that a call gives. Raises whatever Python makes of a call that is none."""
        name, arguments = call["name"], call["arguments"]
        if name == "image_zoom_in_tool":
            box = self.maybe_resize_bbox(*arguments["bbox_2d"])
            if box is None:
                raise ValueError("ZOOM IN ARGUMENTS ARE INVALID")
            return self._image.crop(box)
        if name == "image_rotate_tool":
            return self._image.rotate(arguments["angle"])
        raise ValueError(f"Unknown tool name: {name}")

    def maybe_resize_bbox(
        self, left: Any, top: Any, right: Any, bottom: Any
    ) -> tuple[Any, Any, Any, Any] | None:
        """The box within the image; None for one that is too small or too long.

        The names are in Python's errors, which the policy sees. (The original would widen sides
        below 28 pixels, and needs 31 before.)
        """
        left, top, right, bottom = (
            max(0, left),
            max(0, top),
            min(self._image.width, right),
            min(self._image.height, bottom),
        )
        if not (left < right and bottom > top):
            return None
        long, short = max(bottom - top, right - left), min(bottom - top, right - left)
        return (
            (left, top, right, bottom) if long / short <= MOST_ASPECT and short > SHORTEST else None
        )

    def evaluate(self) -> None:
        """No result of its own."""

    def close(self) -> None:
        """Nothing is held."""


def _failed(why: str) -> StepResult:
    return StepResult(Observation((Message("user", (f"Error: {why}",)),)), error=why)
