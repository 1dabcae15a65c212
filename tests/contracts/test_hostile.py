"""What the policy broke is always scored: hostile texts, calls, moves, code and pictures against
everything that is shipped.

Environments, tools, rewards and agent hosts are found by walking the packages and the menu: one
that is new and has no case here fails ``test_everything_that_is_shipped_has_a_case``. Every episode
must end scored: none is left out, and nothing raises.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import rayloop.envs
import rayloop.recipes
from rayloop.actors.reward import RewardActor
from rayloop.config.settings import Component, SettingsModel
from rayloop.core import failures
from rayloop.core.groups import Scored
from rayloop.core.protocols import Observation, StepResult, ToolResult
from rayloop.core.types import (
    EndReason,
    ImageSource,
    Message,
    Sampling,
    Task,
    Trajectory,
    TrajectoryId,
)
from rayloop.envs import episode, tools
from rayloop.rewards.settings import RewardSettings
from tests.envs.programs import needs
from tests.support import hostile_turns as hostile
from tests.support.judge_stub import JudgeStub
from tests.support.nemo_gym_server import ROW as WEATHER
from tests.support.nemo_gym_server import answering
from tests.support.packages import package_marks
from tests.support.pictures import picture
from tests.support.played import MODEL, RESULT, Paid, all_scored, episode_settings
from tests.support.reward_cases import CASES as REWARDS
from tests.support.reward_cases import RewardCase, judged
from tests.support.reward_cases import stub as stub
from tests.support.runs import ROOT
from tests.support.spiteful import serving
from tools.pages.config import COMPONENTS

HERE = __name__
TURNS = 6
"""Of an episode: enough to go on after an error, and then to break what is left."""


def nothing(trajectory: Trajectory, task: Task, context: Any) -> float:
    """The reward of environments without a result of their own."""
    return 0.0


@dataclass(frozen=True)
class Case:
    """An environment, and what a policy says to it beside ``hostile.texts``.

    ``served``: gives settings that need a server.
    """

    use: str
    says: Callable[[], Sequence[str]] = hostile.moves
    options: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    result: bool = True
    marks: tuple[pytest.MarkDecorator, ...] = ()
    served: Callable[[], AbstractContextManager[dict[str, Any]]] | None = None
    mixtures: int = 60
    each: int = 1
    """Only every so many of the texts that call nothing: each ends an episode, and the environment
    may start slowly.
    """
    timeout: float = 60.0
    raises: bool = True
    """Whether some of the texts make it raise, so that the rule decides; others answer each error
    themselves, or have none.
    """

    @property
    def name(self) -> str:
        return self.use.rpartition(":")[2]


def tools_of(use: str, **options: Any) -> Callable[[], Sequence[str]]:
    """Hostile calls of the tools that an environment offers."""

    def made() -> Sequence[str]:
        environment = Component.model_validate({"use": use, "with": options}).build()
        environment.reset(task({}))
        try:
            checked = environment._tools.values()
            return hostile.calls(
                [
                    {"function": {"name": tool.name, "parameters": dict(tool.parameters)}}
                    for tool in checked
                ]
            )
        finally:
            environment.close()

    return made


def published_tools() -> Sequence[str]:
    box = {
        "type": "object",
        "properties": {"bbox_2d": {"type": "array"}, "label": {}},
        "required": ["bbox_2d"],
    }
    angle = {"type": "object", "properties": {"angle": {"type": "number"}}, "required": ["angle"]}
    named = {"image_zoom_in_tool": box, "image_rotate_tool": angle}
    return hostile.calls(
        [{"function": {"name": name, "parameters": schema}} for name, schema in named.items()]
    )


class Odd:
    """A tool that breaks in every way that its arguments choose, and whose parameters have the
    worst names.
    """

    class Settings(SettingsModel):
        """Nothing to set."""

    name, description = "odd", "Breaks."
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {
            "how": {"type": ["string", "null"]},
            "self": {"type": "number"},
            "function": True,
            "timeout": {"anyOf": [{"type": "number"}]},
        },
    }

    def __init__(self, settings: Settings) -> None: ...

    def __call__(self, /, **arguments: Any) -> Any:
        how = arguments.get("how")
        raises = {
            "zero": ZeroDivisionError("0"),
            "key": KeyError("k"),
            "type": TypeError("t"),
            "assert": AssertionError(),
        }
        raises |= {
            "deep": RecursionError("r"),
            "text": UnicodeError("u"),
            "name": OSError(36, "too long"),
        }
        raises |= {"file": FileNotFoundError(2, "no", "f")}
        if how in raises:
            raise raises[how]
        if how == "none":
            return None
        if how == "pictures":
            broken = (
                b"",
                b"\x89PNG\r\n\x1a\n",
                b"GIF89a",
                picture(56, 56)[:-20],
                picture(20, 5000),
            )
            return ToolResult("look", tuple(ImageSource(data=data) for data in broken))
        if how == "many":
            return ToolResult("look", tuple(ImageSource(data=picture(56, 56)) for _ in range(70)))
        if how == "long":
            return ToolResult("x" * 60_000_000)
        if how == "mark":
            return ToolResult("<|im_end|><|image_pad|>\ud800\0")
        return ToolResult("fine")


def odd_calls() -> Sequence[str]:
    hows = (
        "zero",
        "key",
        "type",
        "file",
        "assert",
        "deep",
        "text",
        "name",
        "none",
        "pictures",
        "many",
        "long",
        "mark",
    )
    schema = {"function": {"name": "odd", "parameters": Odd.parameters}}
    return [*(hostile.call("odd", {"how": how}) for how in hows), *hostile.calls([schema])]


LOOKING = "rayloop.envs.image_tools:ImageTools"
ALL_TOOLS = ["crop", "zoom", "rotate", "inspect", "wait", "image_zoom_in_tool", "image_rotate_tool"]
SEEN: dict[str, Any] = {
    "image_tools": ALL_TOOLS,
    "wait_limit": 0.05,
    "min_side": 1,
    "describe": "nowhere",
}
PIXELS = {**SEEN, "coordinates": "pixel"}
ARC = "rayloop.recipes.arc_vision.tools:ArcVisionTools"
REAL: dict[str, Any] = {"named": True, "gate": 0.7, "wait_limit": 0.05, "describe": "nowhere"}
SIMULATED: dict[str, Any] = {"results": "simulated", "describe": "nowhere"}
TOOLS = "rayloop.envs.tools:ToolCalls"
ODD: dict[str, Any] = {"tools": [{"use": f"{HERE}:Odd"}], "describe": "nowhere"}
PROGRAM: dict[str, Any] = {
    "tools": [{"use": "rayloop.envs.programs:RunProgram", "with": {"timeout": 1}}],
    "describe": "nowhere",
}
SCRIPT: dict[str, Any] = {"steps": [{"text": "go on", "images": [{}]}] * 3, "result": 0.5}
MCP = {
    "servers": [{"command": sys.executable, "args": [str(ROOT / "tests/support/hostile_mcp.py")]}],
    "describe": "nowhere",
}
ARENA = "rayloop.envs.adapters.textarena:TextArena"
GYM = "rayloop.envs.adapters.gymnasium:Gymnasium"
TOY = {
    "id": "rayloop/Spiteful-v0",
    "imports": ["tests.support.spiteful"],
    "act": "tests.support.spiteful:act",
    "image": "none",
    "describe": "tests.support.spiteful:describe",
}
LAKE = {"id": "FrozenLake-v1", "image": "none", "describe": "tests.support.spiteful:describe"}


@contextmanager
def openenv(**options: Any) -> Iterator[dict[str, Any]]:
    with serving() as url:
        yield {"url": url, "image": "screen", **options}


@contextmanager
def nemo_gym(**options: Any) -> Iterator[dict[str, Any]]:
    with answering() as (_, url):
        yield {"url": url, "describe": "nowhere", **options}


def package(name: str) -> tuple[pytest.MarkDecorator, ...]:
    missing = importlib.util.find_spec(name) is None
    lacking = pytest.mark.skipif(missing, reason=f"{name}: make test-adapters installs it")
    return (pytest.mark.adapters, pytest.mark.timeout(280), lacking)


ENV = (pytest.mark.env, pytest.mark.timeout(600))
HOSTILE_PAGE = str(ROOT / "tests/support/hostile_page")
SLOW_MACHINE = {"action_timeout": 30.0}
"""Seconds for a turn's actions: a slow machine is not what these tests look for."""
SCREEN = "bwrap", "Xvfb", "openbox", "xterm", "mousepad", "pcmanfm"
ENVIRONMENTS = [
    Case("rayloop.envs.single_turn:SingleTurn", result=False, raises=False),
    Case("rayloop.envs.scripted:ScriptedTool", options=SCRIPT, raises=False),
    Case(TOOLS, odd_calls, ODD, result=False),
    Case(LOOKING, tools_of(LOOKING, **SEEN), SEEN, result=False),
    Case(LOOKING, tools_of(LOOKING, **PIXELS), PIXELS, result=False),
    Case(ARC, tools_of(ARC, **REAL), REAL, result=False),
    Case(ARC, tools_of(ARC, **SIMULATED), SIMULATED, result=False, raises=False),
    Case(
        "rayloop.recipes.pyvision.toolbox:VisualToolBoxV2",
        published_tools,
        result=False,
        raises=False,
    ),
    Case(
        TOOLS,
        tools_of(TOOLS, **PROGRAM),
        PROGRAM,
        result=False,
        marks=(*ENV, needs("bwrap")),
        each=5,
    ),
    Case(
        "rayloop.envs.interpreter.environment:PythonInterpreter",
        hostile.codes,
        marks=ENV,
        each=3,
        raises=False,
    ),
    Case(
        "rayloop.envs.interpreter.environment:PythonInterpreter",
        hostile.codes,
        {"on_error": "stop", "instruct": False, "wording": "pyvision_gym_w_image_hint"},
        marks=ENV,
        each=20,
        raises=False,
    ),
    Case(
        "rayloop.envs.browser.miniwob:MiniWob",
        options={"browser": SLOW_MACHINE},
        extra={"page": "click-test", "seed": 1},
        each=5,
        raises=False,
        marks=(*ENV, needs("chromium-headless-shell", "bwrap")),
    ),
    Case(
        "rayloop.envs.browser.web:WebPage",
        options={"folder": HOSTILE_PAGE, "browser": SLOW_MACHINE},
        each=5,
        raises=False,
        extra={"url": "index.html", "check": "false"},
        marks=(*ENV, needs("chromium-headless-shell", "bwrap")),
    ),
    Case(
        "rayloop.envs.browser.web:WebPage",
        options={
            "folder": HOSTILE_PAGE,
            "browser": SLOW_MACHINE,
            "device": "phone",
            "scale": 1,
        },
        each=5,
        raises=False,
        extra={"url": "index.html", "check": "false"},
        marks=(*ENV, needs("chromium-headless-shell", "bwrap")),
    ),
    Case(
        "rayloop.envs.browser.phone:Phone",
        lambda: [*hostile.moves()[::3], *hostile.phone_calls()],
        options={"language": "mobilegym", "browser": SLOW_MACHINE, "scale": 1},
        each=5,
        raises=False,
        extra={"phone": "set-alarm", "seed": 1},
        marks=(*ENV, needs("chromium-headless-shell", "bwrap")),
    ),
    Case(
        "rayloop.envs.desktop.environment:DesktopTasks",
        extra={"desktop": "sort-lines"},
        each=20,
        raises=False,
        marks=(*ENV, needs(*SCREEN)),
    ),
    Case(GYM, options=TOY, marks=package("gymnasium")),
    Case(GYM, options=LAKE, marks=package("gymnasium"), raises=False),
    Case(ARENA, options={"id": "GuessTheNumber-v0"}, extra={"seed": 1}, marks=package("textarena")),
    Case(
        "rayloop.envs.adapters.mcp:McpTools",
        lambda: mcp_calls(),
        MCP,
        result=False,
        marks=package("mcp"),
        each=20,
    ),
    Case(
        "rayloop.envs.adapters.nemo_gym:NemoGym",
        lambda: weather_calls(),
        served=nemo_gym,
        extra=WEATHER,
    ),
    Case("rayloop.envs.adapters.openenv:OpenEnv", served=openenv, marks=package("websockets")),
]
ELSEWHERE = {
    "rayloop.envs.agent_env:AgentEnv": (
        "test_an_agent_that_an_answer_breaks_is_scored, and published agents in tests/adapters"
    ),
    "rayloop.envs.osworld.environment:OSWorld": "test_osworld_is_scored_whatever_the_policy_writes",
    "rayloop.envs.browser.mobilegym:MobileGym": "tests/envs/test_mobilegym.py, with a stand-in",
    "rayloop.envs.adapters.android:Android": "tests/unit/envs/test_android.py, with a stand-in for adb",
}
"""Environments that are played by another test here."""


