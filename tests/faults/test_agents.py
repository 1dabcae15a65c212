"""A run of agents with the published OpenAI client, some of them sick: it takes its steps, loses
the episodes of those that were sick before they asked the policy, and scores those that an answer
may have broken.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.support.models import grounding_model as grounding_model
from tests.support.runs import finished, ledger_closes, settings

pytestmark = [pytest.mark.slow_faults, pytest.mark.timeout(600)]

AGENT = """
import os, sys, time
from openai import OpenAI
import httpx

WAYS = ["well", "sick", "rewritten", "hang", "well", "bomb", "well", "output", "crash", "twice", "well", "silent"]
PLAYED = os.environ["PLAYED"]

def play(row, reward_key):
    open(os.path.join(PLAYED, os.environ["OPENAI_API_KEY"]), "x").close()
    way = WAYS[len(os.listdir(PLAYED)) % len(WAYS)]  # by turns of the episodes
    if way == "sick":
        raise RuntimeError("sick")
    client = OpenAI()
    messages = [{"role": "user", "content": row["prompt"]}]
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    if way == "crash":
        raise RuntimeError("an answer that it cannot read")
    if way == "hang":
        time.sleep(1000)
    while way == "bomb":
        os.fork()
    if way == "output":
        for _ in range(256):
            sys.stdout.write("x" * (1 << 20))
    if way == "silent":
        return None
    if way == "rewritten":
        messages = [{"role": "user", "content": "In short: " + answer}]
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    reward = float(sum(map(ord, answer)) % 97)
    if way == "twice":
        key = {"Authorization": "Bearer " + reward_key}
        for value, status in ((reward, 200), (9e9, 409)):
            given = httpx.post(os.environ["OPENAI_BASE_URL"] + "/reward", json={"reward": value}, headers=key)
            assert given.status_code == status
    return reward
"""


def test_sick_agents_cost_their_own_episodes(grounding_model: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT), encoding="utf-8")
    rows = [
        {"prompt": f"Say {number}.", "number": number, "id": f"row-{number}"}
        for number in range(16)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    (tmp_path / "played").mkdir()
    options = {
        "run": f"{tmp_path / 'agent.py'}:play",
        "preload": ["openai"],
        "deadline": 20,
        "processes": 20,
        "reward": "posted",
    }
    options["env"] = {"PLAYED": str(tmp_path / "played")}
    config = settings(
        tmp_path,
        grounding_model,
        steps=3,
        data={"train": str(tmp_path / "rows.jsonl")},
        environment={
            "episode": {
                "environment": {"use": "rayloop.envs.agent_env:AgentEnv", "with": options},
                "max_turns": 4,
            }
        },
        reward={"source": {"use": "rayloop.rewards.environment_result:EnvironmentResult"}},
        algorithm={"group_size": 4, "groups_per_step": 2},
    )
    made = finished(config)
    assert len(made.metrics) == 3
    [ended] = made.named("finished")
    ledger_closes(ended["ledger"])
    failed = [event["why"] for event in made.events if event["event"] == "episode_failed"]
    for way in ("exit code 1: RuntimeError: sick", "did not end within 20 s (deadline)"):
        assert any(way in why for why in failed), (way, failed)
    assert not any("cannot read" in why or "(processes)" in why for why in failed), failed
    assert any(step.get("end_reason/action_error", 0) > 0 for step in made.metrics), (
        "a crash or a bomb after an answer is scored"
    )
    assert all(abs(step["reward/mean"]) < 97 for step in made.metrics), (
        "the second reward did not count"
    )
