"""Environments that are slow, hang or are of several kinds: nobody waits for another one, in the
environment actor itself.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rayloop.actors.environment import EnvironmentActor
from rayloop.actors.lease import Lease
from rayloop.config.model import ModelSettings
from rayloop.config.settings import SettingsModel
from rayloop.core.failures import Cause, Failure
from rayloop.core.groups import Unscored, UnscoredKind
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import (
    Completion,
    FinishReason,
    Message,
    RolloutRequest,
    Sampling,
    Summary,
    Task,
    TokenPrompt,
    TrajectoryId,
    Version,
)
from rayloop.envs.settings import EnvironmentKind, EpisodeSettings

HERE = __name__
MODEL = ModelSettings(path=str(Path(__file__).parents[3] / "recipes/arc_vision/loose"))


class Remote:
    def __init__(self, function: Any) -> None:
        self.remote = function


class Engine:
    """Answers at once; keeps the number of tokens of each prompt."""

    def __init__(self) -> None:
        self.prompts: list[TokenPrompt] = []
        self.generate, self.leave = Remote(self._generate), Remote(lambda cohort: None)

    async def _generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        self.prompts.append(prompt)
        return Completion((sampling.end_tokens[0],), (-0.1,), FinishReason.END_TOKEN, Version(0, 0))


class Waits:
    """The first that is made stays in its first ``step`` until the test lets it go; ``reset`` fails
    as often as the row says.
    """

    class Settings(SettingsModel):
        hold: bool = False
        """Whether one of them is held."""

    let_go = threading.Event()
    made = itertools.count()
    resets = 0

    def __init__(self, settings: Waits.Settings) -> None:
        self._held = settings.hold and next(Waits.made) == 0

    def reset(self, task: Task) -> Observation:
        Waits.resets += 1
        if Waits.resets <= task.extra.get("failures", 0):
            raise OSError(f"attempt {Waits.resets}: the machine is not there")
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        if self._held:
            Waits.let_go.wait(20)
            self._held = False
        return StepResult(Observation((Message("user", ("more",)),)))

    def evaluate(self) -> float:
        return 1.0

    def close(self) -> None: ...


class Counts(Waits):
    """Another kind: its result is another one."""

    def evaluate(self) -> float:
        return 2.0


@pytest.fixture(autouse=True)
def anew() -> None:
    Waits.let_go.clear()
    Waits.made, Waits.resets = itertools.count(), 0


def actor(
    environment: dict[str, Any],
    kinds: dict[str, Any] | None = None,
    at_once: int | None = None,
    timeout: float = 60.0,
    **settings: Any,
) -> EnvironmentActor:
    chosen = {"environment": environment, "max_turns": 3, **settings}
    each = {name: EnvironmentKind.model_validate(kind) for name, kind in (kinds or {}).items()}
    return EnvironmentActor(
        MODEL, EpisodeSettings.model_validate(chosen), each, timeout=timeout, at_once=at_once
    )


def requests(
    count: int, environment: str = "", attempt: int = 0, **extra: Any
) -> list[RolloutRequest]:
    task = Task("t", (Message("user", ("Go.",)),), extra=extra, environment=environment)
    return [
        RolloutRequest(task, TrajectoryId(1, n), attempt, n, Sampling(max_tokens=4))
        for n in range(count)
    ]


async def played(
    made: EnvironmentActor, asked: list[RolloutRequest], engine: Engine
) -> list[Summary | Failure]:
    results, *_ = await made.run_episodes(asked, Lease(1, engine), None)  # type: ignore[arg-type]
    return list(results)


def test_no_member_of_a_group_waits_for_another_between_turns() -> None:
    """Three of four have their three turns while the fourth is still in its first step."""

    async def run() -> tuple[int, list[Summary | Failure]]:
        engine = Engine()
        playing = asyncio.create_task(
            played(actor({"use": f"{HERE}:Waits", "with": {"hold": True}}), requests(4), engine)
        )
        until = time.monotonic() + 15
        while len(engine.prompts) < 1 + 3 * 3 and time.monotonic() < until:
            await asyncio.sleep(0.01)
        seen = len(engine.prompts)
        Waits.let_go.set()
        return seen, await playing

    seen, results = asyncio.run(run())
    assert seen == 1 + 3 * 3, "the others asked for all of their turns"
    assert [one.turns for one in results if isinstance(one, Summary)] == [3] * 4


def test_no_more_episodes_are_played_at_once_than_were_allowed() -> None:
    """One of four is held in its first step: only one of the others may be played beside it."""

    async def run(at_once: int) -> tuple[int, list[Summary | Failure]]:
        engine = Engine()
        held = actor({"use": f"{HERE}:Waits", "with": {"hold": True}}, at_once=at_once)
        playing = asyncio.create_task(played(held, requests(4), engine))
        await asyncio.sleep(0.3)
        seen = len(engine.prompts)
        Waits.let_go.set()
        return seen, await playing

    seen, results = asyncio.run(run(at_once=1))
    assert seen == 1, "three wait for the one that is held"
    assert [one.turns for one in results if isinstance(one, Summary)] == [3] * 4


def test_the_wait_for_room_is_no_time_of_the_episode() -> None:
    """The first one hangs until its deadline; the others get room then, and have all of their time."""

    async def run() -> list[Summary | Failure]:
        environment = {"use": f"{HERE}:Waits", "with": {"hold": True}}
        return await played(actor(environment, at_once=1, timeout=5.0), requests(3), Engine())

    try:
        hung, *others = asyncio.run(run())
    finally:
        Waits.let_go.set()
    assert isinstance(hung, Failure)
    assert hung.cause is Cause.HUNG
    assert [type(one) for one in others] == [Summary, Summary]


def test_a_reset_that_fails_eight_times_is_never_a_reward_and_the_ninth_is_an_episode() -> None:
    async def run() -> list[Summary | Failure]:
        made, engine = actor({"use": f"{HERE}:Waits"}), Engine()
        return [
            (await played(made, requests(1, attempt=n, failures=8), engine))[0] for n in range(9)
        ]

    *failed, last = asyncio.run(run())
    for number, one in enumerate(failed, 1):
        assert isinstance(one, Failure)
        assert (Unscored.of(one).kind, one.of_actor, one.cause is Cause.BUG) == (
            UnscoredKind.ENVIRONMENT_FAILURE,
            True,
            False,
        )
        assert f"attempt {number}: the machine is not there" in one.why
    assert isinstance(last, Summary)
    assert last.env_result == 1.0


def test_three_kinds_are_played_in_one_actor_each_with_its_own_result() -> None:
    async def run() -> list[list[Summary | Failure]]:
        kinds = {
            "counts": {"use": f"{HERE}:Counts"},
            "talk": {"use": "rayloop.envs.single_turn:SingleTurn"},
        }
        made, engine = actor({"use": f"{HERE}:Waits"}, kinds), Engine()
        return list(
            await asyncio.gather(
                *(played(made, requests(2, kind), engine) for kind in ("", "counts", "talk"))
            )
        )

    results = [[one for one in group if isinstance(one, Summary)] for group in asyncio.run(run())]
    assert [[one.env_result for one in group] for group in results] == [
        [1.0] * 2,
        [2.0] * 2,
        [None] * 2,
    ]
    assert [[one.turns for one in group] for group in results] == [[3] * 2, [3] * 2, [1] * 2]


def test_a_step_that_hangs_is_the_environments_failure_and_the_others_end() -> None:
    async def run() -> tuple[float, list[Summary | Failure]]:
        began = time.monotonic()
        made = actor({"use": f"{HERE}:Waits", "with": {"hold": True}}, step_timeout=0.5)
        results = await played(made, requests(4), Engine())
        Waits.let_go.set()
        return time.monotonic() - began, results

    seconds, results = asyncio.run(run())
    hung = [one for one in results if isinstance(one, Failure)]
    assert [(one.cause is Cause.HUNG, Unscored.of(one).kind) for one in hung] == [
        (True, UnscoredKind.ENVIRONMENT_FAILURE)
    ]
    assert len(results) - len(hung) == 3
    assert seconds < 10
