"""What an advantage or a loss needs and the run has not is refused before anything starts: key,
value, and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rayloop.core.failures import ConfigError
from rayloop.run.config import RunConfig, read

DISTILL = {
    "algorithm.advantage.kind": "distill",
    "algorithm.filtering.filters": [],
    "reference.path": "teacher",
}
HARNESS = {"use": "rayloop.envs.agent_env:AgentEnv", "with": {"run": "mine:play"}}
K2 = {"policy.loss.kl_coef": 1.0, "policy.loss.kl": "k2"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"algorithm.group_size": 1},
        "algorithm.group_size is 1: .* Use at least 2, or advantage.kind: raw",
    ),
    (
        {"algorithm.advantage": {"kind": "grpo", "with": {"min_group": 9}}},
        r"min_group \(9\) is above algorithm.group_size \(8\)",
    ),
    (
        {"algorithm.advantage.kind": "gdpo"},
        r"advantage.kind: gdpo needs the components .* set with.weights, as \{iou: 1.0",
    ),
    (
        {"algorithm.advantage": {"kind": "gdpo", "with": {"weights": {}}}},
        "advantage.kind: gdpo needs the components",
    ),
    (
        {"algorithm.advantage.kind": "gigpo"},
        "kind: gigpo compares turns, and environment.episode.max_turns is 1: raise it",
    ),
    (
        {"algorithm.advantage.kind": "turns"},
        "kind: turns compares turns, and environment.episode.max_turns is 1: raise it",
    ),
    (
        DISTILL,
        (
            "kind: distill has the KL to a teacher as its loss: set reference.path to the teacher,"
            " policy.loss.kl_coef to 1"
        ),
    ),
    (
        DISTILL | {"policy.loss.kl_coef": 1.0, "reference.path": None},
        "set reference.path to the teacher",
    ),
    (
        DISTILL | {"policy.loss.kl_coef": 1.0},
        "policy.loss.kl: k3 has not the gradient that .* set k2",
    ),
    (
        DISTILL | {"policy.loss": {"kl_coef": 1.0, "kl": {"estimator": "k2", "in": "reward"}}},
        "has not the gradient",
    ),
    (
        DISTILL | K2 | {"policy.loss.entropy_coef": 0.01},
        "policy.loss.entropy_coef is part of the policy gradient, .* set it to 0",
    ),
    (
        DISTILL | K2 | {"policy.loss.perception": {}},
        "policy.loss.perception is part of the policy gradient, .* leave it out",
    ),
    (
        {
            "policy.loss": {"kl_coef": 0.1, "kl": {"in": "reward"}},
            "environment.history": {"last_images": 4},
        },
        (
            "policy.loss.kl in the reward needs trajectories of one sequence: set"
            " environment.history to full"
        ),
    ),
    (
        {"environment.history": {"last_images": 33}},
        "environment.history shows 33 images, and environment.episode.max_images is 32",
    ),
    (
        {"environment.history": "drop_thoughts", "environment.episode.environment": HARNESS},
        "environment.history does nothing: AgentEnv decides itself what the policy sees",
    ),
    (
        {
            "policy.loss": {"kl_coef": 0.1, "kl": {"in": "reward"}},
            "environment.episode.environment": HARNESS,
        },
        (
            r"needs trajectories of one sequence, and an agent \(AgentEnv\) may begin again: leave"
            r" `in: reward` out"
        ),
    ),
    (
        {
            "policy.loss": {"kl_coef": 0.1, "kl": {"in": "reward"}},
            "environment.kinds": {"agent": HARNESS},
        },
        r"an agent \(AgentEnv\) may begin again",
    ),
    (
        {"policy.loss.kl_coef": {"start": 0.1, "target": 0.05, "horizon": 10}},
        r"policy.loss.kl_coef.horizon: 10 can take the coefficient to 0 at once; set it above \d+",
    ),
    (
        {"policy.loss": {"kl_coef": 1.0, "kl": {"estimator": "k2", "unbiased": True}}},
        "kl: unbiased goes with estimator: k1 or k3",
    ),
    ({"policy.loss": {"kl": {"in": "reward", "unbiased": True}}}, "leave it out with in: reward"),
    (
        {"policy.loss.correction": {"bypass": True}},
        "bypass: true has weights of 1, .* set action: mask",
    ),
    ({"policy.loss.correction": {"veto": [1.5, 2.0]}}, r"veto: \[1.5, 2.0\] must hold 1"),
    ({"policy.loss.kl_coef": -0.1}, "kl_coef is -0.1; it must be 0 or more"),
    ({"policy.loss.aggregation": -5}, "policy.loss.aggregation"),
    ({"policy.loss.kl": "k4"}, "policy.loss.kl"),
    (
        {"algorithm.advantage": {"kind": "grpo", "use": "mine:own"}},
        "kind: grpo and use: mine:own are two .*; leave one out",
    ),
    ({"algorithm.advantage.kind": "grop"}, "algorithm.advantage.kind"),
    ({"algorithm.advantage": {"kind": "rloo", "with": {"gamma": 0.9}}}, "gamma"),
    ({"algorithm.advantage": {"kind": "grpo", "with": {"gamma": 0.9}}}, "gamma"),
    (
        {"algorithm.advantage": {"kind": "reinforce_pp", "with": {"of": "turns"}}},
        "advantages.*rewards",
    ),
    (
        {
            "algorithm.advantage": {"kind": "gigpo", "with": {"omga": 2}},
            "environment.episode.max_turns": 4,
        },
        "omga",
    ),
    ({"algorithm.advantage": {"use": "nowhere_at_all:own"}}, "nowhere_at_all"),
    ({"algorithm.advantage": {"use": "math:floor"}}, "no advantage|members"),
]

TAKEN: list[dict[str, Any]] = [
    {"algorithm.group_size": 1, "algorithm.advantage.kind": "raw"},
    {
        "algorithm.advantage": {"kind": "gigpo", "with": {"gamma": 0.9, "omega": 0.5}},
        "environment.episode.max_turns": 4,
    },
    {"algorithm.advantage": {"kind": "gdpo", "with": {"weights": {"iou": 1.0, "format": 0.5}}}},
    DISTILL | K2 | {"algorithm.group_size": 1},
    DISTILL | K2 | {"algorithm.filtering.filters": [{"kind": "equal_rewards"}]},
    DISTILL | {"policy.loss": {"kl_coef": 1.0, "kl": {"estimator": "k3", "unbiased": True}}},
    {"policy.loss.kl_coef": {"start": 0.1, "target": 0.05}},
]


def run(folder: Path, changes: dict[str, Any]) -> RunConfig:
    lora = {"engine": {"lora": {"rank": 4}}}
    config: dict[str, Any] = {
        "name": "run",
        "steps": 1,
        "model": {"path": "m"},
        "data": {"train": "rows.jsonl"},
        "policy": lora,
        "reward": {"source": {"use": "rayloop.recipes.digits.data:SortReward"}},
        "algorithm": {"group_size": 8},
    }
    for key, value in changes.items():
        *parents, last = key.split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    return read(folder / "run.yaml", [])


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[f"{said[:40]}" for _, said in REFUSED])
def test_it_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, changes)


@pytest.mark.parametrize("changes", TAKEN, ids=str)
def test_its_neighbour_is_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    assert isinstance(run(tmp_path, changes), RunConfig)
