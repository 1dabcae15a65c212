"""A run whose environment's server fails in half of the episodes: metric, alarm, and no reward."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from tests.support.models import digits_model as digits_model
from tests.support.nemo_gym_server import ROW, answering
from tests.support.runs import finished, settings

MASKED = {
    "reward": 0.0,
    "mask_sample": True,
    "failure_kind": "judge_failed",
    "failure_reason": "the judge does not answer",
}


def test_a_failing_server_is_an_alarm_and_never_a_reward(
    tmp_path: Path, digits_model: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(f"{json.dumps(ROW)}\n" * 4, encoding="utf-8")
    lock = threading.Lock()
    verified = 0

    def verify(request: dict[str, Any]) -> tuple[int, Any]:
        """Every second answer is masked, with a reward of 0 that nobody may see."""
        nonlocal verified
        with lock:
            verified += 1
            return 200, MASKED if verified % 2 else {"reward": 1.0}

    with answering() as (answers, url):
        answers.by_path["/verify"] = (200, verify)
        kind = {"use": "rayloop.envs.adapters.nemo_gym:NemoGym", "with": {"url": url}}
        reader = {"use": "rayloop.envs.adapters.nemo_gym:NemoGymRows"}
        run = finished(
            settings(
                tmp_path,
                digits_model,
                data={"train": str(data), "reader": reader},
                steps=2,
                reward={"source": {"use": "rayloop.rewards.environment_result:EnvironmentResult"}},
                environment={"episode": {"environment": kind, "max_turns": 1}},
                algorithm={
                    "group_size": 4,
                    "groups_per_step": 2,
                    "filtering": {"filters": []},
                },
            )
        )

    first = run.metrics[0]
    assert first["reward/min"] == first["reward/max"] == 1.0
    assert first["lost/episodes"] >= 0.25
    server = url.removeprefix("http://")
    assert first["lost/cause/grader"] == first[f"lost/server/{server}"] == first["lost/episodes"]
    [node] = [name for name in first if name.startswith("lost/node/")]
    assert first[node] == first["lost/episodes"]
    alarms = [event for event in run.events if event["event"] == "alarm"]
    [alarm] = [event for event in alarms if event["alarm"] == "infrastructure"]
    assert f"server {server}" in alarm["why"]
    assert "judge_failed: the judge does not answer" in alarm["why"]
    failed = [event for event in run.events if event["event"] == "episode_failed"]
    assert {(event["cause"], event["server"]) for event in failed} == {("grader", url)}