def weather_calls() -> Sequence[str]:
    [schema] = WEATHER["responses_create_params"]["tools"]
    return hostile.calls([{"function": schema}])


def mcp_calls() -> Sequence[str]:
    numbers = {
        "self": {"type": "integer"},
        "cls": {"type": "string"},
        "function": {},
        "timeout": {},
    }
    named = {
        "name": "named",
        "parameters": {"type": "object", "properties": numbers, "required": ["self"]},
    }
    raised = [hostile.call("raises", {"kind": kind}) for kind in ("value", "key", "file", "other")]
    return [hostile.call("parts", {}), *raised, *hostile.calls([{"function": named}])[::6]]


def task(extra: dict[str, Any]) -> Task:
    return Task(
        "t",
        (Message("user", ("Look.", ImageSource(data=picture(112, 84)))),),
        ground_truth="5",
        extra=extra,
    )


def played(case: Case, options: dict[str, Any], texts: Sequence[str]) -> list[Paid]:
    kind = {"use": case.use, "with": options}
    settings = episode_settings(
        kind,
        max_turns=TURNS,
        max_tokens=200_000,
        max_prompt_tokens=100_000,
        step_timeout=case.timeout,
    )
    reward = RESULT if case.result else f"{HERE}:nothing"
    return all_scored(task(case.extra), texts, settings, Sampling(max_tokens=200_000), reward)


