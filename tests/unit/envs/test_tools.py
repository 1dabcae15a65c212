"""Calls of tools that a policy may write: every name and value of an argument, and whatever a tool
makes of them.
"""

from __future__ import annotations

import errno
from typing import Any

import pytest

from rayloop.core.failures import InfrastructureFailure
from rayloop.core.protocols import StepResult, ToolResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.envs.tools import ToolCalls
from tests.support.hostile_turns import NAMES, call
from tests.support.pictures import picture

TASK = Task("t", (Message("user", ("Look.",)),))


class Echo:
    """Says what it was given; ``parameters`` has the names that Python's own calls use."""

    name, description = "echo", "Echoes."
    parameters = {
        "type": "object",
        "properties": {
            "self": {"type": "integer"},
            "function": {},
            "timeout": {"type": ["number", "null"]},
            "free": True,
        },
    }

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def __call__(self, /, **arguments: Any) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return ToolResult(str(arguments)) if self.result is None else self.result


def said(text: str, result: Any = None) -> StepResult:
    class Tools(ToolCalls):
        def tools_for(self, task: Task) -> list[Any]:
            return [Echo(result)]

    environment = Tools(Tools.Settings())
    environment.reset(TASK)
    return environment.step(text)


def parts(step: StepResult) -> tuple[str | ImageSource, ...]:
    assert step.observation is not None
    return step.observation.messages[0].parts


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("self", "function", "timeout", "\ud800")]
)
def test_an_argument_of_any_name_is_answered(name: str) -> None:
    step = said(call("echo", {name: 1}))
    assert step.error is not None
    assert step.error.startswith("echo knows no argument")
    assert len(step.error) < 600


def test_arguments_may_be_called_as_parameters_of_python() -> None:
    assert parts(said(call("echo", {"self": 1, "function": 2, "timeout": None, "free": [3]}))) == (
        "{'self': 1, 'function': 2, 'timeout': None, 'free': [3]}",
    )
    assert (
        said(call("echo", {"timeout": "x"})).error
        == "the argument 'timeout' of echo must be of type number or null, not 'x'"
    )


def test_arguments_in_a_text_are_read_and_halves_of_characters_are_not() -> None:
    assert parts(
        said('<tool_call>{"name": "echo", "arguments": "{\\"self\\": 1}"}</tool_call>')
    ) == ("{'self': 1}",)
    assert said('<tool_call>{"name": "echo", "arguments": "self"}</tool_call>').error is not None
    assert "surrogates not allowed" in str(
        said('<tool_call>{"name": "echo", "arguments": {"free": "\\ud800"}}</tool_call>').error
    )


def test_nested_arguments_are_answered() -> None:
    deep = (
        '<tool_call>{"name": "echo", "arguments": {"self":'
        f" {'[' * 900}{']' * 900}}}}}</tool_call>"
    )
    assert said(deep).error is not None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        ZeroDivisionError("x"),
        KeyError("x"),
        FileNotFoundError(2, "x"),
        OSError(errno.ENAMETOOLONG, "x"),
    ],
)
def test_what_a_tool_raises_on_a_call_is_shown_to_the_policy(error: Exception) -> None:
    step = said(call("echo", {}), error)
    assert (step.error, step.done) == (f"echo raised {type(error).__name__}: {error}", False)


@pytest.mark.parametrize(
    "error",
    [ConnectionError("x"), OSError(errno.ENOSPC, "x"), MemoryError(), InfrastructureFailure("x")],
)
def test_what_a_machine_breaks_is_not(error: Exception) -> None:
    with pytest.raises(type(error)):
        said(call("echo", {}), error)


def test_a_result_that_is_none_is_an_error() -> None:
    assert said(call("echo", {}), "text").error == "echo returned str, which is not a ToolResult"


def test_pictures_that_cannot_be_shown_are_words() -> None:
    good, large = picture(56, 56), picture(7000, 5000)
    broken = (b"", b"\x89PNG\r\n\x1a\n", good[:-20], picture(20, 5000))
    step = said(
        call("echo", {}),
        ToolResult("look", tuple(map(ImageSource, [None] * 7, [good, *broken, large, large]))),
    )
    text, first, *others = parts(step)
    assert text == "look"
    assert isinstance(first, ImageSource)
    assert (first.data, first.size) == (good, (56, 56))
    assert others[:4] == ["(image: cannot be shown)"] * 4
    assert isinstance(others[4], ImageSource)
    assert others[5] == "(image: cannot be shown)", (
        "both together have more pixels than an answer may have"
    )
