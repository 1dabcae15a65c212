"""Arc Vision's tools under its names and arguments: zoom_ui_element, wait_for_ui and
inspect_element.
"""

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
"""What the policy reads beside the enlarged part when its answer does not pass the gate."""


class ArcVisionTools(ImageTools):
    """The original's three tools. A turn without a call is the answer."""

    class Settings(ImageTools.Settings):
        """What the tools do, how they can be called, and when an answer is not yet one."""

        results: Literal["real", "simulated"] = "real"
        """real: zoom shows the enlarged part, inspect measures, wait waits. simulated: the
        original's fixed texts, one for each call of a turn; a turn whose calls are no JSON ends the
        episode.
        """
        named: bool = False
        """Whether ``<use_tool>NAME</use_tool>``, which the original's prompt teaches and its engine
        never parsed, is carried out: with the original's default arguments. Only with real results.
        """
        gate: float = Field(0.0, ge=0, le=1)
        """An answer whose ``<confidence>`` is below this is not taken: once, the policy sees its
        box enlarged and answers anew. The original's report has 0.7; 0: never, as its code.
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
        self._simulated, self._gated = Simulated(), False
        real = self._arc.results == "real"
        album = Album([read(image) for image in task.images] if real else [], self._arc)
        return [ImageTool(function=_on(album, said["name"]), **said) for said in described()]

    def step(self, text: str) -> StepResult:
        """Carry out what the turn calls."""
        if self._arc.results == "simulated":
            return self._as_published(text)
        if self._arc.named and not bodies(text) and (found := _NAMED.findall(text)):
            return super().step(written(found[-1], DEFAULTS.get(found[-1], {})))
        return (
            super().step(text) if bodies(text) or not self._unsure(text) else self._look_again(text)
        )

    def _as_published(self, text: str) -> StepResult:
        """All calls of the turn in their order, each with a message of its own."""
        results = []
        for name, arguments in _calls(text):
            try:
                results.append(self._simulated.call(name, arguments)[0])
            except (TypeError, ValueError, OverflowError) as error:
                return StepResult(self._shown(f"Error: {error}"), error=str(error))
        if not results:
            return StepResult(done=True)
        return StepResult(Observation(tuple(Message(self._arc.role, (said,)) for said in results)))

    def _unsure(self, text: str) -> bool:
        sure = confidence(text)
        return not self._gated and sure is not None and sure < self._arc.gate

    def _look_again(self, text: str) -> StepResult:
        """The answered box, twice as wide and high, enlarged; an answer that cannot be shown is
        taken as it is.
        """
        self._gated = True
        box, _ = answered(text)
        if box is None:
            return StepResult(done=True)
        wide, high = (box[2] - box[0]) / 2, (box[3] - box[1]) / 2
        around = [
            max(0.0, box[0] - wide),
            max(0.0, box[1] - high),
            min(1.0, box[2] + wide),
            min(1.0, box[3] + high),
        ]
        step = super().step(written("zoom_ui_element", {"region": around}))
        if step.error or step.observation is None:
            return StepResult(done=True)
        (shown,) = step.observation.messages
        return StepResult(Observation((Message(shown.role, (f"{UNSURE}\n", *shown.parts)),)))


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "zoom_ui_element": {"region": [0.25, 0.25, 0.75, 0.75]},
    "wait_for_ui": {"duration": 1.0},
    "inspect_element": {"region": [0.0, 0.0, 1.0, 1.0]},
}
"""The original's arguments where a call has none."""


@functools.cache  # an episode asks for it, and parsing takes longer than all its calls
def described() -> tuple[Mapping[str, Any], ...]:
    """Name, description and parameters of the three tools, from the original's own file."""
    text = (PROMPTS / "tools.yaml").read_text(encoding="utf-8")
    return tuple(tool["tool_schema"]["function"] for tool in yaml.safe_load(text)["tools"])


def _on(album: Album, name: str) -> Callable[..., ToolResult]:
    """The tool ``name`` over the episode's images; further calls look at the first image too, as
    its box does.
    """

    def zoom(region: Any, zoom_factor: float = 2.0) -> ToolResult:
        return album.zoom(region, zoom_factor)

    def inspect(region: Any, type: str = "structure") -> ToolResult:
        kinds = ("structure", "properties", "accessibility")
        if type not in kinds:
            raise ToolError(f"type {type!r} is none of {', '.join(kinds)}")
        return album.inspect(region)

    functions: dict[str, Callable[..., ToolResult]] = {
        "zoom_ui_element": zoom,
        "wait_for_ui": lambda duration: album.wait(duration),
        "inspect_element": inspect,
    }
    return functions[name]


def _calls(text: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Those calls of a turn that are JSON with a name and arguments."""
    found = []
    for body in bodies(text):
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            continue
        arguments = (
            said.get("arguments", said.get("parameters", {})) if isinstance(said, Mapping) else None
        )
        if isinstance(arguments, Mapping) and isinstance(said.get("name"), str):
            found.append((said["name"], arguments))
    return found
