"""Tools in a conversation: the policy calls one with ``<tool_call>{json}</tool_call>`` and sees its text and images."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.failures import DeadlineExceeded, ToolDeadline
from rayloop.core.protocols import Observation, StepResult, Tool, ToolResult
from rayloop.core.threads import call_within
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import decode, read

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolError(Exception):
    """A call that cannot be carried out as the policy wrote it. The message is shown to the policy."""


def tool_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of the last tool call in ``text``, None when there is none. Raises ToolError if malformed."""
    found = _CALL.findall(text)
    if not found:
        return None
    try:
        call = json.loads(found[-1])
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the tool call is not valid JSON: {error}") from error
    if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
        raise ToolError('a tool call must look like {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ToolError("the arguments of a tool call must be an object")
    return call["name"], arguments


class ToolCalls:
    """The task's messages, then calls of tools until a turn calls none: that turn is the answer.

    Other tools: your classes under ``tools``, or a class that derives from this one and gives ``tools_for`` a task.
    """

    class Settings(SettingsModel):
        tools: tuple[Annotated[Component, Role("tool", ("__call__",))], ...] = ()
        """``[{use: module:Class, with: {...}}]``: what the policy may call (docs/bring_your_own/tool.md)."""
        role: str = "tool"
        """The role under which the chat template shows results."""
        tool_timeout: float = Field(30.0, gt=0)
        """Seconds for one call of a tool; beyond it the episode ends as ``tool_deadline`` with the failing value. Keep it below
        ``episode.step_timeout``."""
        describe: bool = True
        """Whether the chat template is given the tools' schemas. Turn it off when the prompt describes them."""

    def __init__(self, settings: ToolCalls.Settings) -> None:
        self._settings = settings
        self._tools: dict[str, Tool] = {}

    @property
    def tools(self) -> Sequence[Tool]:
        return list(self._tools.values()) if self._settings.describe else ()

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Called by ``reset``, under the environment's own deadline. Raises DataFailure, InfrastructureFailure."""
        return [tool.build() for tool in self._settings.tools]

    def reset(self, task: Task) -> Observation:
        self._tools = {tool.name: _Checked(tool) for tool in self.tools_for(task)}
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        """Carry out the call. A call that cannot be is answered with the reason, as an error. Raises ToolDeadline."""
        try:
            call = tool_call(text)
            if call is None:
                return StepResult(done=True)
            name, arguments = call
            if name not in self._tools:
                raise ToolError(f"there is no tool {name!r}; the tools are: {', '.join(self._tools)}")
            result = call_within(self._settings.tool_timeout, self._tools[name], **arguments)
        except DeadlineExceeded as error:
            raise ToolDeadline(f"the tool {name} gave {error}") from error
        except ToolError as error:
            return StepResult(self._shown(f"Error: {error}"), error=str(error))
        return StepResult(self._shown(result.text, *result.images))

    def evaluate(self) -> float | None:
        return None

    def close(self) -> None:
        self._tools = {}

    def _shown(self, *parts: str | ImageSource) -> Observation:
        return Observation((Message(self._settings.role, parts),))


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


class _Checked:
    """A tool that is only called with arguments that its schema knows, of the types it names, and with all that it requires."""

    def __init__(self, tool: Tool) -> None:
        self.name, self.description, self.parameters = tool.name, tool.description, tool.parameters
        self._tool = tool

    def __call__(self, **arguments: Any) -> ToolResult:
        known = self.parameters.get("properties", {})
        if missing := [name for name in self.parameters.get("required", ()) if name not in arguments]:
            raise ToolError(f"{self.name} needs the argument {missing[0]!r}")
        for name, value in arguments.items():
            if name not in known:
                raise ToolError(f"{self.name} knows no argument {name!r}; it has: {', '.join(known) or 'none'}")
            wanted = known[name].get("type")
            if wanted in _TYPES and not _TYPES[wanted](value):
                raise ToolError(f"the argument {name!r} of {self.name} must be of type {wanted}, not {value!r}")
        return self._tool(**arguments)


class CropTool:
    """Cuts a box out of one of the task's images (encoded, in their order), in the image's own resolution.

    It is given bytes, since it runs under the tool's deadline: a file system that hangs must not count as the policy's doing.
    """

    name = "crop"
    description = "Cuts a box out of an image of the first message, to look closer."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "box": {
                "type": "array",
                "items": {"type": "number", "minimum": 0, "maximum": 1},
                "minItems": 4,
                "maxItems": 4,
                "description": "x1, y1, x2, y2 as fractions of the image's width and height",
            },
            "image": {"type": "integer", "minimum": 0, "default": 0, "description": "index of the image"},
        },
        "required": ["box"],
    }

    def __init__(self, images: Sequence[bytes], min_side: int) -> None:
        self._images, self._min_side = images, min_side

    def __call__(self, **arguments: Any) -> ToolResult:
        """The cut-out as PNG. Raises ToolError for a box or image that does not exist, or too small a cut-out."""
        box, index = arguments.get("box"), arguments.get("image", 0)
        if not (isinstance(index, int) and 0 <= index < len(self._images)):
            raise ToolError(f"there is no image {index!r}, the conversation began with {len(self._images)}")
        if not (isinstance(box, list) and len(box) == 4 and all(isinstance(v, (int, float)) for v in box)):
            raise ToolError("box must be [x1, y1, x2, y2]")
        x1, y1, x2, y2 = box
        if not (0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1):
            raise ToolError(f"box {box} must satisfy 0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1")
        image = decode(self._images[index])
        edges = (round(x1 * image.width), round(y1 * image.height), round(x2 * image.width), round(y2 * image.height))
        cut = image.crop(edges)
        if min(cut.size) < self._min_side:
            raise ToolError(f"the box covers {cut.width}x{cut.height} pixels, each side needs {self._min_side}")
        encoded = io.BytesIO()
        cut.save(encoded, "PNG")
        return ToolResult(f"{cut.width}x{cut.height} pixels", (ImageSource(data=encoded.getvalue()),))


class ImageTools(ToolCalls):
    """``ToolCalls`` with a tool that cuts parts out of the task's images."""

    class Settings(ToolCalls.Settings):
        min_side: int = Field(28, ge=1)
        """A crop with a side of fewer pixels is refused: it would be enlarged from almost nothing."""

    def __init__(self, settings: ImageTools.Settings) -> None:
        super().__init__(settings)
        self._min_side = settings.min_side

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Reads the images, under the environment's own deadline. Raises DataFailure, InfrastructureFailure."""
        images = [read(image) for image in task.images]
        return [CropTool(images, self._min_side), *super().tools_for(task)]
