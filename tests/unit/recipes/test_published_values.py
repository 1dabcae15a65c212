"""The first lines of a configuration name what is not the original's: each of these values is another one in it."""

from __future__ import annotations

from functools import reduce

import pytest

from rayloop.run.config import read
from tests.support.runs import ROOT


@pytest.mark.parametrize(
    ("name", "said", "key", "original"),
    [
        ("arpo/arpo", "every 8 steps", "evaluation.every", 8),
        ("arpo/arpo", "three kept", "checkpoint.keep", 3),
        ("arpo/arpo", "memory (0.6)", "rollout.engine.memory_fraction", 0.6),
        ("arpo/osworld", "max_images (15)", "environment.episode.max_images", 15),
        ("arc_vision/arc_vision", "which are 20 updates", "policy.optimizer.warmup_steps", 20),
        ("arc_vision/arc_vision", "engine (SGLang)", "rollout.engine.kind", "sglang"),
        ("chart_rvr/chart_rvr", "falls linearly to 0", "policy.optimizer.schedule", "linear"),
    ],
)
def test_what_is_said_to_be_another_value_is_one(name: str, said: str, key: str, original: object) -> None:
    file = ROOT / f"recipes/{name}.yaml"
    first = " ".join(line.lstrip("# ") for line in file.read_text(encoding="utf-8").partition("\nname:")[0].splitlines())
    assert said in first
    assert reduce(getattr, key.split("."), read(file, [])) != original