def summary(name: str, texts: Sequence[str], paid: Sequence[Paid]) -> str:
    ends = Counter(str(one.end) for one in paid)
    return f"\n{name}: {len(texts)} texts in {len(paid)} episodes, every one scored: {dict(ends)}"


def parameters(cases: Sequence[Case]) -> list[Any]:
    return [
        pytest.param(case, id=f"{case.name}-{ENVIRONMENTS.index(case)}", marks=case.marks)
        for case in cases
    ]


@pytest.mark.parametrize("case", parameters(ENVIRONMENTS))
def test_every_episode_ends_scored(
    case: Case, record_property: Callable[[str, object], None]
) -> None:
    with case.served() if case.served else nullcontext(case.options) as options:
        texts = [*case.says(), *hostile.texts(case.mixtures)[:: case.each]]
        paid = played(case, options, texts)
    record_property("texts", len(texts))
    record_property("episodes", len(paid))
    print(summary(case.name, texts, paid))
    assert len(texts) >= 20


class Uncaught(Exception):
    """Nothing raises it."""


def raising_instead(call: Callable[..., ToolResult]) -> Callable[..., ToolResult]:
    """The call of a tool, whose ToolError becomes another error."""

    def raising(checked: Any, arguments: Any) -> ToolResult:
        try:
            return call(checked, arguments)
        except tools.ToolError as error:
            raise RuntimeError(str(error)) from None

    return raising


