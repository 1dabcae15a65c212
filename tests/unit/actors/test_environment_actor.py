"""The environment actor, called directly: failures as values, and generation that outlives a lost engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from actors.environment import EnvironmentActor
from actors.lease import Lease
from rayloop.config.model import ModelSettings
from rayloop.core.failures import DataFailure, RolesExhausted, WorkerLost, WorkerSpent
from rayloop.core.groups import PlayFailed, UnscoredKind
from rayloop.core.types import (
    Cohort,
    Completion,
    FinishReason,
    ImageSource,
    Message,
    PlayRequest,
    Sampling,
    Summary,
    Task,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Version,
)
from rayloop.envs.settings import EnvironmentKind, EpisodeSettings

SCRIPTED = {"use": "rayloop.envs.scripted:ScriptedTool", "with": {"steps": [{"text": "more"}]}}
FAULTY = "tests.support.faulty:FaultyEnvironment"


class Remote:
    """Something with ``.remote``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class Engine:
    """Answers with one end token; ``fault`` is awaited before, for each request."""

    def __init__(self, fault: Callable[[int], Awaitable[None]] | None = None) -> None:
        self.prompts: list[TokenPrompt] = []
        self.left: list[str] = []
        self.generate, self.leave = Remote(self._generate), Remote(self.left.append)
        self._fault = fault

    async def _generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        self.prompts.append(prompt)
        if self._fault is not None:
            await self._fault(len(self.prompts))
        return Completion((sampling.end_tokens[0],), (-0.1,), FinishReason.END_TOKEN, Version(0, 0))


class Driver:
    """Hands out further engines; ``asked`` keeps what was lost."""

    def __init__(self, *engines: Engine) -> None:
        self.asked: list[tuple[str, int]] = []
        self._engines = list(engines)
        self.lease_engine = Remote(self._lease)

    async def _lease(self, episode: str, lost: int, why: str) -> Lease:
        assert why
        self.asked.append((episode, lost))
        if not self._engines:
            raise RolesExhausted("no engine is left")
        return Lease(lost + 1, self._engines.pop(0))


def raising(error: BaseException, at: int = 1) -> Callable[[int], Awaitable[None]]:
    async def fault(number: int) -> None:
        if number == at:
            raise error

    return fault


def actor(folder: Path, environment: dict[str, Any] | None = None, **settings: Any) -> EnvironmentActor:
    chosen = {"environment": environment or SCRIPTED, "max_turns": 3, **settings}
    return EnvironmentActor(ModelSettings(path=str(folder)), EpisodeSettings.model_validate(chosen))


def request(task: Task | None = None, cohort: int | None = None, attempt: int = 0) -> PlayRequest:
    asked = task or Task("t1", (Message("user", ("Click.",)),))
    return PlayRequest(asked, TrajectoryId(3, 1), attempt, 42, Sampling(), cohort)


Played = tuple[Summary | PlayFailed, Trajectory | None]


def run(
    player: EnvironmentActor, engine: Engine, driver: Driver | None = None, asked: PlayRequest | None = None
) -> Played:
    played = asyncio.run(player.play(asked or request(), Lease(7, engine), driver or Driver()))
    assert player.health() == 0
    return played


def failed(played: Played) -> PlayFailed:
    summary, trajectory = played
    assert isinstance(summary, PlayFailed)
    assert trajectory is None
    return summary


def test_an_episode_is_summary_and_trajectory(text_folder: Path) -> None:
    engine = Engine()
    summary, trajectory = run(actor(text_folder), engine)
    assert isinstance(summary, Summary)
    assert isinstance(trajectory, Trajectory)
    assert (summary.turns, summary.length) == (2, len(trajectory.flatten().token_ids))
    assert [prompt.cohort for prompt in engine.prompts] == [None, None]
    assert engine.left == []


