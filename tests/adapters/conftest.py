"""What the environments of published packages are played with: an episode whose policy says what a test wants, and a step."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import (
    Completion,
    FinishReason,
    Message,
    RolloutRequest,
    Sampling,
    Task,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Version,
)
from rayloop.envs.episode import play
from rayloop.envs.instance import Environments
from rayloop.envs.settings import EnvironmentKind, EpisodeSettings
from rayloop.rewards.environment_result import EnvironmentResult
from tests.support.models import digits_model as digits_model
from tests.support.models import picture_model as picture_model
from tests.support.runs import ROOT, Run, eventually, finished, settings

Train = Callable[..., Run]
RESULT = {"use": "rayloop.rewards.environment_result:EnvironmentResult"}


def played(given: Mapping[str, Any], row: Mapping[str, Any], says: Callable[[str], str], max_turns: int = 8) -> Trajectory:
    """One episode of the environment; ``says`` gets the text of all that the policy sees."""
    kind = EnvironmentKind.model_validate(given)
    renderer = Renderer(ModelSettings(path=str(ROOT / "recipes/arc_vision/loose")))

    async def generate(prompt: TokenPrompt, sampling: Sampling) -> Completion:
        tokens = renderer.encode(says(renderer.decode(prompt.token_ids)))
        return Completion(tokens, (-0.5,) * len(tokens), FinishReason.END_TOKEN, Version(0, 1))

    async def episode() -> Trajectory:
        environments = Environments(kind, {})
        asked = Task("t", (Message("user", ("Play.",)),), extra=dict(row))
        request = RolloutRequest(asked, TrajectoryId(0, 0), 0, 5, Sampling(max_tokens=256))
        limits = EpisodeSettings(environment=kind, max_turns=max_turns, step_timeout=120)
        try:
            return await play(request, environments.of(asked), renderer, limits, generate)
        finally:
            environments.end()

    return asyncio.run(episode())


def scored(made: Trajectory) -> float:
    """What the episode is paid; that nothing left it out."""
    outcome = EnvironmentResult().score(made, Task("t", ()), ScoreContext(0, []))
    assert isinstance(outcome, Scored), (made.end_reason, outcome)
    return outcome.value


@contextmanager
def served(*command: str | Path) -> Iterator[int]:
    """A server that is started with a free port behind its other arguments, and listens there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    server = subprocess.Popen([*command, str(port)])
    try:
        eventually(lambda: _listens(port), "the server listens", 60)
        yield port
    finally:
        server.terminate()
        server.wait(20)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Two groups of four trajectories, and a step on them."""

    def made(model: Path, rows: list[dict[str, Any]], **changes: Any) -> Run:
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        before = {"data": {"train": str(data)}, "steps": 1, "reward": {"source": RESULT}, "recovery": {}}
        before |= {"algorithm": {"group_size": 4, "groups_per_step": 2, "filtering": {"filters": []}}}
        run = finished(settings(tmp_path, model, **{**before, **changes}))
        (step,) = run.metrics
        assert step["rollout/trained"] == 8, step
        return run

    return made
