"""The environment actor, called directly: failures as values, and generation that outlives a lost
engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from rayloop.actors.environment import EnvironmentActor
from rayloop.actors.failures import as_value
from rayloop.actors.lease import Lease
from rayloop.config.model import ModelSettings
from rayloop.core.failures import (
    Cause,
    DataFailure,
    Diverged,
    Failure,
    RolesExhausted,
    Scope,
    WorkerLost,
    WorkerSpent,
)
from rayloop.core.groups import Unscored, UnscoredKind
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.threads import hanging
from rayloop.core.types import (
    Cohort,
    Completion,
    FinishReason,
    ImageSource,
    Message,
    RolloutRequest,
    Sampling,
    Summary,
    Task,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Version,
)
from rayloop.envs.settings import EnvironmentKind, EpisodeSettings
from tests.support.environments import WaitsForTheOthers
from tests.support.runs import eventually

SCRIPTED = {"use": "rayloop.envs.scripted:ScriptedTool", "with": {"steps": [{"text": "more"}]}}
FAULTY = "tests.support.faulty:FaultyEnvironment"
ENVIRONMENTS = "tests.support.environments"


class Remote:
    """Something with ``.remote``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class Engine:
    """Answers with one end token; ``fault`` is awaited before, for each request."""

    def __init__(self, fault: Callable[[int], Awaitable[None]] | None = None) -> None:
        self.prompts: list[TokenPrompt] = []
        self.left: list[str] = []
        self.together: list[list[int]] = []
        """The seeds of each request for several samples."""
        self.generate, self.leave = Remote(self._generate), Remote(self.left.append)
        self.generate_each = Remote(self._generate_each)
        self._fault = fault

    async def _generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        self.prompts.append(prompt)
        if self._fault is not None:
            await self._fault(len(self.prompts))
        return Completion((sampling.end_tokens[0],), (-0.1,), FinishReason.END_TOKEN, Version(0, 0))

    async def _generate_each(
        self, prompt: TokenPrompt, seeds: list[int], sampling: Sampling
    ) -> list[Any]:
        """What fails is a value, unless the engine died of all of them."""
        self.together.append(seeds)
        asked = (self._generate(dataclasses.replace(prompt, seed=seed), sampling) for seed in seeds)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        if len(lost := [one for one in answers if isinstance(one, ActorDiedError)]) == len(seeds):
            raise lost[0]
        return [as_value(one) if isinstance(one, BaseException) else one for one in answers]


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


def actor(
    folder: Path, environment: dict[str, Any] | None = None, timeout: float = 60.0, **settings: Any
) -> EnvironmentActor:
    chosen = {"environment": environment or SCRIPTED, "max_turns": 3, **settings}
    return EnvironmentActor(
        ModelSettings(path=str(folder)), EpisodeSettings.model_validate(chosen), timeout=timeout
    )


def request(
    task: Task | None = None, cohort: int | None = None, attempt: int = 0, sample: int = 1
) -> RolloutRequest:
    asked = task or Task("t1", (Message("user", ("Click.",)),))
    return RolloutRequest(asked, TrajectoryId(3, sample), attempt, 42 + sample, Sampling(), cohort)


def named(task: str, sample: int) -> RolloutRequest:
    return request(Task(task, (Message("user", ("Click.",)),)), sample=sample)


EIGHT = [request(sample=sample) for sample in range(8)]

Played = tuple[Summary | Failure, Trajectory | None]


def run(
    player: EnvironmentActor,
    engine: Engine,
    driver: Driver | None = None,
    asked: RolloutRequest | None = None,
) -> Played:
    [[summary], trajectory] = group(player, [asked or request()], engine, driver)
    return summary, trajectory


def group(
    player: EnvironmentActor,
    asked: list[RolloutRequest],
    engine: Engine,
    driver: Driver | None = None,
) -> tuple[list[Summary | Failure], *tuple[Trajectory | None, ...]]:
    played = asyncio.run(player.run_episodes(asked, Lease(7, engine), driver or Driver()))
    assert player.health() == 0
    return played


