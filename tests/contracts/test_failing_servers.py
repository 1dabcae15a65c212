"""A failing server of each kind of connector: its episode has no reward, and metric and event say
cause, node and server. A malformed call of the policy to the same connector is scored.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop.actors.environment import classify
from rayloop.core.groups import Unscored
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import Message, RolloutRequest, Sampling, Task, TrajectoryId
from rayloop.envs.adapters.nemo_gym import NemoGymRows
from tests.envs.programs import needs
from tests.support.nemo_gym_server import CALL, ROW, answering
from tests.support.packages import package_marks
from tests.support.played import RESULT, all_scored, episode_settings, play_one
from tests.support.runs import ROOT
from tests.support.stand_ins import Handle, Houses, World

HERE = str(Path(__file__).resolve())
NODE = "gpu-3"
SAMPLING = Sampling(max_tokens=256)
PLAY = Task("t", (Message("user", ("Play.",)),))
ENV = (pytest.mark.env, pytest.mark.timeout(600))
BROWSER = (*ENV, needs("chromium-headless-shell", "bwrap"))


@dataclass(frozen=True)
class Served:
    """An environment, its server and a task. ``breaks`` makes the server fail from then on."""

    kind: dict[str, Any]
    server: str = ""
    task: Task = PLAY
    breaks: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Case:
    """``says``: what the policy says to the failing server. ``malformed``: a call that it scores."""

    served: Callable[[], AbstractContextManager[Served]]
    cause: str
    says: str = "An answer."
    malformed: str = ""
    marks: Sequence[pytest.MarkDecorator] = ()
    reward: str = RESULT


def nothing(trajectory: Any, task: Task, context: Any) -> float:
    """The reward of environments without a result of their own."""
    return 0.0


def closed_port() -> int:
    """A port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def nemo_gym() -> Iterator[Served]:
    with answering() as (answers, url):

        def breaks() -> None:
            masked = {"reward": 0.0, "mask_sample": True, "failure_kind": "session_lost"}
            answers.by_path["/verify"] = (200, masked)

        kind = {"use": "rayloop.envs.adapters.nemo_gym:NemoGym", "with": {"url": url}}
        yield Served(kind, url, NemoGymRows().task(ROW, "row 1", Path()), breaks)


@contextmanager
def openenv() -> Iterator[Served]:
    from tests.support.openenv_server import counting

    with counting() as (counter, url):

        def breaks() -> None:
            counter.fault = "CAPACITY_REACHED"

        kind = {"use": "rayloop.envs.adapters.openenv:OpenEnv", "with": {"url": url}}
        yield Served(kind, url, PLAY, breaks)


@contextmanager
def mcp() -> Iterator[Served]:
    """The server that fails is another one, at an address; the one that works is a program."""
    url = f"http://127.0.0.1:{closed_port()}/mcp"
    server: dict[str, Any] = {
        "command": sys.executable,
        "args": [str(ROOT / "tests/support/hostile_mcp.py")],
    }
    kind: dict[str, Any] = {"use": "rayloop.envs.adapters.mcp:McpTools"}
    kind["with"] = {"servers": [server]}

    def breaks() -> None:
        kind["with"] = {"servers": [{"url": url}]}

    yield Served(kind, url, PLAY, breaks)


def agent_env(function: str, server: str = "") -> Served:
    kind = {
        "use": "rayloop.envs.agent_env:AgentEnv",
        "with": {"run": f"{HERE}:{function}", "alone": False},
    }
    row = {"server": server, "broken": False}
    return Served(kind, server, replace(PLAY, extra=row), lambda: row.update(broken=True))


def asks(row: dict[str, Any]) -> float:
    """An agent that cannot read the policy's answer, or whose search server does not listen."""
    import httpx
    from openai import OpenAI

    messages: Any = [{"role": "user", "content": row["prompt"]}]
    answer = OpenAI().chat.completions.create(model="policy", messages=messages)
    if row["broken"]:
        httpx.get(f"{row['server']}/search?key=secret")
    return float(answer.choices[0].message.content or "")


def plays_a_taskset(row: dict[str, Any]) -> float:
    """The adapter of verifiers behind an episode of that package: a sandbox or an answer broke."""
    from openai import OpenAI

    messages: Any = [{"role": "user", "content": row["prompt"]}]
    OpenAI().chat.completions.create(model="policy", messages=messages)
    boundary = "ProviderError" if row["broken"] else "HarnessError"
    error = SimpleNamespace(type=boundary, message="as the test wants it", traceback="")
    verifiers_env = importlib.import_module("rayloop.envs.agents.verifiers_env")
    verifiers_env._raise_errors(SimpleNamespace(errors=[error], traces=[]))
    return 1.0


