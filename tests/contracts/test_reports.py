"""What each report of another program becomes: each row of rayloop/core/failures.yaml has an
example in reports.yaml, which is played through the adapter of its protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rayloop.actors.environment import classify
from rayloop.core import failures
from rayloop.core.failures import Cause
from rayloop.core.reports import REFUSED
from rayloop.core.types import EndReason, Message, Sampling, Task, Trajectory
from rayloop.envs import agent_env
from rayloop.envs.adapters import mcp
from rayloop.envs.adapters.nemo_gym import NemoGymRows
from rayloop.envs.agents import verifiers_env
from tests.support.nemo_gym_server import CALL, ROW, answering
from tests.support.packages import package_marks
from tests.support.played import episode_settings, play_one

ROWS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(failures.__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
EXAMPLES: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("reports.yaml").read_text(encoding="utf-8")
)
ADAPTERS = {"openenv": "rayloop.envs.adapters.openenv", "mcp": "rayloop.envs.adapters.mcp"}
"""Of the protocols whose adapters need a published package."""
TASK = Task("t", (Message("user", ("Play.",)),))


def outcome(task: Task, kind: dict[str, Any], says: list[str]) -> tuple[str, str]:
    """What the report becomes, and the server that the failure names."""
    settings = episode_settings(kind, max_turns=2, step_timeout=30)
    try:
        played = play_one(task, lambda _: says.pop(0), settings, Sampling(max_tokens=256))
    except Exception as error:
        failure = classify(error)
        return str(failure.cause), failure.server
    return of_played(played), ""


def of_played(played: Trajectory) -> str:
    if played.end_reason in (EndReason.POLICY_FAILURE, EndReason.ACTION_ERROR):
        return "policy"
    [first, *_] = played.sampled_turns
    assert first.executed is False, played
    return "refused"


def of_exceptions(report: str, example: dict[str, Any]) -> None:
    """An agent ends with this exception after an answer of the policy."""
    kind = {
        "use": "rayloop.envs.agent_env:AgentEnv",
        "with": {"run": f"{__file__}:raising", "alone": False},
    }
    task = Task("t", TASK.messages, extra={"chain": example["chain"]})
    assert outcome(task, kind, ["an answer"]) == (example["becomes"], "")


def raising(chain: list[str]) -> None:
    """The agent: asks the policy, and raises an exception with these names."""
    import builtins
    import json
    import os
    import urllib.request

    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = {"model": "policy", "messages": [{"role": "user", "content": "Play."}]}
    request = urllib.request.Request(
        address,
        json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
    )
    urllib.request.urlopen(request).read()
    base: Any = Exception
    for name in reversed(chain):
        base = getattr(builtins, name, None) or type(name, (base,), {})
    raise base("as the test wants it")


def of_nemo_gym(report: str, example: dict[str, Any]) -> None:
    task = NemoGymRows().task(ROW, "row 1", Path())
    with answering() as (answers, url):
        if "verify" in example:
            answers.by_path["/verify"] = (200, example["verify"])
        else:
            answers.by_path["/get_weather"] = (example["tool"], "no")
        kind = {"use": "rayloop.envs.adapters.nemo_gym:NemoGym", "with": {"url": url}}
        becomes, server = outcome(task, kind, [CALL, "cold"])
    assert becomes == example["becomes"]
    assert server == ("" if becomes in ("refused", "policy") else url)


def of_openenv(report: str, example: dict[str, Any]) -> None:
    from rayloop.envs.adapters.openenv import OpenEnv, OpenEnvSettings
    from tests.support.openenv_server import counting

    with counting() as (counter, url):
        played = OpenEnv(OpenEnvSettings(url=url))
        played.reset(TASK)
        counter.fault = example["error"]
        try:
            becomes = "refused" if played.step('{"by": 1}').error else "played"
        except failures.PolicyFailure:
            becomes = "policy"
        except failures.EnvironmentFailed as error:
            becomes = f"{classify(error).cause} of {classify(error).server}"
        played.close()
    assert becomes.removesuffix(f" of {url}") == example["becomes"]


class CodedError(Exception):
    """As the client raises for an error of JSON-RPC."""

    def __init__(self, code: int) -> None:
        super().__init__("as the test wants it")
        self.code = code


def of_mcp(report: str, example: dict[str, Any]) -> None:
    server = mcp.McpServer(url="http://host:8000/mcp")
    schema = {"type": "object", "properties": {}}
    described = SimpleNamespace(name="look", description="", input_schema=schema)

    def call(*_: Any) -> Any:
        if "code" in example:
            raise CodedError(example["code"])
        part = SimpleNamespace(type="text", text=example["result"])
        return SimpleNamespace(content=[part], structured_content=None, is_error=True)

    class OneTool(mcp.McpTools):
        def tools_for(self, task: Task) -> Any:
            return [
                mcp._Tool(
                    SimpleNamespace(call=call), SimpleNamespace(call_tool=0), described, server
                )
            ]

    played = OneTool(mcp.McpTools.Settings(servers=(server,)))
    played.reset(TASK)
    try:
        step = played.step('<tool_call>{"name": "look", "arguments": {}}</tool_call>')
        becomes = "refused" if step.error else "played"
    except failures.EnvironmentFailed as error:
        becomes = f"{classify(error).cause} of {classify(error).server}"
    assert becomes.removesuffix(f" of {server.url}") == example["becomes"]


def of_verifiers(report: str, example: dict[str, Any]) -> None:
    trace = f"Traceback (most recent call last):\n{example['raised']}\n"
    error = SimpleNamespace(type=report, message="as the test wants it", traceback=trace)
    episode = SimpleNamespace(errors=[error], traces=[])
    with pytest.raises(Exception, match="as the test wants it") as raised:
        verifiers_env._raise_errors(episode)
    names = [kind.__name__ for kind in type(raised.value).__mro__]
    number = raised.value.errno if isinstance(raised.value, OSError) else None
    cause = agent_env._cause([[names, number]])
    assert (cause or "policy") == example["becomes"]


PLAYS: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "exceptions": of_exceptions,
    "nemo_gym": of_nemo_gym,
    "openenv": of_openenv,
    "mcp": of_mcp,
    "verifiers": of_verifiers,
}


def test_each_row_has_an_example_and_a_class() -> None:
    assert {protocol: set(rows) for protocol, rows in ROWS.items()} == {
        protocol: set(examples) for protocol, examples in EXAMPLES.items()
    }
    classes = {REFUSED, "policy", *Cause}
    for rows in ROWS.values():
        for name, why in rows.values():
            assert name in classes
            assert why


@pytest.mark.parametrize(
    ("protocol", "report"),
    [
        pytest.param(protocol, report, marks=package_marks(ADAPTERS.get(protocol, "")))
        for protocol, rows in ROWS.items()
        for report in rows
    ],
)
def test_what_a_report_becomes(protocol: str, report: str) -> None:
    PLAYS[protocol](report, EXAMPLES[protocol][report])