LOST = [
    ActorDiedError(),
    ActorUnavailableError("away", None),
    WorkerLost("hung"),
    TimeoutError(),
    RayTaskError("generate", "traceback", WorkerLost("hung")),
    RayTaskError("generate", "traceback", WorkerLost("hung")).as_instanceof_cause(),
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_a_lost_engine_costs_the_turn_not_the_episode(text_folder: Path, error: Exception) -> None:
    lost, spare = Engine(raising(error, at=2)), Engine()
    driver = Driver(spare)
    summary, _ = run(actor(text_folder), lost, driver)
    assert isinstance(summary, Summary)
    assert driver.asked == [("3/1@0", 7)]
    assert spare.prompts == [lost.prompts[1]]
    assert len(lost.prompts) == 2


def test_an_engine_that_does_not_answer_is_lost(text_folder: Path) -> None:
    async def hang(number: int) -> None:
        await asyncio.sleep(60)

    driver = Driver(Engine())
    summary, _ = run(actor(text_folder, request_timeout=0.1), Engine(hang), driver)
    assert isinstance(summary, Summary)
    assert driver.asked == [("3/1@0", 7)]


def test_without_any_engine_left_the_episode_fails(text_folder: Path) -> None:
    failure = failed(run(actor(text_folder), Engine(raising(ActorDiedError()))))
    assert failure.outcome.kind is UnscoredKind.ENVIRONMENT_FAILURE
    assert "no engine is left" in failure.outcome.reason


def test_the_first_attempt_is_decoded_with_its_cohort(text_folder: Path) -> None:
    engine = Engine()
    run(actor(text_folder), engine, asked=request(cohort=4))
    assert [prompt.cohort for prompt in engine.prompts] == [Cohort("3", 4)] * 2
    assert engine.left == ["3"]


def test_a_later_attempt_is_decoded_alone(text_folder: Path) -> None:
    engine = Engine()
    run(actor(text_folder), engine, asked=request(cohort=4, attempt=1))
    assert [prompt.cohort for prompt in engine.prompts] == [None, None]
    assert engine.left == []


def test_after_a_loss_the_episode_has_no_cohort(text_folder: Path) -> None:
    lost, spare = Engine(raising(ActorDiedError())), Engine()
    run(actor(text_folder), lost, Driver(spare), request(cohort=4))
    assert [prompt.cohort for prompt in spare.prompts] == [None, None]
    assert (lost.left, spare.left) == ([], [])


def test_a_failing_episode_leaves_its_cohort(text_folder: Path) -> None:
    engine = Engine()
    faulty = {"use": FAULTY, "with": {"step": {"t1": "raise"}}}
    failure = failed(run(actor(text_folder, faulty), engine, asked=request(cohort=4)))
    assert failure.outcome.kind is UnscoredKind.ENVIRONMENT_FAILURE
    assert "step fails for task t1" in failure.outcome.reason
    assert not failure.hung
    assert engine.left == ["3"]


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_hung_environment_is_reported_as_such(text_folder: Path, where: str) -> None:
    faulty = {"use": FAULTY, "with": {where: {"t1": "hang"}, "hang": 1.0}}
    failure = failed(run(actor(text_folder, faulty, reset_timeout=0.1, step_timeout=0.1), Engine()))
    assert failure.hung
    assert failure.outcome.kind is UnscoredKind.ENVIRONMENT_FAILURE


def test_whose_fault_a_failure_was_is_told(text_folder: Path) -> None:
    own = failed(run(actor(text_folder, {"use": FAULTY, "with": {"step": {"t1": "raise"}}}), Engine()))
    assert (own.own, own.hung, own.bug) == (True, False, True)
    engine = failed(run(actor(text_folder), Engine(raising(ActorDiedError()))))
    assert (engine.own, engine.hung, engine.bug) == (False, False, False)


def test_an_actor_with_too_many_hung_tools_asks_to_be_replaced(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.core.threads.HUNG", 2)
    player = actor(text_folder)
    monkeypatch.setattr("actors.environment.hanging", lambda: 2)
    with pytest.raises(WorkerSpent, match="2 calls of tools hang in this process"):
        run(player, Engine())
    assert player.health() == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_bad_data_comes_with_its_path(vision_folder: Path, wrapped: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "missing.png")
    if wrapped:  # found by the engine, in another process
        engine = Engine(raising(RayTaskError("generate", "traceback", DataFailure(path, "gone")).as_instanceof_cause()))
        failure = failed(run(actor(vision_folder), engine))
    else:
        task = Task("t1", (Message("user", (ImageSource(path=path),)),))
        failure = failed(run(actor(vision_folder), Engine(), asked=request(task)))
    assert (failure.outcome.kind, failure.path, failure.own) == (UnscoredKind.BAD_DATA, path, not wrapped)
    assert failure.outcome.reason == ("gone" if wrapped else "cannot be read: No such file or directory")


def test_an_over_long_prompt_is_reported_with_its_size(text_folder: Path) -> None:
    failure = failed(run(actor(text_folder, max_prompt_tokens=3), Engine()))
    assert failure.outcome.kind is UnscoredKind.OVER_LONG_PROMPT
    assert "the limit is 3" in failure.outcome.reason


def test_an_engines_own_error_is_not_retried_here(text_folder: Path) -> None:
    driver = Driver(Engine())
    failure = failed(run(actor(text_folder), Engine(raising(ValueError("bad request"))), driver))
    assert failure.outcome.kind is UnscoredKind.ENVIRONMENT_FAILURE
    assert "bad request" in failure.outcome.reason
    assert driver.asked == []


def test_many_episodes_run_at_once(text_folder: Path) -> None:
    player, gate = actor(text_folder), asyncio.Event()

    async def wait(number: int) -> None:
        await gate.wait()

    async def all_of_them() -> int:
        lease = Lease(7, Engine(wait))
        episodes = [asyncio.create_task(player.play(request(), lease, Driver())) for _ in range(20)]
        await asyncio.sleep(0.3)
        running = player.health()
        gate.set()
        assert all(isinstance(summary, Summary) for summary, _ in await asyncio.gather(*episodes))
        return running

    assert asyncio.run(all_of_them()) == 20


def test_settings_are_checked_when_the_actor_starts(text_folder: Path) -> None:
    with pytest.raises(ValueError, match="unknown"):
        actor(text_folder, {"use": "rayloop.envs.single_turn:SingleTurn", "with": {"unknown": 1}})


ENVIRONMENTS = "tests.support.environments"


def test_an_environment_bound_to_its_thread_can_be_played(text_folder: Path) -> None:
    player = actor(text_folder, {"use": f"{ENVIRONMENTS}:ThreadBound"}, max_turns=3)
    summary, trajectory = run(player, Engine())
    assert isinstance(summary, Summary)
    assert isinstance(trajectory, Trajectory)
    assert (summary.turns, trajectory.env_result) == (3, 5.0)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_coroutines_can_be_played(text_folder: Path, isolation: str) -> None:
    async def slow(number: int) -> None:
        await asyncio.sleep(0.2)

    player = actor(text_folder, {"use": f"{ENVIRONMENTS}:Coroutines", "isolation": isolation}, max_turns=2)
    summary, trajectory = run(player, Engine(slow))
    assert isinstance(summary, Summary)
    assert isinstance(trajectory, Trajectory)
    assert trajectory.env_result is not None
    assert trajectory.env_result > 10, "its heartbeat went on while the policy wrote"


@pytest.mark.parametrize("fault", ["hang", "exit"])
def test_a_broken_environment_of_its_own_process_costs_its_episode_only(text_folder: Path, fault: str) -> None:
    """The neighbours have begun before it breaks, and end after."""
    settings = {"tasks": ["sick"], "does": fault}
    player = actor(
        text_folder, {"use": f"{ENVIRONMENTS}:Fault", "isolation": "process", "with": settings}, step_timeout=0.5
    )
    gate = asyncio.Event()

    async def wait(number: int) -> None:
        await gate.wait()

    async def all_of_them() -> tuple[Played, list[Played]]:
        slow, quick = Lease(7, Engine(wait)), Lease(8, Engine())
        neighbours = [asyncio.create_task(player.play(request(), slow, Driver())) for _ in range(2)]
        await asyncio.sleep(0.1)
        sick = await player.play(request(Task("sick", (Message("user", ("Click.",)),))), quick, Driver())
        assert not any(task.done() for task in neighbours)
        gate.set()
        return sick, await asyncio.gather(*neighbours)

    sick, neighbours = asyncio.run(all_of_them())
    failure = failed(sick)
    assert (failure.own, failure.hung, failure.contained, failure.bug) == (
        True,
        fault == "hang",
        fault == "hang",
        False,
    )
    assert all(isinstance(summary, Summary) for summary, _ in neighbours)
    assert player.health() == 0


def test_a_task_is_played_in_the_kind_that_it_names(text_folder: Path) -> None:
    kinds = {
        "web": EnvironmentKind.model_validate({"use": f"{ENVIRONMENTS}:ThreadBound"}),
        "talk": EnvironmentKind.model_validate({"use": SCRIPTED["use"], "with": {"result": 0.25}}),
    }
    episode = EpisodeSettings.model_validate({"environment": SCRIPTED, "max_turns": 3})
    player = EnvironmentActor(ModelSettings(path=str(text_folder)), episode, kinds)
    results = []
    for kind in ("web", "talk", ""):
        _, trajectory = run(player, Engine(), asked=request(Task("t", (Message("user", ("?",)),), environment=kind)))
        assert isinstance(trajectory, Trajectory)
        results.append(trajectory.env_result)
    assert results == [5.0, 0.25, None]
    failure = failed(run(player, Engine(), asked=request(Task("t", (), environment="desk"))))
    assert failure.outcome.kind is UnscoredKind.BAD_DATA
    assert "environment.kinds has no 'desk'" in failure.outcome.reason
