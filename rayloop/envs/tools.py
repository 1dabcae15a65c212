"""Tools in a conversation: the policy calls one (``rayloop/chat/calls.py``) and sees its text and
images.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rayloop.chat.calls import CALL, CALLED, bodies, called
from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.failures import (
    Blame,
    DeadlineExceeded,
    EnvironmentFailed,
    PolicyFailure,
    ToolDeadline,
    blame,
)
from rayloop.core.protocols import Environment, Observation, StepResult, Tool, ToolResult
from rayloop.core.threads import call_within
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import pictures

logger = logging.getLogger(__name__)

SHOWN = 200
"""Characters of what the policy wrote that an error repeats."""
_INSTRUCTIONS = (
    (Path(__file__).parent / "prompts" / "tools.txt").read_text(encoding="utf-8").rstrip()
)


Schema = dict[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``, as chat templates of
the Hub take it.
"""


def schemas(environment: Environment) -> list[Schema]:
    """Of the environment's ``tools``, in their order; empty when it has none.

    Raises EnvironmentFailed for what is no tool.
    """
    return [schema(tool) for tool in getattr(environment, "tools", ())]


def schema(tool: Any) -> Schema:
    """Of one tool. Raises EnvironmentFailed for what is none."""
    name, about, parameters = (
        getattr(tool, key, None) for key in ("name", "description", "parameters")
    )
    if not (
        isinstance(name, str)
        and name
        and isinstance(about, str)
        and isinstance(parameters, Mapping)
    ):
        needs = "a name and a description (texts) and parameters (a JSON schema, a mapping)"
        raise EnvironmentFailed(f"{type(tool).__name__} is no tool: it needs {needs}", bug=True)
    try:
        plain = json.loads(json.dumps(parameters, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(
            f"the parameters of the tool {name} are no JSON: {error}", bug=True
        ) from error
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": plain},
    }


class ToolError(Exception):
    """A call that cannot be carried out as the policy wrote it. The policy sees the message."""


def instructions(tools: Sequence[Schema]) -> str:
    """The instructions for ``tools``, a line of JSON each, where the chat template has none."""
    return _INSTRUCTIONS.format(tools="\n".join(map(json.dumps, tools)), call=CALL, called=CALLED)


def tool_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of the last tool call in ``text``, None when there is none.

    Raises ToolError if malformed.
    """
    found = bodies(text)
    if not found:
        return None
    try:
        return called(found[-1])
    except ValueError as error:
        raise ToolError(str(error)) from error


class ToolCalls:
    """The task's messages, then calls of tools until a turn calls none: that turn is the answer.

    Own tools are classes under ``tools``; a subclass can override ``tools_for``.
    """

    class Settings(SettingsModel):
        """Which tools there are, and how they are described and shown."""

        tools: tuple[Annotated[Component, Role("tool", ("__call__",))], ...] = ()
        """``[{use: module:Class, with: {...}}]``: what the policy may call
        (docs/bring_your_own/tool.md).
        """
        role: str = "tool"
        """The role under which the chat template shows results."""
        tool_timeout: float = Field(30.0, gt=0)
        """Seconds for one call; beyond it the episode ends as ``tool_deadline``.

        Keep it below ``episode.step_timeout``.
        """
        describe: Literal["template", "prompt", "nowhere"] = "template"
        """Where tools are described: ``template`` gives their schemas to the chat template
        (Qwen3-VL, Hermes), ``prompt`` writes a system message (Qwen2.5-VL's template ignores
        tools), ``nowhere`` leaves it to the row's prompt.
        """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tools: dict[str, _Checked] = {}

    @property
    def tools(self) -> Sequence[Tool]:
        """What the chat template describes to the policy."""
        return (
            [checked.tool for checked in self._tools.values()]
            if self._settings.describe == "template"
            else ()
        )

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Called by ``reset``, under the environment's own deadline.

        Raises DataFailure, InfrastructureFailure.
        """
        return [tool.build() for tool in self._settings.tools]

    def reset(self, task: Task) -> Observation:
        """Show the task's messages, with the tools described as ``describe`` says."""
        self._tools = {tool.name: _Checked(tool) for tool in self.tools_for(task)}
        if self._settings.describe != "prompt" or not self._tools:
            return Observation(task.messages)
        return Observation(
            _with_system(
                task.messages, instructions([schema(tool) for tool in self._tools.values()])
            )
        )

    def step(self, text: str) -> StepResult:
        """Carry out the call.

        A call that cannot be is answered with the reason, as an error. Raises ToolDeadline.
        """
        name = ""
        try:
            call = tool_call(text)
            if call is None:
                return StepResult(done=True)
            name, arguments = call
            if name not in self._tools:
                raise ToolError(
                    f"there is no tool {name[:SHOWN]!r}; the tools are: {', '.join(self._tools)}"
                )
            result = self._result(self._tools[name], arguments)
        except ToolError as error:
            return StepResult(self._shown(f"Error: {error}", name=name), error=str(error))
        return StepResult(self._shown(str(result.text), *pictures(result.images), name=name))

    def _result(self, tool: "_Checked", arguments: Mapping[str, Any]) -> ToolResult:
        """What the tool answers.

        Raises ToolError, also for other errors that the call is to blame for, ToolDeadline, and
        what blames the data or the infrastructure.
        """
        try:
            if hasattr(tool.tool, "own_deadline"):
                result = tool(arguments)
            else:
                result = call_within(self._settings.tool_timeout, tool, arguments)
        except DeadlineExceeded as error:
            raise ToolDeadline(f"the tool {tool.name} gave {error}") from error
        except (ToolError, PolicyFailure):
            raise
        except Exception as error:
            if blame(error) is not Blame.POLICY:
                raise
            logger.warning(
                "the tool %s raised on arguments that its schema allows", tool.name, exc_info=error
            )
            raise ToolError(f"{tool.name} raised {type(error).__name__}: {error}") from error
        if not isinstance(result, ToolResult):
            raise ToolError(f"{tool.name} returned {type(result).__name__}, which is no ToolResult")
        return result

    def evaluate(self) -> float | None:
        """No result of its own."""
        return None

    def close(self) -> None:
        """Close the tools that have a ``close``, and forget all."""
        tools, self._tools = self._tools, {}
        for checked in tools.values():
            getattr(checked.tool, "close", tuple)()

    def _shown(self, *parts: str | ImageSource, name: str = "") -> Observation:
        """The result of the tool ``name``; some templates write whose it is (gpt-oss, Gemma 4)."""
        named = {"name": name} if name in self._tools and self._settings.role == "tool" else {}
        return Observation((Message(self._settings.role, parts, named),))


def _with_system(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """``messages`` with ``text`` in their system message, which comes first."""
    if messages and messages[0].role == "system":
        return (Message("system", (*messages[0].parts, "\n\n", text)), *messages[1:])
    return (Message("system", (text,)), *messages)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


class _Checked:
    """A tool that is only called with arguments that its schema knows, of the types it names, and
    with all that it requires.
    """

    def __init__(self, tool: Tool) -> None:
        self.name, self.description, self.parameters = tool.name, tool.description, tool.parameters
        self.tool = tool

    def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises ToolError.

        ``arguments`` is one mapping: the policy's names are never those of a parameter here.
        """
        known = self.parameters.get("properties", {})
        missing = [name for name in self.parameters.get("required", ()) if name not in arguments]
        if missing:
            raise ToolError(f"{self.name} needs the argument {missing[0]!r}")
        for name, value in arguments.items():
            if name not in known:
                raise ToolError(
                    f"{self.name} knows no argument {name[:SHOWN]!r}; it has:"
                    f" {', '.join(known) or 'none'}"
                )
            wanted = _types(known[name])
            if wanted and not any(_TYPES[one](value) for one in wanted):
                given = (
                    type(value).__name__ if isinstance(value, list | dict) else repr(value)[:SHOWN]
                )  # nested ones have no repr
                raise ToolError(
                    f"the argument {name!r} of {self.name} must be of type {' or '.join(wanted)},"
                    f" not {given}"
                )
        return self.tool(**arguments)


def _types(schema: Any) -> list[str]:
    """The JSON types that the schema of an argument names; empty where it names none, or one that
    is unknown.
    """
    named = schema.get("type") if isinstance(schema, Mapping) else None
    found = (
        [named]
        if isinstance(named, str)
        else list(named)
        if isinstance(named, list | tuple)
        else []
    )
    return found if all(one in _TYPES for one in found) else []