def failed(played: Played) -> Failure:
    summary, trajectory = played
    assert isinstance(summary, Failure)
    assert trajectory is None
    return summary


def test_an_engine_with_log_probs_that_are_not_finite_is_not_taken_for_a_lost_one(
    text_folder: Path,
) -> None:
    error = as_value(Diverged("the engine's log-probs are not finite")).as_instanceof_cause()
    driver = Driver(Engine())
    failure = failed(run(actor(text_folder), Engine(raising(error)), driver))
    assert (failure.cause, failure.scope, failure.retryable) == (
        Cause.DIVERGED,
        Scope.ENGINE,
        False,
    )
    assert failure.why == "the engine's log-probs are not finite"
    assert driver.asked == [], "no other engine was leased"


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
    summary, _ = run(actor(text_folder, timeout=1.2), Engine(hang), driver)
    assert isinstance(summary, Summary)
    assert driver.asked == [("3/1@0", 7)]


def test_without_any_engine_left_the_episode_fails(text_folder: Path) -> None:
    failure = failed(run(actor(text_folder), Engine(raising(ActorDiedError()))))
    assert Unscored.of(failure).kind is UnscoredKind.ENVIRONMENT_FAILURE
    assert "no engine is left" in failure.why


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
    assert Unscored.of(failure).kind is UnscoredKind.ENVIRONMENT_FAILURE
    assert "step fails for task t1" in failure.why
    assert failure.cause is not Cause.HUNG
    assert engine.left == ["3"]


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_hung_environment_is_reported_as_such(text_folder: Path, where: str) -> None:
    faulty = {"use": FAULTY, "with": {where: {"t1": "hang"}, "hang": 1.0}}
    failure = failed(run(actor(text_folder, faulty, step_timeout=0.1), Engine()))
    assert failure.cause is Cause.HUNG
    assert Unscored.of(failure).kind is UnscoredKind.ENVIRONMENT_FAILURE


def test_whose_fault_a_failure_was_is_reported(text_folder: Path) -> None:
    own = failed(
        run(actor(text_folder, {"use": FAULTY, "with": {"step": {"t1": "raise"}}}), Engine())
    )
    assert (own.of_actor, own.cause is Cause.HUNG, own.cause is Cause.BUG) == (True, False, True)
    engine = failed(run(actor(text_folder), Engine(raising(ActorDiedError()))))
    assert (engine.of_actor, engine.cause is Cause.HUNG, engine.cause is Cause.BUG) == (
        False,
        False,
        False,
    )