@pytest.mark.parametrize("case", parameters([case for case in ENVIRONMENTS if case.raises]))
def test_a_break_of_the_rule_is_seen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing that the policy broke counts as its own, hostile texts leave an episode out:
    they reach what can break.
    """
    monkeypatch.setattr(failures, "MACHINES", failures.MACHINES | {"Exception"})
    monkeypatch.setattr(episode, "PolicyFailure", Uncaught)
    monkeypatch.setattr(tools._Checked, "__call__", raising_instead(tools._Checked.__call__))
    with case.served() if case.served else nullcontext(case.options) as options:
        texts = [*case.says(), *hostile.texts(case.mixtures)[:: case.each]]
        with pytest.raises(AssertionError, match="left out"):
            played(case, options, texts)


class Fragile:
    """Raises on a text, or has no result for another: what no environment of ours may do."""

    class Settings(SettingsModel):
        """Nothing to set."""

    def __init__(self, settings: Settings) -> None:
        self._text = ""

    def reset(self, task: Task) -> Observation:
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        if text == "break":
            raise KeyError(text)
        self._text = text
        return StepResult(done=True)

    def evaluate(self) -> float | None:
        return None if self._text == "no result" else 1.0

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("break", "left out: EnvironmentFailed: Fragile.step of task t raised KeyError"),
        ("no result", "unscored: Unscored"),
    ],
)
def test_an_episode_without_a_score_is_seen(text: str, said: str) -> None:
    case = Case(f"{HERE}:Fragile")
    assert [one.value for one in played(case, {}, ["fine", "good"])] == [1.0, 1.0]
    with pytest.raises(AssertionError, match=said):
        played(case, {}, ["fine", text, "good"])


# Everything that is shipped -----------------------------------------------------------------------


ABSTRACT = {"rayloop.envs.browser.page:PageEnvironment"}
"""Bases of environments, which name no environment."""


INSIDE = "rayloop.envs.desktop.inside."
"""Modules that only the programs within a desktop import."""


def classes() -> Iterator[tuple[str, type]]:
    """Every public class that a module of the environments and the recipes defines."""
    for package in (rayloop.envs, rayloop.recipes):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.startswith(INSIDE):
                continue
            module = importlib.import_module(found.name)
            for name, cls in vars(module).items():
                if (
                    isinstance(cls, type)
                    and cls.__module__ == found.name
                    and not name.startswith("_")
                ):
                    yield f"{found.name}:{name}", cls


def is_environment(cls: type) -> bool:
    methods = (
        ("reset", "run_agent", "close")
        if getattr(cls, "agent_driven", False) is True
        else ("reset", "step", "evaluate", "close")
    )
    return all(inspect.isfunction(getattr(cls, name, None)) for name in methods)


def is_tool(cls: type) -> bool:
    return inspect.isfunction(cls.__call__) and all(
        hasattr(cls, name) for name in ("name", "description", "parameters")
    )


def test_everything_that_is_shipped_has_a_case() -> None:
    menu = {title: set(uses) for (title, _), uses in COMPONENTS.items()}
    found = list(classes())
    environments = {
        use for use, cls in found if is_environment(cls) and not getattr(cls, "_is_protocol", False)
    } - ABSTRACT
    assert {use for use in environments if "VisualToolBoxV2" in use}, (
        "the walk finds what is in no menu, too"
    )
    played = {case.use for case in ENVIRONMENTS} | set(ELSEWHERE)
    assert (environments | menu["Environments"]) - played == set()
    tools = {use for use, cls in found if is_tool(cls)} | menu["Tools"]
    said = repr([case.options for case in ENVIRONMENTS])
    assert {use for use in tools if use not in said} == set()
    assert menu["Rewards"] <= {case.use for case in REWARDS}
    agents = {found.name for found in pkgutil.iter_modules([str(ROOT / "rayloop/envs/agents")])} - {
        "endpoint",
        "host",
        "namespaces",
        "raised",
        "session",
    }
    for agent in agents:
        suites = (ROOT / "tests/adapters").glob(f"test_{agent.removesuffix('_env')}*.py")
        assert any("hostile" in suite.read_text(encoding="utf-8") for suite in suites), (
            f"no hostile texts are played against {agent}"
        )


# Rewards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case.use.split(':')[1]}-{i}", marks=package_marks(case.use))
        for i, case in enumerate(REWARDS)
    ],
)
def test_every_answer_has_a_reward(case: RewardCase, stub: JudgeStub) -> None:
    if case.use.startswith("tests."):
        pytest.skip("it is not shipped")
    answers: list[Any] = [0.0, -1.5, 1e300] if isinstance(case.right, float) else hostile.texts()
    for outcome in judged(case, stub, *answers):
        assert isinstance(outcome, Scored), outcome
        assert math.isfinite(outcome.value)
        assert abs(outcome.value) < 1e6 or isinstance(case.right, float)


@pytest.mark.parametrize(
    "end",
    [EndReason.MAX_TURNS, EndReason.OVER_LENGTH, EndReason.MAX_IMAGES, EndReason.ACTION_ERROR],
)
def test_an_episode_that_a_limit_ended_without_a_result_is_paid_nothing(end: EndReason) -> None:
    source = Component(use=RESULT).build()
    ended = Trajectory(TrajectoryId(1, 0), 0, "t", 0, (), Sampling(), end)
    assert source.score(ended, task({}), None) == Scored(0.0, flags=("no_result",))


def test_what_the_policy_broke_has_the_failing_value_and_no_grader() -> None:
    for end in (EndReason.TOOL_DEADLINE, EndReason.POLICY_FAILURE):
        actor = RewardActor(
            MODEL, RewardSettings(source=Component(use=f"{HERE}:refusing"), on_error=-2.0)
        )
        ended = Trajectory(TrajectoryId(1, 0), 0, "t", 0, (), Sampling(), end)
        assert asyncio.run(actor.score_together([ended], task({}), 1)) == [
            Scored(-2.0, flags=(str(end),))
        ]


def refusing(trajectory: Trajectory, task: Task, context: Any) -> float:
    raise AssertionError("it was asked")


# Agents -------------------------------------------------------------------------------------------

AGENTS = {
    "as people write them": (
        """
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)
            said = str(numbers["a"] + numbers["b"])
    """
    ),
    "strict": (
        """
        for call in message.tool_calls:
            assert call.function.name == "add"
            numbers = Numbers(**json.loads(call.function.arguments))
            said = str(numbers.a / numbers.b)
    """
    ),
}
AGENT = """
import json, os
from dataclasses import dataclass
from openai import OpenAI

