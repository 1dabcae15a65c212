"""What is said to do nothing has the gradients of the default, and nothing else has: over the whole
menu.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rayloop.core.groups import Group, Scored
from rayloop.core.types import EndReason, Task, TrajectoryId
from rayloop.doctor import checks
from rayloop.grpo.advantage import build_advantage, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.idle import idle
from rayloop.run.config import RunConfig, read
from rayloop.run.preflight import idle_settings, prepare
from tests.support.gradients import apart
from tests.support.runs import ROOT
from tests.unit.groups import make_member
from tools.pages.idle import ENTRIES, SITUATIONS, Changes, baseline, built, cell, idles, page

torch.set_num_threads(1)
CELLS = [
    (entry, situation)
    for entry in ENTRIES
    for situation in SITUATIONS
    if cell(entry, situation) is not None
]


def refuses(changes: Changes) -> bool:
    """Whether the first filter takes anything out of random groups."""
    _, algorithm, _ = built(changes)
    (first, *_), how = (
        build_filters(algorithm.filtering.filters),
        build_advantage(algorithm.advantage),
    )
    chance = random.Random(0)
    for number in range(50):
        rewards = [chance.choice([0.0, 0.5, 1.0]) for _ in range(chance.randint(2, 4))]
        members = tuple(
            make_member(TrajectoryId(number, i), Scored(reward)) for i, reward in enumerate(rewards)
        )
        if first.refused(with_advantages(Group(number, Task("t", ()), members), how)):
            return True
    return False


@pytest.mark.parametrize(
    ("entry", "situation"), CELLS, ids=[f"{entry}; {situation}" for entry, situation in CELLS]
)
def test_what_is_said_to_do_nothing_does_nothing_and_all_else_acts(
    entry: str, situation: str
) -> None:
    said, (changes, facts) = cell(entry, situation), SITUATIONS[situation]
    assert said is not None
    if "filters" in entry:
        assert refuses({**changes, **ENTRIES[entry]}) != idles(entry, said)
        return
    found = apart({**changes, **ENTRIES[entry]}, {**changes, **baseline(entry)}, facts)
    assert found < 1e-12 if idles(entry, said) else found > 1e-4


def test_the_page_is_the_menus() -> None:
    assert (ROOT / "docs/idle_settings.md").read_text(encoding="utf-8") == page(), (
        "python -m tools.pages.idle"
    )


def test_a_default_is_never_said() -> None:
    for changes, facts in SITUATIONS.values():
        assert idle(*built({}), facts) == []
        spelled = {
            "loss.clip_high": 0.2,
            "loss.kl": "k3",
            "loss.correction": "decoupled",
            "loss.kind": "ppo",
        }
        assert idle(*built(spelled), facts) == [], changes


# What is computed from a configuration ------------------------------------------------------------


def run(folder: Path, text: str) -> RunConfig:
    base: dict[str, Any] = {
        "name": "run",
        "steps": 1,
        "model": {"path": str(ROOT / "recipes/arc_vision/loose")},
        "data": {"train": "rows.jsonl"},
        "reward": {"source": {"use": "rayloop.recipes.digits.data:SortReward"}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(base | yaml.safe_load(text)), encoding="utf-8")
    (folder / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    return read(folder / "run.yaml", [])


SAID = [
    (
        "policy: {loss: {clip_high: 0.3}}",
        "policy.loss.clip_high: 0.3 does nothing here: no clip holds",
    ),
    (
        "policy: {loss: {correction: bypass}}",
        "engine and trainer compute the same log-probs up to rounding",
    ),
    (
        "policy: {loss: {entropy_coef: {target: 20}}}",
        r"entropy_coef.target: 20 cannot be reached: .* more than \d",
    ),
    (
        "{policy: {loss: {entropy_coef: {target: 2}}}, rollout: {sampling: {top_k: 4}}}",
        r"target: 2 cannot be reached: no distribution here has more than 1.39 nats",
    ),
    (
        "{algorithm: {staleness: {when_late: drop}}}",
        "when_late: drop does nothing here: with max_staleness: 0 nothing is late",
    ),
    (
        "{algorithm: {filtering: {filters: [{kind: max_length, tokens: 9000}]}}}",
        "max_length, tokens 9000 does nothing here: an episode has at most 8192 tokens",
    ),
    (
        (
            "{algorithm: {filtering: {filters: [{kind: end_reason, keep:"
            f" [{', '.join(EndReason)}]}}]}}}}}}"
        ),
        "end_reason does nothing here: it keeps every end reason",
    ),
    (
        (
            "{algorithm: {group_size: 1, advantage: {kind: raw}, filtering: {filters: [{kind:"
            " equal_rewards}, {kind: overlong}]}}}"
        ),
        "equal_rewards does nothing here: with group_size: 1",
    ),
    (
        "{algorithm: {replay: {kind: corrected}}, policy: {loss: {correction: none}}}",
        "replay.kind: corrected does nothing here: with policy.loss.correction: none",
    ),
    (
        "{policy: {loss: {kl: k2}}}",
        "policy.loss.kl: k2 does nothing here: policy.loss.kl_coef is 0",
    ),
]
NOT_SAID = [
    "{}",
    "{policy: {loss: {clip_high: 0.3}, update: {mini_batches: 2}}}",
    "{policy: {loss: {correction: bypass}}, algorithm: {staleness: {max_staleness: 1}}}",
    "{policy: {loss: {correction: bypass}, engine: {dtype: bfloat16}}}",
    "{policy: {loss: {correction: {off_policy: 0.1}}, update: {epochs: 2}}}",
    "{policy: {loss: {entropy_coef: {target: 0.3}}}}",
    (
        "{algorithm: {filtering: {filters: [{kind: max_length, tokens: 9000}]}}, environment:"
        " {history: drop_thoughts}}"
    ),
    "{algorithm: {replay: {kind: corrected}}}",
    (
        "{algorithm: {replay: {kind: corrected}}, policy: {loss: {correction: {level: token,"
        " action: mask, high: 3}}}}"
    ),
]


@pytest.mark.parametrize(("text", "said"), SAID, ids=[said[:40] for _, said in SAID])
def test_a_configuration_says_it(text: str, said: str, tmp_path: Path) -> None:
    found = idle_settings(run(tmp_path, text))
    assert len(found) == 1
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found[0])


def test_doctor_says_it_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "preflight", lambda prepared: None)
    found = checks.configuration(prepare(run(tmp_path, "policy: {loss: {clip_high: 0.3}}")))
    [said] = [one for one in found if "clip_high" in one.found]
    assert said.level == "warning"
    assert (
        said.remedy
        == "Set policy.update.mini_batches to 2 or more, or policy.loss.correction to bypass"
    )


@pytest.mark.parametrize("text", NOT_SAID)
def test_a_configuration_has_nothing_to_say(text: str, tmp_path: Path) -> None:
    assert idle_settings(run(tmp_path, text)) == []


@pytest.mark.parametrize(
    "name",
    [
        "digits/quickstart",
        "arpo/quickstart",
        "arpo/arpo",
        "pyvision/quickstart",
        "chart_rvr/quickstart",
    ],
)
def test_the_recipes_have_no_such_setting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (
        idle_settings(read(Path(f"recipes/{name}.yaml"), ["model.path=recipes/arc_vision/loose"]))
        == []
    )
