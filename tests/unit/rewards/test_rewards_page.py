"""docs/rewards.md: every example is a reward, and earns what it looks like."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayloop.config.settings import Component
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Message, Sampling, Task, Trajectory, TrajectoryId
from rayloop.rewards.functions import as_outcome, as_source
from rayloop.rewards.settings import REWARD, ROLES

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\w+)\n(.*?)```", PAGE, re.DOTALL))
TRAJECTORY = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE)
TASK = Task("t", (Message("user", ("One and two?",)),), "3", "sums", {"answer": "3"})
GOOD = "<think>1 + 2</think> <answer>3</answer>"

CASES: dict[str, list[tuple[str, dict[str, Any], str, Task, Outcome]]] = {
    "own_function": [("score", {}, "3", TASK, Scored(1.0)), ("score", {}, "4", TASK, Scored(0.0))],
    "with_components": [
        ("score", {}, "3.0", TASK, Scored(1.0, {"format": 1.0})),
        ("score", {"tolerance": 0.5}, "3.4", TASK, Scored(1.0, {"format": 1.0})),
        ("score", {}, "three", TASK, Scored(0.0, {"format": 0.0}, ("unparsable",))),
        ("score", {}, "3", Task("t", ()), Unscored(UnscoredKind.BAD_DATA, "the row has no answer")),
    ],
    "several": [
        ("score", {}, "3", TASK, Scored(1.1, {"exact": 1.0, "brief": 1.0})),
        ("score", {}, "4", TASK, Scored(0.1, {"exact": 0.0, "brief": 1.0})),
    ],
    "own_class": [
        ("Length", {}, "1234", TASK, Scored(-1.0)),
        ("Length", {"target": 4}, "1234", TASK, Scored(0.0)),
    ],
    "trl": [
        ("format_reward", {}, GOOD, TASK, Scored(1.0)),
        ("format_reward", {}, "3", TASK, Scored(0.0)),
        ("exact", {}, "3", TASK, Scored(1.0)),
    ],
    "verl": [("compute_score", {}, "3", TASK, Scored(1.0, {"acc": 1.0, "length": 1.0}))],
}


def test_every_example_is_tried() -> None:
    assert EXAMPLES.keys() == CASES.keys() | {"own_group"}
    assert len(EXAMPLES) == PAGE.count("```python")


@pytest.mark.parametrize("example", CASES)
def test_an_example_earns_what_it_looks_like(tmp_path: Path, example: str) -> None:
    file = tmp_path / f"{example}.py"
    file.write_text(EXAMPLES[example], encoding="utf-8")
    for name, options, text, task, expected in CASES[example]:
        component = Component(use=f"{file}:{name}", **{"with": options})
        REWARD.check(component)
        assert REWARD.function is not None
        source = REWARD.function(component.build(), component.use)
        assert as_outcome(source.score(TRAJECTORY, task, ScoreContext(0, [text]))) == expected


def test_the_example_of_a_group_pays_what_others_did_not_say(tmp_path: Path) -> None:
    file = tmp_path / "own_group.py"
    file.write_text(EXAMPLES["own_group"], encoding="utf-8")
    component = Component(use=f"{file}:score_group")
    ROLES["group"].check(component)
    source: Any = as_source(component.build(), component.use, "group")
    contexts = [ScoreContext(0, [text]) for text in ("3", "4", "3")]
    assert source.score_group([TRAJECTORY] * 3, TASK, contexts) == [0.5, 0.0, 0.5]


def test_the_configuration_of_the_page_is_one() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    lines = [
        line.replace("# source", "  source", 1) if line.startswith("# source") else line
        for line in block.splitlines()
    ]
    head, *sources = lines
    uses = [yaml.safe_load(f"{head}\n{source}")["reward"]["source"] for source in sources]
    assert [Component.model_validate(use).use for use in uses] == [
        "my_reward:score",
        "path/to/file.py:score",
        "my_reward:score",
    ]
