"""What each report of another program becomes: each row of rayloop/core/failures.yaml has an
example in reports.yaml, which is played through the adapter of its protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml

from rayloop.actors.environment import classify
from rayloop.core import failures
from rayloop.core.failures import Cause
from rayloop.core.protocols import StepResult
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
"""Protocol -> its adapter, where that needs a published package."""
TASK = Task("t", (Message("user", ("Play.",)),))


class Became(NamedTuple):
    """What a report became: ``refused``, ``policy`` or a cause.

    ``named``: the server that the failure names; ``server``: the one that reported.
    """

    outcome: str
    named: str = ""
    server: str = ""


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


def of_exceptions(report: str, example: dict[str, Any]) -> Became:
    """An agent ends with this exception after an answer of the policy."""
    kind = {
        "use": "rayloop.envs.agent_env:AgentEnv",
        "with": {"run": f"{__file__}:raising", "alone": False},
    }
    task = Task("t", TASK.messages, extra={"chain": example["chain"]})
    return Became(*outcome(task, kind, ["an answer"]))


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


def of_nemo_gym(report: str, example: dict[str, Any]) -> Became:
    task = NemoGymRows().task(ROW, "row 1", Path())
    with answering() as (answers, url):
        if "verify" in example:
            answers.by_path["/verify"] = (200, example["verify"])
        else:
            answers.by_path["/get_weather"] = (example["tool"], "no")
        kind = {"use": "rayloop.envs.adapters.nemo_gym:NemoGym", "with": {"url": url}}
        return Became(*outcome(task, kind, [CALL, "cold"]), url)


def of_openenv(report: str, example: dict[str, Any]) -> Became:
    from rayloop.envs.adapters.openenv import OpenEnv, OpenEnvSettings
    from tests.support.openenv_server import counting

    with counting() as (counter, url):
        played = OpenEnv(OpenEnvSettings(url=url))
        played.reset(TASK)
        counter.fault = example["error"]
        try:
            return stepped(lambda: played.step('{"by": 1}'), url)
        finally:
            played.close()


def stepped(step: Callable[[], StepResult], server: str) -> Became:
    """What the step of an environment that asks ``server`` became."""
    try:
        return Became("refused" if step().error else "played", "", server)
    except failures.PolicyFailure:
        return Became("policy", "", server)
    except failures.EnvironmentFailed as error:
        failure = classify(error)
        return Became(str(failure.cause), failure.server, server)


class CodedError(Exception):
    """As the client raises for an error of JSON-RPC."""

    def __init__(self, code: int) -> None:
        super().__init__("as the test wants it")
        self.code = code


def of_mcp(report: str, example: dict[str, Any]) -> Became:
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
    call_text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    return stepped(lambda: played.step(call_text), server.url)


def of_verifiers(report: str, example: dict[str, Any]) -> Became:
    trace = f"Traceback (most recent call last):\n{example['raised']}\n"
    error = SimpleNamespace(type=report, message="as the test wants it", traceback=trace)
    episode = SimpleNamespace(errors=[error], traces=[])
    with pytest.raises(Exception, match="as the test wants it") as raised:
        verifiers_env._raise_errors(episode)
    names = [kind.__name__ for kind in type(raised.value).__mro__]
    number = raised.value.errno if isinstance(raised.value, OSError) else None
    cause = agent_env._cause({"raised": [[names, number]], "cause": ""})
    return Became(str(cause or "policy"))


PLAYS: dict[str, Callable[[str, dict[str, Any]], Became]] = {
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
    example = EXAMPLES[protocol][report]
    became = PLAYS[protocol](report, example)
    assert became.outcome == example["becomes"]
    blames_server = became.outcome not in (REFUSED, "policy")
    assert became.named == (became.server if blames_server else "")