ADD = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": ADD}}]

@dataclass
class Numbers:
    a: float
    b: float

def play(messages):
    client, messages = OpenAI(max_retries=0), list(messages)
    while True:
        message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(message.content[-1])
CALLS
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
"""
"""It ends on calls that it did not foresee, on an empty answer, and on one that does not end with a
digit.
"""


@pytest.mark.parametrize("style", AGENTS)
def test_an_agent_that_an_answer_breaks_is_scored(style: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(AGENT.replace("CALLS", AGENTS[style].strip("\n")), encoding="utf-8")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    }
    added = hostile.calls([{"function": {"name": "add", "parameters": schema}}])
    options = {"run": f"{file}:play", "preload": ["openai"], "deadline": 60, "on_error": -1.0}
    good = [hostile.call("add", {"a": 2, "b": 4}), "It is 5"]
    texts = [*good, *added[::7], *hostile.texts(8)[::11]]
    paid = played(Case("rayloop.envs.agent_env:AgentEnv"), options, texts)
    print(summary(f"AgentEnv, {style}", texts, paid))
    assert paid[0] == Paid(EndReason.DONE, 5.0), "it plays where nothing breaks it"
    broken = [one.value for one in paid if one.end is EndReason.ACTION_ERROR]
    assert broken, "some of them do break it"
    assert set(broken) == {-1.0}


# OSWorld, with a stand-in for its machines --------------------------------------------------------


OSWORLD_ENDS = {
    "corrected": {EndReason.MAX_TURNS, EndReason.DONE},
    "original": {EndReason.MAX_TURNS, EndReason.DONE, EndReason.ACTION_ERROR},
}
"""By the variant: the published code ends an episode with a text that it cannot read, ours shows
the error to the policy.
"""


@pytest.mark.env
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", OSWORLD_ENDS)
def test_osworld_is_scored_whatever_the_policy_writes(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayloop.envs.osworld.environment import OSWorld
    from rayloop.envs.osworld.machines import machines_of

    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support/osworld_stand_in"))
    config = {
        "id": "t",
        "instruction": "Open it.",
        "config": [],
        "evaluator": {"func": "f"},
        "stand_in": {},
    }
    options = {"python": sys.executable, "cache": str(tmp_path), "pause": 0.0, "variant": variant}
    case = Case("rayloop.envs.osworld.environment:OSWorld", extra={"osworld": config})
    each = {"corrected": 1, "original": 4}[
        variant
    ]  # where a text that cannot be read ends its episode, there are many more
    texts = list(
        dict.fromkeys(
            [*hostile.screen_calls(), *hostile.moves()[::each], *hostile.texts(20)[::each]]
        )
    )
    try:
        paid = played(case, options, texts)
    finally:
        machines_of(OSWorld.Settings.model_validate(options)).end()
    print(summary(f"OSWorld, {variant}", texts, paid))
    assert {one.end for one in paid} == OSWORLD_ENDS[variant]
