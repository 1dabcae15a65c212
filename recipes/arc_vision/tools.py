"""Arc Vision's tools under its names: zoom_ui_element, wait_for_ui and inspect_element."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import yaml
from pydantic import Field

from rayloop.chat.calls import bodies, written
from rayloop.core.protocols import Observation, StepResult, Tool, ToolResult
from rayloop.core.types import Message, Task
from rayloop.data.images import read
from rayloop.envs.image_tools import Album, ImageTool, ImageTools
from rayloop.envs.tools import ToolError
from rayloop.recipes.arc_vision.boxes import answered, confidence
from rayloop.recipes.arc_vision.data import PROMPTS
from rayloop.recipes.arc_vision.original import Simulated

_NAMED = re.compile(r"<use_tool>\s*(\w+)\s*</use_tool>")
UNSURE = (
    "You are not sure. Here is your box with what surrounds it; answer again, in fractions of the"
    " whole screenshot."
)
"""The text with the enlarged part when the policy's answer does not pass the gate."""


class ArcVisionTools(ImageTools):
    """The original's three tools. A turn without a call is the answer."""

    class Settings(ImageTools.Settings):
        """What the tools do, how they can be called, and when an answer is not taken."""

        results: Literal["real", "simulated"] = "real"
        """real: zoom shows the enlarged part, inspect measures, wait waits.

        simulated: the original's fixed texts, one for each call of a turn; a turn whose calls are
        not JSON ends the episode.
        """
        named: bool = False
        """Whether ``<use_tool>NAME</use_tool>`` is carried out, with the original's arguments.

        The original's prompt describes it, and its engine never parsed it. Only with real results.
        """
        gate: float = Field(0.0, ge=0, le=1)
        """An answer whose ``<confidence>`` is below this is not taken.

        The policy then sees its box enlarged and answers again, once an episode. The original's
        report has 0.7; 0: never, as its code.
        """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._arc = settings
        self._simulated = Simulated()
        self._gated = False

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Reads the images unless results are simulated.

        Raises DataFailure, InfrastructureFailure.
        """
        self._simulated = Simulated()
        self._gated = False
        images = [read(image) for image in task.images] if self._arc.results == "real" else []
        functions = _tool_functions(Album(images, self._arc))
        return [ImageTool(function=functions[schema["name"]], **schema) for schema in described()]

    def step(self, text: str) -> StepResult:
        """Carry out what the turn calls."""
        if self._arc.results == "simulated":
            return self._as_published(text)
        if bodies(text):
            return super().step(text)
        names = _NAMED.findall(text) if self._arc.named else []
        if names:
            return super().step(written(names[-1], DEFAULTS.get(names[-1], {})))
        if self._unsure(text):
            return self._look_again(text)
        return super().step(text)

    def _as_published(self, text: str) -> StepResult:
        """All calls of the turn in their order, each answered by a separate message."""
        results = []
        for name, arguments in _calls(text):
            try:
                results.append(self._simulated.call(name, arguments)[0])
            except (TypeError, ValueError, OverflowError) as error:
                return StepResult(self._shown(f"Error: {error}"), error=str(error))
        if not results:
            return StepResult(done=True)
        messages = tuple(Message(self._arc.role, (result,)) for result in results)
        return StepResult(Observation(messages))

    def _unsure(self, text: str) -> bool:
        """Whether this is the first answer whose stated confidence is below the gate."""
        certainty = confidence(text)
        return not self._gated and certainty is not None and certainty < self._arc.gate

    def _look_again(self, text: str) -> StepResult:
        """The answered box, twice as wide and high, enlarged.

        An answer that cannot be shown is taken as it is.
        """
        self._gated = True
        box, _ = answered(text)
        if box is None:
            return StepResult(done=True)
        x1, y1, x2, y2 = box
        half_width = (x2 - x1) / 2
        half_height = (y2 - y1) / 2
        region = [
            max(0.0, x1 - half_width),
            max(0.0, y1 - half_height),
            min(1.0, x2 + half_width),
            min(1.0, y2 + half_height),
        ]
        step = super().step(written("zoom_ui_element", {"region": region}))
        if step.error or step.observation is None:
            return StepResult(done=True)
        (zoomed,) = step.observation.messages
        message = Message(zoomed.role, (f"{UNSURE}\n", *zoomed.parts))
        return StepResult(Observation((message,)))


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "zoom_ui_element": {"region": [0.25, 0.25, 0.75, 0.75]},
    "wait_for_ui": {"duration": 1.0},
    "inspect_element": {"region": [0.0, 0.0, 1.0, 1.0]},
}
"""The original's arguments where a call has none."""


# Each episode needs it, and parsing takes longer than all calls of an episode.
@functools.cache
def described() -> tuple[Mapping[str, Any], ...]:
    """Name, description and parameters of the three tools, from the original's file."""
    text = (PROMPTS / "tools.yaml").read_text(encoding="utf-8")
    return tuple(tool["tool_schema"]["function"] for tool in yaml.safe_load(text)["tools"])


def _tool_functions(album: Album) -> Mapping[str, Callable[..., ToolResult]]:
    """Name -> function of each tool, over the episode's images.

    All calls look at the first image, as the answer's box does.
    """

    def zoom(region: Any, zoom_factor: float = 2.0) -> ToolResult:
        return album.zoom(region, zoom_factor)

    def inspect(region: Any, type: str = "structure") -> ToolResult:
        kinds = ("structure", "properties", "accessibility")
        if type not in kinds:
            raise ToolError(f"type {type!r} is not one of {', '.join(kinds)}")
        return album.inspect(region)

    def wait(duration: Any) -> ToolResult:
        return album.wait(duration)

    return {"zoom_ui_element": zoom, "wait_for_ui": wait, "inspect_element": inspect}


def _calls(text: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and arguments of the turn's calls that are JSON with both."""
    calls = []
    for body in bodies(text):
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            continue
        if not isinstance(call, Mapping):
            continue
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(name, str) and isinstance(arguments, Mapping):
            calls.append((name, arguments))
    return calls
