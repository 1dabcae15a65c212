"""Tools of a real MCP server: offered, called, failing and lost, over a pipe and over HTTP; and a
step.
"""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.core.failures import InfrastructureFailure, ToolDeadline
from rayloop.core.protocols import StepResult
from rayloop.core.types import EndReason, Message, Task
from rayloop.data.images import decode
from rayloop.envs.adapters.mcp import McpTools
from rayloop.envs.tools import schemas
from tests.adapters.conftest import Train, played, served
from tests.support.runs import ROOT

pytest.importorskip("mcp", reason="make test-adapters installs mcp")
pytestmark = [pytest.mark.adapters, pytest.mark.timeout(120)]
PROGRAM = str(ROOT / "tests/support/mcp_server.py")
SERVER = {"command": sys.executable, "args": [PROGRAM]}
TASK = Task("one", (Message("user", ("Play.",)),))


def kind(**server: Any) -> dict[str, Any]:
    return {
        "use": "rayloop.envs.adapters.mcp:McpTools",
        "with": {"servers": [server or SERVER], "describe": "prompt"},
    }


def shown(result: StepResult) -> tuple[str, list[tuple[int, int]]]:
    """The text of what is observed, and the sizes of its pictures."""
    assert result.observation is not None
    (message,) = result.observation.messages
    texts = [part for part in message.parts if isinstance(part, str)]
    return "".join(texts), [decode(image.data or b"").size for image in message.images]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def servers() -> list[psutil.Process]:
    """The living ones. A child that an earlier test left as a zombie has no command line."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "mcp_server.py" in " ".join(child.cmdline()):
                found.append(child)
    return found


def mcp(**changes: Any) -> McpTools:
    return McpTools(McpTools.Settings.model_validate({"servers": [SERVER], **changes}))


def test_tools_of_a_server_are_offered_called_and_end_with_the_episode() -> None:
    made = mcp()
    made.reset(TASK)
    offered = {schema["function"]["name"]: schema["function"] for schema in schemas(made)}
    assert list(offered) == ["zoom", "fail", "rest", "leave"]
    assert offered["zoom"]["parameters"]["required"] == ["box"]
    assert shown(made.step(call("zoom", box=[0, 0, 1, 1], factor=3))) == (
        "zoomed [0.0, 0.0, 1.0, 1.0]",
        [(90, 20)],
    )
    refused = made.step(call("zoom"))
    assert refused.error == "zoom needs the argument 'box'"
    failed = made.step(call("fail"))
    assert failed.error is not None
    assert "boom" in failed.error
    assert made.step("that is all").done
    (process,) = servers()
    made.close()
    assert not process.is_running()


HOSTILE = {"command": sys.executable, "args": [str(ROOT / "tests/support/hostile_mcp.py")]}


def test_every_kind_of_part_is_shown_or_named() -> None:
    made = mcp(servers=[HOSTILE])
    made.reset(TASK)
    said, pictures = shown(made.step(call("parts")))
    made.close()
    assert pictures == []
    assert "print(1)" in said, "the text of an embedded resource"
    assert "(manual: https://example.org/manual)" in said
    assert said.count("(image: cannot be shown)") == 3
    assert "(audio: cannot be shown)" in said
    assert "(file:///b: cannot be shown)" in said


def test_a_server_that_does_not_start_is_named_with_what_to_do() -> None:
    ends = {"command": sys.executable, "args": ["-c", "pass"]}
    named = re.escape(f"of the server {sys.executable} -c pass. Run it by hand")
    broken = mcp(servers=[ends], start_timeout=20)
    with pytest.raises(InfrastructureFailure, match=named):
        broken.reset(TASK)
    broken.close()


def test_a_server_that_is_gone_is_the_environments_failure() -> None:
    made = mcp(servers=[{**SERVER, "only": ["leave", "zoom"]}])
    made.reset(TASK)
    with pytest.raises(InfrastructureFailure, match="MCP tool leave"):
        made.step(call("leave"))
    with pytest.raises(InfrastructureFailure, match="MCP tool zoom"):
        made.step(call("zoom", box=[1]))
    made.close()
    for wrong, why in (
        ({**SERVER, "only": ["cut"]}, "has no tool cut, but fail, leave, rest, zoom"),
        ({"command": "/nowhere/server"}, "MCP: FileNotFoundError"),
        ({"command": sys.executable, "args": ["-c", "pass"]}, "MCP: "),
    ):
        broken = mcp(servers=[wrong], start_timeout=20)
        with pytest.raises(InfrastructureFailure, match=why):
            broken.reset(TASK)
        broken.close()
    assert not servers()


def test_a_call_that_hangs_ends_the_episode_and_its_server() -> None:
    made = mcp(tool_timeout=1)
    made.reset(TASK)
    with pytest.raises(ToolDeadline, match="the tool rest gave"):
        made.step(call("rest"))
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 15
    assert not servers()


@pytest.mark.parametrize("factor", range(1, 6))
def test_five_episodes_are_played(factor: int) -> None:
    left = [call("zoom", box=[0, 0, 1, 1], factor=factor), "that is all"]
    made = played(kind(), {}, lambda _: left.pop(0))
    assert made.end_reason == EndReason.DONE
    assert [turn.sampled for turn in made.turns].count(True) == 2
    (image,) = [image for turn in made.turns for image in turn.images]
    assert (image.width, image.height) == (30 * factor, 20)


def test_a_step_is_trained_with_a_server_that_all_episodes_share(
    digits_model: Path, train: Train
) -> None:
    with served(sys.executable, PROGRAM) as port:
        rows = [{"prompt": f"Sort: {n} 1 2"} for n in range(4)]
        made = train(
            digits_model,
            rows,
            data__reader={"use": "rayloop.data.dataset:ChatRows"},
            reward={"source": {"use": "tests.support.rewards:TokenReward"}},
            environment={
                "episode": {"environment": kind(url=f"http://127.0.0.1:{port}/mcp"), "max_turns": 2}
            },
        )
    assert made.named("finished")[0]["ledger"].get("excluded", 0) == 0, "no episode lost the server"
