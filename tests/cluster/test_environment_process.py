"""A real environment actor whose environments have processes of their own: what a hang costs, and
what the actor's end leaves.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rayloop.actors.base import GROUPS
from rayloop.actors.environment import EnvironmentActor
from rayloop.actors.lease import Lease
from rayloop.config.model import ModelSettings
from rayloop.core.failures import Cause, Failure, Scope
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
from rayloop.envs.settings import EpisodeSettings
from rayloop.launch.ray_variables import SUBREAPER


@pytest.fixture(autouse=True)
def _cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SUBREAPER, "true")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
        )
    yield
    ray.shutdown()


class Engine:
    """Ends every turn at once."""

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        return Completion((sampling.end_tokens[0],), (-0.1,), FinishReason.END_TOKEN, Version(0, 0))


def request(task: str) -> RolloutRequest:
    return RolloutRequest(
        Task(task, (Message("user", ("Sort: 1",)),)), TrajectoryId(1, 0), 0, 1, Sampling()
    )


@pytest.mark.slow_faults
def test_a_hang_costs_its_episode_and_the_actors_end_leaves_nothing(
    digits_model: Path, tmp_path: Path
) -> None:
    episode = {
        "environment": {
            "use": "tests.support.environments:Fault",
            "isolation": "process",
            "with": {"tasks": ["sick", "long"], "does": "child", "pids": str(tmp_path)},
        },
        "step_timeout": 10.0,
    }
    actor: Any = ray.remote(concurrency_groups=GROUPS)(EnvironmentActor).options(
        max_concurrency=10, num_cpus=0.5
    )
    player = actor.remote(
        ModelSettings(path=str(digits_model)), EpisodeSettings.model_validate(episode)
    )
    engine = ray.remote(Engine).options(num_cpus=0.5).remote()

    def play(task: str) -> Any:
        return player.run_episodes.options(num_returns=2).remote(
            [request(task)], Lease(0, engine), None
        )[0]

    sick = play("sick")
    well = ray.get([play("well") for _ in range(3)], timeout=60)
    assert all(isinstance(summary, Summary) for [summary] in well)
    [failure] = ray.get(sick, timeout=60)
    assert isinstance(failure, Failure)
    assert (failure.cause is Cause.HUNG, failure.scope is Scope.EPISODE) == (True, True)
    assert isinstance(ray.get(play("well"), timeout=60)[0], Summary), "the same actor goes on"

    pid = int(ray.get(player.stacks.remote(), timeout=60).split()[1])
    assert until(lambda: not any(map(dead, below(pid)))), "what was killed was reaped"
    quiet = len(below(pid))
    play("long")
    assert until(lambda: len(below(pid)) > quiet), "the program that it waits for has started"
    left = below(pid)
    os.kill(pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive


def below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def dead(process: psutil.Process) -> bool:
    """Whether it has ended and nobody has asked how."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()
