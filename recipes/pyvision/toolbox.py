"""DeepEyes' environment as its model was trained.

It has the tools, arguments and texts of ``visual_toolbox_v2``.
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

_ANSWER = tagged("answer")
_CALL = tagged("tool_call")
MIN_SIDE_PIXELS = 30
"""Pixels that a box's sides must exceed."""
MOST_ASPECT = 100
"""The largest ratio of a box's sides."""


class VisualToolBoxV2:
    """The tools of Visual-Agent/DeepEyes at 6c5e796, mistakes included.

    ``image_zoom_in_tool(bbox_2d)`` is in pixels of the first image, and
    ``image_rotate_tool(angle)`` leaves black corners. ``label`` and any other argument is ignored,
    an answer ends the episode even after a call, and errors are Python's. The prompt describes the
    tools. ``evaluate`` has no result.
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
        answers = _ANSWER.findall(turn)
        calls = _CALL.findall(turn)
        has_answer = answers and answers[-1]
        has_call = calls and calls[-1]
        if has_answer or not has_call:
            return StepResult(done=True)
        body = calls[-1].strip()
        try:
            call = json.loads(body)
        except (ValueError, RecursionError) as error:
            return _failed(f"Invalid tool call format: {body}. Error: {error}")
        try:
            picture = self.result(call)
        except Exception as error:
            return _failed(str(error))
        parts = (
            "<tool_response>",
            ImageSource(data=png(picture)),
            published_text("deepeyes_user"),
            "</tool_response>",
        )
        return StepResult(Observation((Message("user", parts),)))

    def result(self, call: Any) -> Image.Image:
        """The picture that a call gives. Raises Python's error for a call of another form."""
        name = call["name"]
        arguments = call["arguments"]
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
        left = max(0, left)
        top = max(0, top)
        right = min(self._image.width, right)
        bottom = min(self._image.height, bottom)
        if not (left < right and bottom > top):
            return None
        short, long = sorted((bottom - top, right - left))
        if long / short > MOST_ASPECT or short <= MIN_SIDE_PIXELS:
            return None
        return left, top, right, bottom

    def evaluate(self) -> None:
        """Return None: the tools have no result."""

    def close(self) -> None:
        """Nothing is held."""


def _failed(why: str) -> StepResult:
    return StepResult(Observation((Message("user", (f"Error: {why}",)),)), error=why)
