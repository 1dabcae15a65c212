"""What a tool's result carries besides its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rayloop.core.protocols import Tool, ToolResult
from rayloop.core.types import Message, Task
from rayloop.envs.tools import ToolCalls


class Echo:
    """A tool without arguments."""

    name, description = "echo", "Says it again."
    parameters: dict[str, Any] = {"type": "object", "properties": {}}

    def __call__(self) -> ToolResult:
        return ToolResult("hi")


class Echoes(ToolCalls):
    def tools_for(self, task: Task) -> Sequence[Tool]:
        return [Echo()]


@pytest.mark.parametrize(("role", "named"), [("tool", {"name": "echo"}), ("user", {})])
def test_the_result_of_a_tool_says_whose_it_is(role: str, named: dict[str, str]) -> None:
    """Some templates write it; an error of a call that names no tool is nobody's."""
    tools = Echoes(ToolCalls.Settings(role=role))
    tools.reset(Task("t", (Message("user", ("hi",)),)))
    said = ('<tool_call>{"name": "echo", "arguments": {}}</tool_call>', "<tool_call>{</tool_call>")
    shown = [tools.step(text).observation for text in said]
    assert [one.messages[0].fields for one in shown if one is not None] == [named, {}]