def test_an_actor_with_too_many_hung_tools_asks_to_be_replaced(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.core.threads.MAX_HUNG_CALLS", 2)
    player = actor(text_folder)
    monkeypatch.setattr("rayloop.actors.environment.hanging", lambda: 2)
    with pytest.raises(WorkerSpent, match="2 calls of tools hang in this process"):
        run(player, Engine())
    assert player.health() == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_bad_data_comes_with_its_path(vision_folder: Path, wrapped: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "missing.png")
    if wrapped:  # found by the engine, in another process
        engine = Engine(
            raising(
                RayTaskError(
                    "generate", "traceback", DataFailure(path, "gone")
                ).as_instanceof_cause()
            )
        )
        failure = failed(run(actor(vision_folder), engine))
    else:
        task = Task("t1", (Message("user", (ImageSource(path=path),)),))
        failure = failed(run(actor(vision_folder), Engine(), asked=request(task)))
    assert (Unscored.of(failure).kind, failure.path, failure.of_actor) == (
        UnscoredKind.BAD_DATA,
        path,
        not wrapped,
    )
    assert failure.why == ("gone" if wrapped else "cannot be read: No such file or directory")


def test_an_over_long_prompt_is_reported_with_its_size(text_folder: Path) -> None:
    failure = failed(run(actor(text_folder, max_prompt_tokens=3), Engine()))
    assert Unscored.of(failure).kind is UnscoredKind.OVER_LONG_PROMPT
    assert "the limit is 3 (environment.episode.max_prompt_tokens)" in failure.why


def test_an_engines_own_error_is_not_retried_here(text_folder: Path) -> None:
    driver = Driver(Engine())
    failure = failed(run(actor(text_folder), Engine(raising(ValueError("bad request"))), driver))
    assert Unscored.of(failure).kind is UnscoredKind.ENVIRONMENT_FAILURE
    assert "bad request" in failure.why
    assert driver.asked == []


def test_many_episodes_run_at_once(text_folder: Path) -> None:
    player, gate = actor(text_folder), asyncio.Event()

    async def wait(number: int) -> None:
        await gate.wait()

    async def all_of_them() -> int:
        lease = Lease(7, Engine(wait))
        asked = [request(sample=sample) for sample in range(10)]
        calls = [asyncio.create_task(player.run_episodes(asked, lease, Driver())) for _ in range(2)]
        await asyncio.sleep(0.3)
        running = player.health()
        assert player.awaits() == [("20 generate on rollout 0", lease.handle)]
        gate.set()
        for summaries, *trajectories in await asyncio.gather(*calls):
            assert all(isinstance(summary, Summary) for summary in summaries)
            assert [one.id.sample for one in trajectories if one] == list(range(10))
        return running

    assert asyncio.run(all_of_them()) == 20
    assert player.awaits() == []


def test_a_member_that_fails_is_a_value_beside_the_others(text_folder: Path) -> None:
    faulty = {"use": FAULTY, "with": {"step": {"sick": "raise"}}}
    summaries, *trajectories = group(
        actor(text_folder, faulty), [named("well", 0), named("sick", 1), named("well", 2)], Engine()
    )
    assert [type(summary) for summary in summaries] == [Summary, Failure, Summary]
    assert [summary.id.sample for summary in summaries if isinstance(summary, Summary)] == [0, 2]
    assert [trajectory and trajectory.id.sample for trajectory in trajectories] == [0, None, 2]


class Taking:
    """Changes the row that it is given."""

    def reset(self, task: Task) -> Observation:
        extra: Any = task.extra
        return Observation((Message("user", (extra["steps"].pop(),)),))

    def step(self, text: str) -> StepResult:
        return StepResult(done=True)

    def evaluate(self) -> None: ...

    def close(self) -> None: ...


def test_members_of_a_group_have_a_task_each(text_folder: Path) -> None:
    task = Task("t", (), extra={"steps": ["last", "first"]})
    asked = [request(task, sample=sample) for sample in range(4)]
    summaries = group(actor(text_folder, {"use": f"{__name__}:Taking"}), asked, Engine())[0]
    assert all(isinstance(summary, Summary) for summary in summaries)
    assert len({summary.length for summary in summaries if isinstance(summary, Summary)}) == 1


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_member_beyond_the_deadline_of_an_episode_does_not_take_the_others_answers(
    text_folder: Path, isolation: str
) -> None:
    """The deadline of its call is longer: what it hangs in costs itself only, or its actor after
    the answer.
    """
    faulty = {
        "use": f"{ENVIRONMENTS}:Fault",
        "isolation": isolation,
        "with": {"tasks": ["slow"], "does": "hang", "seconds": 20.0},
    }
    player = actor(text_folder, faulty, timeout=6.0, step_timeout=60.0)

    def well_before() -> bool:
        return isinstance(group(player, [named("well", 0)], Engine())[0][0], Summary)

    eventually(well_before, "an episode in a process that has started", 60.0)
    well, slow = group(player, [named("well", 0), named("slow", 1)], Engine())[0]
    assert isinstance(well, Summary)
    assert isinstance(slow, Failure)
    assert (slow.of_actor, slow.cause is Cause.HUNG, slow.scope is Scope.EPISODE) == (
        True,
        True,
        isolation == "process",
    )
    assert Unscored.of(slow).reason == "the episode did not end within 6 s"


# The first prompt of a group ----------------------------------------------------------------------


class Counted:
    """Counts what a renderer renders first; waits before, and then raises if a test asks for it."""

    def __init__(
        self, player: EnvironmentActor, seconds: float = 0.0, error: Exception | None = None
    ) -> None:
        self.count = 0
        self._prompt, self._seconds, self._error = player._renderer.prompt, seconds, error
        player._renderer.prompt = self._counted  # type: ignore[method-assign]

    def _counted(self, *shown: Any) -> Any:
        self.count += 1
        time.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        return self._prompt(*shown)


@pytest.mark.parametrize(
    "use", ["rayloop.envs.single_turn:SingleTurn", f"{ENVIRONMENTS}:DerivedFromImmediate"]
)
def test_what_a_group_shows_first_is_rendered_once(text_folder: Path, use: str) -> None:
    player = actor(text_folder, {"use": use}, max_turns=1)
    counted = Counted(player, 0.2)
    other = request(Task("other", (Message("user", ("Something else.",)),)), sample=4)
    summaries, *trajectories = group(
        player, [*(named("same", n) for n in range(4)), other], Engine()
    )
    assert all(isinstance(summary, Summary) for summary in summaries)
    prompts = [trajectory.turns[0].token_ids for trajectory in trajectories if trajectory]
    assert counted.count == 2
    assert prompts[:4] == [prompts[0]] * 4
    assert prompts[4] != prompts[0]
    group(player, EIGHT, Engine())
    assert counted.count == 3, "another call renders again"


def test_a_failure_to_render_reaches_all_who_show_the_same(text_folder: Path) -> None:
    player = actor(text_folder, {"use": "rayloop.envs.single_turn:SingleTurn"}, max_turns=1)
    counted = Counted(player, error=DataFailure("/x.png", "gone"))
    summaries = group(player, EIGHT, Engine())[0]
    assert counted.count == 1
    assert [
        (Unscored.of(one).kind, one.path, one.of_actor)
        for one in summaries
        if isinstance(one, Failure)
    ] == [(UnscoredKind.BAD_DATA, "/x.png", True)] * 8


def test_who_waits_for_the_same_prompt_waits_its_own_time(text_folder: Path) -> None:
    """All are late for one thread that renders, which is counted once."""
    player = actor(
        text_folder, {"use": "rayloop.envs.single_turn:SingleTurn"}, max_turns=1, step_timeout=0.1
    )
    Counted(player, 0.6)
    before = hanging()
    summaries = group(player, EIGHT, Engine())[0]
    assert hanging() == before + 1
    assert [
        "no answer within 0.1 s" in one.why for one in summaries if isinstance(one, Failure)
    ] == [True] * 8


def test_what_is_immediate_is_played_without_a_thread_of_its_own(text_folder: Path) -> None:
    player = actor(text_folder, {"use": f"{ENVIRONMENTS}:Immediate"}, max_turns=1)
    results = {
        one.env_result for one in group(player, EIGHT, Engine())[1:] if isinstance(one, Trajectory)
    }
    assert results == {float(threading.get_native_id())}


def test_a_coroutine_of_what_is_immediate_is_a_bug_of_the_environment(text_folder: Path) -> None:
    failure = failed(
        run(actor(text_folder, {"use": f"{ENVIRONMENTS}:ImmediateCoroutines"}), Engine())
    )
    assert (failure.of_actor, failure.cause is Cause.BUG) == (True, True)
    assert (
        "reset is a coroutine: ImmediateCoroutines must not say `immediate = True`" in failure.why
    )


# The first turn of a group ------------------------------------------------------------------------


def single_turn(folder: Path, **more: Any) -> EnvironmentActor:
    return actor(folder, {"use": "rayloop.envs.single_turn:SingleTurn"}, max_turns=1, **more)


def test_the_first_turn_of_a_group_is_one_request_with_the_seeds_of_its_members(
    text_folder: Path,
) -> None:
    player, together = single_turn(text_folder), Engine()
    summaries, *trajectories = group(player, EIGHT, together)
    assert all(isinstance(summary, Summary) for summary in summaries)
    assert len(trajectories) == 8
    apart = Engine()
    for asked in EIGHT:
        run(player, apart, asked=asked)
    assert (len(together.together), apart.together) == (1, [])
    assert sorted(together.together[0]) == sorted(prompt.seed for prompt in apart.prompts)
    by_seed = {prompt.seed: prompt for prompt in apart.prompts}
    assert {p.seed: p for p in together.prompts} == by_seed, (
        "each sample is asked for as if it were alone"
    )


def test_turns_of_longer_episodes_are_asked_for_one_by_one(text_folder: Path) -> None:
    engine = Engine()
    group(actor(text_folder), EIGHT[:3], engine)
    assert (len(engine.prompts), engine.together) == (
        6,
        [],
    ), "no short first turn waits for the longest"


def test_who_sees_something_else_asks_alone_and_who_fails_before_is_not_waited_for(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.actors.lease.MIN_GATHERING_S", 30.0)
    faulty = {"use": FAULTY, "with": {"reset": {"sick": "raise"}}}
    engine, began = Engine(), time.monotonic()
    other = request(Task("other", (Message("user", ("Something else.",)),)), sample=4)
    asked = [named("well", 0), named("sick", 1), named("well", 2), named("well", 3), other]
    summaries = group(actor(text_folder, faulty, max_turns=1), asked, engine)[0]
    assert [type(summary) for summary in summaries] == [Summary, Failure, Summary, Summary, Summary]
    assert sorted(map(len, engine.together)) == [1, 3]
    assert time.monotonic() - began < 20


def test_a_member_that_is_late_asks_alone(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.actors.lease.MIN_GATHERING_S", 2.0)
    answered = WaitsForTheOthers.answered
    answered.clear()

    async def let_the_late_one_begin(number: int) -> None:
        answered.set()

    engine = Engine(let_the_late_one_begin)
    player = actor(
        text_folder, {"use": f"{ENVIRONMENTS}:WaitsForTheOthers"}, max_turns=1, step_timeout=90.0
    )
    summaries = group(player, [named("well", 0), named("late", 1), named("well", 2)], engine)[0]
    assert all(isinstance(summary, Summary) for summary in summaries)
    assert list(map(len, engine.together)) == [2, 1]


def test_an_engine_that_dies_with_the_request_of_a_group_costs_each_its_turn(
    text_folder: Path,
) -> None:
    async def dies(number: int) -> None:
        raise ActorDiedError

    lost, spares = Engine(dies), [Engine() for _ in EIGHT]
    driver = Driver(*spares)
    summaries = group(single_turn(text_folder), EIGHT, lost, driver)[0]
    assert all(isinstance(summary, Summary) for summary in summaries)
    assert sorted(driver.asked) == [(f"3/{sample}@0", 7) for sample in range(8)]
    assert [len(spare.prompts) for spare in spares] == [1] * 8
    assert {prompt.seed for spare in spares for prompt in spare.prompts} == {
        prompt.seed for prompt in lost.prompts
    }


def test_a_sample_that_fails_costs_the_others_nothing(text_folder: Path) -> None:
    engine = Engine(raising(DataFailure("/x.png", "gone"), at=3))
    summaries = group(single_turn(text_folder), EIGHT, engine)[0]
    [failure] = [summary for summary in summaries if isinstance(summary, Failure)]
    assert len(summaries) == 8
    assert (Unscored.of(failure).kind, failure.path, failure.of_actor) == (
        UnscoredKind.BAD_DATA,
        "/x.png",
        False,
    )


def test_a_group_that_is_decoded_as_one_batch_arrives_as_one(text_folder: Path) -> None:
    engine = Engine()
    group(
        single_turn(text_folder), [request(cohort=8, sample=sample) for sample in range(8)], engine
    )
    assert list(map(len, engine.together)) == [8]
    assert {prompt.cohort for prompt in engine.prompts} == {Cohort("3", 8)}
    assert engine.left == ["3"] * 8


def test_a_request_may_have_values_of_its_own_for_the_episode(text_folder: Path) -> None:
    player, engine = actor(text_folder, max_turns=1), Engine()
    longer = [dataclasses.replace(one, episode={"max_turns": 2}) for one in EIGHT[:2]]
    turns = [
        [one.turns for one in group(player, asked, engine)[0] if isinstance(one, Summary)]
        for asked in (longer, EIGHT[:2])
    ]
    assert turns == [[2, 2], [1, 1]]
    assert len(engine.together) == 1, (
        "only the first turn of one-turn episodes is asked for together"
    )


def test_settings_are_checked_when_the_actor_starts(text_folder: Path) -> None:
    with pytest.raises(ValueError, match="unknown"):
        actor(text_folder, {"use": "rayloop.envs.single_turn:SingleTurn", "with": {"unknown": 1}})


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

    player = actor(
        text_folder, {"use": f"{ENVIRONMENTS}:Coroutines", "isolation": isolation}, max_turns=2
    )
    summary, trajectory = run(player, Engine(slow))
    assert isinstance(summary, Summary)
    assert isinstance(trajectory, Trajectory)
    assert trajectory.env_result is not None
    assert trajectory.env_result > 10, "its heartbeat went on while the policy wrote"


@pytest.mark.parametrize("fault", ["hang", "exit"])
def test_a_broken_environment_of_its_own_process_costs_its_episode_only(
    text_folder: Path, fault: str
) -> None:
    """The neighbours have begun before it breaks, and end after."""
    settings, timeout = {"tasks": ["sick"], "does": fault}, 8.0 if fault == "hang" else 90.0
    player = actor(
        text_folder,
        {"use": f"{ENVIRONMENTS}:Fault", "isolation": "process", "with": settings},
        step_timeout=timeout,
    )
    gate = asyncio.Event()

    async def wait(number: int) -> None:
        await gate.wait()

    async def all_of_them() -> tuple[Played, list[Summary | Failure]]:
        slow, quick = Lease(7, Engine(wait)), Lease(8, Engine())
        neighbours = asyncio.create_task(
            player.run_episodes([request(sample=n) for n in range(2)], slow, Driver())
        )
        await asyncio.sleep(0.1)
        [summary], trajectory = await player.run_episodes([named("sick", 3)], quick, Driver())
        assert not neighbours.done()
        gate.set()
        return (summary, trajectory), (await neighbours)[0]

    sick, neighbours = asyncio.run(all_of_them())
    failure = failed(sick)
    assert (
        failure.of_actor,
        failure.cause is Cause.HUNG,
        failure.scope is Scope.PROCESS,
        failure.cause is Cause.BUG,
    ) == (
        True,
        fault == "hang",
        False,
        False,
    )
    assert all(isinstance(summary, Summary) for summary in neighbours)
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
        _, trajectory = run(
            player, Engine(), asked=request(Task("t", (Message("user", ("?",)),), environment=kind))
        )
        assert isinstance(trajectory, Trajectory)
        results.append(trajectory.env_result)
    assert results == [5.0, 0.25, None]
    failure = failed(run(player, Engine(), asked=request(Task("t", (), environment="desk"))))
    assert Unscored.of(failure).kind is UnscoredKind.BAD_DATA
    assert "environment.kinds has no 'desk'" in failure.why
