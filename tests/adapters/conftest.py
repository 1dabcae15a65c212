"""What the environments of published packages are played with: an episode whose policy says what a
test wants, and a step.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Message, Sampling, Task, Trajectory
from rayloop.rewards.environment_result import EnvironmentResult
from tests.support.models import digits_model as digits_model
from tests.support.models import picture_model as picture_model
from tests.support.played import RENDERER, Paid, all_scored, episode_settings, play_one
from tests.support.runs import Run, eventually, finished, settings

Train = Callable[..., Run]
RESULT = {"use": "rayloop.rewards.environment_result:EnvironmentResult"}


SAMPLING = Sampling(max_tokens=256)


def played(
    given: Mapping[str, Any], row: Mapping[str, Any], says: Callable[[str], str], max_turns: int = 8
) -> Trajectory:
    """One episode of the environment; ``says`` gets the text of all that the policy sees."""
    limits = episode_settings(given, max_turns=max_turns, step_timeout=120)
    return play_one(
        asked(row), lambda prompt: says(RENDERER.decode(prompt.token_ids)), limits, SAMPLING
    )


def hostile_played(
    given: Mapping[str, Any], row: Mapping[str, Any], texts: Sequence[str], max_turns: int = 8
) -> list[Paid]:
    """Episodes of the environment in which the policy says ``texts``; each of them has a reward."""
    return all_scored(
        asked(row), texts, episode_settings(given, max_turns=max_turns, step_timeout=120), SAMPLING
    )


def asked(row: Mapping[str, Any]) -> Task:
    return Task("t", (Message("user", ("Play.",)),), extra=dict(row))


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
        before = {
            "data": {"train": str(data)},
            "steps": 1,
            "reward": {"source": RESULT},
            "recovery": {},
        }
        before |= {
            "algorithm": {"group_size": 4, "groups_per_step": 2, "filtering": {"filters": []}}
        }
        run = finished(settings(tmp_path, model, **{**before, **changes}))
        (step,) = run.metrics
        assert step["rollout/trained"] == 8, step
        return run

    return made