@contextmanager
def agent() -> Iterator[Served]:
    yield agent_env("asks", f"http://127.0.0.1:{closed_port()}")


@contextmanager
def verifiers() -> Iterator[Served]:
    """It reports texts, which name no server."""
    yield agent_env("plays_a_taskset")


class Screen:
    """An environment whose machine ends, with the error that the named one raises."""

    lost = ""

    def reset(self, task: Task) -> Observation:
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        if self.lost:
            module, _, name = self.lost.partition(":")
            raise getattr(importlib.import_module(module), name)("its machine has ended")
        return StepResult(None, error="this is not an action")

    def evaluate(self) -> float:
        return 0.0

    def close(self) -> None:
        """Nothing is open."""


def screen(error: str) -> Callable[[], AbstractContextManager[Served]]:
    @contextmanager
    def served() -> Iterator[Served]:
        Screen.lost = ""
        kind = {"use": f"{__name__}:Screen"}
        yield Served(kind, "", PLAY, lambda: setattr(Screen, "lost", error))
        Screen.lost = ""

    return served


@contextmanager
def browser() -> Iterator[Served]:
    host = f"127.0.0.1:{closed_port()}"
    options = {
        "folder": str(ROOT / "tests/support/hostile_page"),
        "sites": [host],
        "browser": {"load_timeout": 15, "launch_timeout": 240},
    }
    kind = {"use": "rayloop.envs.browser.web:WebPage", "with": options}
    row = {"url": "index.html", "check": "false"}
    url = f"http://{host}/"
    yield Served(kind, url, replace(PLAY, extra=row), lambda: row.update(url=f"{url}shop"))


WRONG_CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": 3}}</tool_call>'
CASES = {
    "NeMo Gym": Case(nemo_gym, "lost", CALL, WRONG_CALL),
    "OpenEnv": Case(
        openenv,
        "full",
        '{"by": 1}',
        '{"by": ',
        package_marks("rayloop.envs.adapters.openenv"),
    ),
    "MCP": Case(
        mcp,
        "unreachable",
        "An answer.",
        '<tool_call>{"name": "named", "arguments": {"self": "x"}}</tool_call>',
        package_marks("rayloop.envs.adapters.mcp"),
        f"{__name__}:nothing",
    ),
    "agent": Case(agent, "unreachable", "0.5", "no number"),
    "verifiers": Case(verifiers, "unreachable", "An answer.", "no answer"),
    "desktop": Case(screen("rayloop.envs.desktop.session:DesktopLost"), "lost", "x", "x"),
    "OSWorld": Case(screen("rayloop.envs.osworld.machines:MachineLost"), "lost", "x", "x"),
    "browser": Case(browser, "unreachable", "x", "click(", BROWSER),
}
PARAMETERS = [pytest.param(case, id=name, marks=case.marks) for name, case in CASES.items()]


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_failing_server_is_named_and_its_episode_has_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    with case.served() as served:
        served.breaks()
        settings = episode_settings(served.kind, max_turns=2, step_timeout=300)

        def play() -> Any:
            try:
                return play_one(served.task, lambda _: case.says, settings, SAMPLING)
            except Exception as error:
                return classify(error)

        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            return await asyncio.to_thread(play)

        async def run() -> Any:
            player = await world.player()
            request = RolloutRequest(served.task, TrajectoryId(1, 0), 0, 1, SAMPLING)
            return await player.rollout_group([request], 1)

        world = World(
            tmp_path, monkeypatch, behave, Houses(NODE), environment__attempts=1, recovery={}
        )
        [member] = asyncio.run(run())

    assert isinstance(member.outcome, Unscored), member
    host = served.server.partition("//")[2].partition("/")[0]
    lost = {"lost/episodes": 1.0, f"lost/cause/{case.cause}": 1.0, f"lost/node/{NODE}": 1.0}
    if host:
        lost[f"lost/server/{host}"] = 1.0
    assert world.history.lost_episodes.take() == lost, world.events
    [event] = world.named("episode_failed")
    named = {"cause": event["cause"], "node": event["node"], "server": event["server"]}
    assert named == {"cause": case.cause, "node": NODE, "server": served.server}


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_malformed_call_is_scored(case: Case) -> None:
    with case.served() as served:
        settings = episode_settings(served.kind, max_turns=2, step_timeout=300)
        paid = all_scored(
            served.task, [case.malformed, case.malformed], settings, SAMPLING, case.reward
        )
    assert {one.value for one in paid} <= {0.0, 1.0}
