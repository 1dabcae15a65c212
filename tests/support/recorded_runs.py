"""Configurations of runs whose steps are kept for ``replay``: single turns, several turns with images, agents."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tests.support.pictures import picture_rows
from tests.support.runs import settings

KEPT = {"keep_rollouts": "all", "evaluation": {"every": 0}}

AGENT = """
import sys
from openai import OpenAI

def play(row):
    client = OpenAI()
    messages = [{"role": "user", "content": row["prompt"]}]
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    # Every other row: the agent begins again, and then goes on in that second context.
    if row["number"] % 2:
        messages = [{"role": "user", "content": "In short: " + answer[:20]}]
    else:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Again."}]
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    return float(sum(map(ord, answer)) % 97)
"""


def single_turns(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """Digits that are sorted: one turn, one update a step."""
    return KEPT | settings(
        folder,
        model,
        steps=3,
        algorithm__group_size=8,
        **changes,
    )


def several_turns(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """Three turns with an image in each observation, turn advantages, every term, four updates."""
    seen = [{"text": "Look closer.", "images": [{"width": 84, "height": 56}]}] * 2
    scripted = {"use": "rayloop.envs.scripted:ScriptedTool", "with": {"steps": seen}}
    config = KEPT | settings(
        folder,
        model,
        steps=3,
        data={"train": str(picture_rows(folder, 16))},
        environment__episode={"environment": scripted, "max_turns": 3},
        algorithm__advantage={"kind": "turns"},
        policy__loss={
            "kl_coef": 0.05,
            "entropy_coef": 0.001,
            "top_entropy_quantile": 0.5,
            "perception": {},
        },
        policy__update={"epochs": 2, "mini_batches": 2},
        policy__ranks=2,
        **changes,
    )
    config["policy"]["engine"]["micro_batch_tokens"] = 256
    return config


def agents(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """Agents of which some begin a second context, under a loss that looks at trajectories."""
    (folder / "agent.py").write_text(textwrap.dedent(AGENT), encoding="utf-8")
    rows = [
        {"prompt": f"Say {number}.", "number": number, "id": f"row-{number}"}
        for number in range(16)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    options = {"run": f"{folder / 'agent.py'}:play", "preload": ["openai"], "deadline": 60}
    return KEPT | settings(
        folder,
        model,
        steps=3,
        data={"train": str(folder / "rows.jsonl")},
        environment={
            "episode": {
                "environment": {"use": "rayloop.envs.agent_env:AgentEnv", "with": options},
                "max_turns": 4,
            }
        },
        reward={"source": {"use": "rayloop.rewards.environment_result:EnvironmentResult"}},
        policy__loss={"kind": "gspo"},
        policy__update={"mini_batches": 2},
        **changes,
    )
