"""Tools in a conversation: the policy calls one, and sees its text and images.

``rayloop/chat/calls.py`` reads the calls.
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

QUOTED_CHARACTERS = 200
"""Characters of the policy's text that an error repeats."""
_INSTRUCTIONS = (
    (Path(__file__).parent / "prompts" / "tools.txt").read_text(encoding="utf-8").rstrip()
)


Schema = dict[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``.

Chat templates of the Hub take it.
"""


def schemas(environment: Environment) -> list[Schema]:
    """Return the schemas of the environment's ``tools``, in their order; empty when it has none.

    Raises EnvironmentFailed for an object that is not a tool.
    """
    return [schema(tool) for tool in getattr(environment, "tools", ())]


def invoke(environment: Environment, method: str, args: tuple[Any, ...]) -> Any:
    """Call a method of the protocol.

    ``tools`` returns the schemas of the tools that the environment offers now.
    """
    if method == "tools":
        return schemas(environment)
    return getattr(environment, method)(*args)


def schema(tool: Any) -> Schema:
    """Return the schema of one tool. Raises EnvironmentFailed for an object that is not a tool."""
    name, description, parameters = (
        getattr(tool, key, None) for key in ("name", "description", "parameters")
    )
    has_name = isinstance(name, str) and name
    if not has_name or not isinstance(description, str) or not isinstance(parameters, Mapping):
        needs = "a name and a description (texts) and parameters (a JSON schema, a mapping)"
        raise EnvironmentFailed(f"{type(tool).__name__} is not a tool: it needs {needs}", bug=True)
    try:
        plain = json.loads(json.dumps(parameters, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(
            f"the parameters of the tool {name} are not JSON: {error}", bug=True
        ) from error
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": plain},
    }


class ToolError(Exception):
    """A call that cannot be carried out as the policy wrote it. The policy sees the message."""


def instructions(tools: Sequence[Schema]) -> str:
    """Return the instructions for ``tools``, where the chat template has none.

    Each tool is a line of JSON.
    """
    return _INSTRUCTIONS.format(tools="\n".join(map(json.dumps, tools)), call=CALL, called=CALLED)


def tool_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of the last tool call in ``text``, None when it has no call.

    Raises ToolError for a malformed call.
    """
    calls = bodies(text)
    if not calls:
        return None
    try:
        return called(calls[-1])
    except ValueError as error:
        raise ToolError(str(error)) from error


class ToolCalls:
    """The task's messages, then calls of tools until a turn calls none: that turn is the answer.

    Custom tools are classes under ``tools``; a subclass can override ``tools_for``.
    """

    class Settings(SettingsModel):
        """Which tools there are, and how they are described and shown."""

        tools: tuple[Annotated[Component, Role("tool", ("__call__",))], ...] = ()
        """``[{use: module:Class, with: {...}}]``: custom tools (docs/bring_your_own/tool.md)."""
        role: str = "tool"
        """The role under which the chat template shows results."""
        tool_timeout: float = Field(30.0, gt=0)
        """Seconds for one call; beyond it the episode ends as ``tool_deadline``.

        Keep it below ``episode.step_timeout``.
        """
        describe: Literal["template", "prompt", "nowhere"] = "template"
        """Where tools are described: template, prompt or nowhere.

        ``template`` gives their schemas to the chat template (Qwen3-VL, Hermes), ``prompt`` writes
        a system message (Qwen2.5-VL's template ignores tools), ``nowhere`` leaves it to the row's
        prompt.
        """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tools: dict[str, _Checked] = {}

    @property
    def tools(self) -> Sequence[Tool]:
        """Return the tools that the chat template describes to the policy."""
        if self._settings.describe != "template":
            return ()
        return [checked.tool for checked in self._tools.values()]

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Return the episode's tools, for ``reset`` and within its deadline.

        Raises DataFailure, InfrastructureFailure.
        """
        return [tool.build() for tool in self._settings.tools]

    def reset(self, task: Task) -> Observation:
        """Show the task's messages, with the tools described as ``describe`` says."""
        self._tools = {tool.name: _Checked(tool) for tool in self.tools_for(task)}
        if self._settings.describe != "prompt" or not self._tools:
            return Observation(task.messages)
        text = instructions([schema(tool) for tool in self._tools.values()])
        return Observation(_with_system(task.messages, text))

    def step(self, text: str) -> StepResult:
        """Carry out the call.

        A call that cannot be carried out is answered with the reason, as an error. Raises
        ToolDeadline.
        """
        name = ""
        try:
            call = tool_call(text)
            if call is None:
                return StepResult(done=True)
            name, arguments = call
            if name not in self._tools:
                quoted = name[:QUOTED_CHARACTERS]
                raise ToolError(f"unknown tool {quoted!r}; the tools are: {', '.join(self._tools)}")
            result = self._result(self._tools[name], arguments)
        except ToolError as error:
            return StepResult(self._shown(f"Error: {error}", name=name), error=str(error))
        return StepResult(self._shown(str(result.text), *pictures(result.images), name=name))

    def _result(self, tool: "_Checked", arguments: Mapping[str, Any]) -> ToolResult:
        """Return what the tool answers.

        Raises ToolError, also for other errors that the call is to blame for, ToolDeadline, and
        errors that blame the data or the infrastructure.
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
            raise ToolError(
                f"{tool.name} returned {type(result).__name__}, which is not a ToolResult"
            )
        return result

    def evaluate(self) -> float | None:
        """Return None: the reward judges the answer."""
        return None

    def close(self) -> None:
        """Close the tools that have a ``close``, and forget all."""
        tools = self._tools
        self._tools = {}
        for checked in tools.values():
            getattr(checked.tool, "close", tuple)()

    def _shown(self, *parts: str | ImageSource, name: str = "") -> Observation:
        """Return the result of the tool ``name``.

        Some templates write the name (gpt-oss, Gemma 4).
        """
        has_name = name in self._tools and self._settings.role == "tool"
        fields = {"name": name} if has_name else {}
        return Observation((Message(self._settings.role, parts, fields),))


def _with_system(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Return ``messages`` with ``text`` in their system message, which comes first."""
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
    """A tool that is only called with arguments that fit its schema.

    The schema has their names and types, and none that it requires is missing.
    """

    def __init__(self, tool: Tool) -> None:
        self.name = tool.name
        self.description = tool.description
        self.parameters = tool.parameters
        self.tool = tool

    def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the tool. Raises ToolError.

        ``arguments`` is one mapping: the policy's names are never parameters of this method.
        """
        properties = self.parameters.get("properties", {})
        missing = [name for name in self.parameters.get("required", ()) if name not in arguments]
        if missing:
            raise ToolError(f"{self.name} needs the argument {missing[0]!r}")
        for name, value in arguments.items():
            if name not in properties:
                raise ToolError(
                    f"{self.name} knows no argument {name[:QUOTED_CHARACTERS]!r}; it has:"
                    f" {', '.join(properties) or 'none'}"
                )
            types = _types(properties[name])
            if types and not any(_TYPES[type_](value) for type_ in types):
                raise ToolError(
                    f"the argument {name!r} of {self.name} must be of type {' or '.join(types)},"
                    f" not {_short(value)}"
                )
        return self.tool(**arguments)


def _short(value: Any) -> str:
    # Deeply nested values have no repr.
    if isinstance(value, list | dict):
        return type(value).__name__
    return repr(value)[:QUOTED_CHARACTERS]


def _types(schema: Any) -> list[str]:
    """Return the JSON types that the schema of an argument names.

    Empty where it names none, or an unknown one.
    """
    value = schema.get("type") if isinstance(schema, Mapping) else None
    types: list[Any] = []
    if isinstance(value, str):
        types = [value]
    elif isinstance(value, list | tuple):
        types = list(value)
    return types if all(type_ in _TYPES for type_ in types) else []
