"""docs/papers.md: each block is valid beside a model, data and a reward."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rayloop.config.settings import check_components
from rayloop.core.groups import Group, Scored, Status, TrajectoryState
from rayloop.core.types import Task, TrajectoryId
from rayloop.grpo.advantage import build_advantage, over_step, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.idle import Situation, idle
from rayloop.grpo.losses.policy import PolicyLoss
from rayloop.grpo.losses.settings import PpoLoss
from rayloop.grpo.replay import ReplayBuffer
from rayloop.grpo.selection import apply_filters
from rayloop.grpo.settings import AdvantageChoice
from rayloop.run.config import RunConfig, read
from tests.support.gradients import apart
from tests.support.runs import ROOT
from tests.unit.groups import make_group, make_member

PAGE = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
FOUND = {
    paper: re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for paper, text in SECTIONS.items()
}
BLOCKS = {
    paper if not i else f"{paper} {i + 1}": block
    for paper, blocks in FOUND.items()
    for i, block in enumerate(blocks)
}
CHOICES = {
    "Other losses and advantages": "gspo, cispo, sapo, dppo",
    "Other losses and advantages 2": "gigpo, rloo, reinforce_pp, batch_std, maxrl, turns",
}
"""Blocks that stand for several kinds."""


def test_each_paper_has_a_block() -> None:
    assert all(FOUND.values())


def loaded(paper: str, tmp_path: Path) -> RunConfig:
    file = tmp_path / "run.yaml"
    own = (
        ""
        if "\nreward:" in BLOCKS[paper]
        else 'reward: {source: {use: "rayloop.recipes.arc_vision.reward:IoUReward"}}\n'
    )
    base = "name: paper\nsteps: 10\nmodel: {path: model}\ndata: {train: rows.jsonl}\n" + own
    file.write_text(base + BLOCKS[paper], encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    return read(file, [])


@pytest.mark.parametrize("paper", BLOCKS)
def test_a_block_is_valid_beside_model_data_and_reward(paper: str, tmp_path: Path) -> None:
    config = loaded(paper, tmp_path)
    assert config.algorithm.group_size > 1
    check_components(config)


def test_dapo_leaves_out_answers_that_were_cut(tmp_path: Path) -> None:
    settings = loaded("DAPO", tmp_path).algorithm
    group = with_advantages(make_group(0, [1.0, 0.0, 0.0]), build_advantage(settings.advantage))
    cut = replace(group.members[1], summary=replace(group.members[1].summary, cut=True))
    filtered = apply_filters(group.map({1: cut}), build_filters(settings.filtering.filters))
    assert [member.kept for member in filtered.members] == [True, False, True]


# Whether a block's method acts --------------------------------------------------------------------


def kinds() -> list[tuple[str, str, str]]:
    """Block, its text, and the kind that stands in it, of each that its comment offers."""
    made = []
    for paper, block in BLOCKS.items():
        first, *others = CHOICES.get(paper, "").split(", ")
        made += [
            (paper, block.replace(f"kind: {first}}}", f"kind: {kind}}}") if kind else block, kind)
            for kind in (first, *others)
        ]
    return made


VARIANTS = kinds()


@pytest.mark.parametrize(
    ("paper", "block", "kind"),
    VARIANTS,
    ids=[f"{paper} {kind}".strip() for paper, _, kind in VARIANTS],
)
def test_a_blocks_method_acts(
    paper: str, block: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its settings changes the gradients or advantages, beside its others; those that are
    defaults are the base.
    """
    monkeypatch.setitem(BLOCKS, paper, block)
    config = loaded(paper, tmp_path)
    assert kind in ("", config.policy.loss.model_dump()["kind"], config.algorithm.advantage.kind)
    situation = Situation(longest=config.environment.episode.max_tokens)
    assert idle(config.policy.loss, config.algorithm, config.policy.update, situation) == []
    given = yaml.safe_load(block)
    advantage = given.get("algorithm", {}).get("advantage")
    whole: dict[str, Any] = {
        f"loss.{key}": value for key, value in given.get("policy", {}).get("loss", {}).items()
    }
    whole |= {
        f"update.{key}": value for key, value in given.get("policy", {}).get("update", {}).items()
    }
    whole |= {"algorithm.advantage": advantage} if advantage else {}
    for key in whole:
        rest = {name: value for name, value in whole.items() if name != key}
        if key == "algorithm.advantage":
            assert credits_of(advantage) != credits_of({"kind": "grpo"})
        elif key.startswith("loss.") and not is_default(key, whole[key]):
            assert apart(whole, rest, situation) > 1e-4, key


def is_default(key: str, value: Any) -> bool:
    found: Any = PpoLoss.model_fields.get(key.removeprefix("loss."))
    return found is not None and found.default == value


def credits_of(advantage: dict[str, Any]) -> list[tuple[float, ...]]:
    """Of a step of two groups, one of which is partial, of trajectories with turns."""
    how = build_advantage(AdvantageChoice.model_validate(advantage))
    groups = []
    for number, rewards in enumerate(([1.0, 0.0, 0.5, 0.25], [1.0, 1.0, 0.0, 2.0])):
        members = tuple(
            make_member(
                TrajectoryId(number, i),
                Scored(reward),
                turns=2 + i,
                states=("p", "a", *"bcde"[:i]),
                turn_rewards=(),
            )
            for i, reward in enumerate(rewards)
        )
        groups.append(with_advantages(Group(number, Task("t", ()), members), how))
    gone = {0: replace(groups[1].members[0], status=Status(TrajectoryState.FILTERED, "x"))}
    step = over_step([groups[0], groups[1].map(gone)], how)
    return [
        (*m.credit.turns, m.credit.advantage, m.credit.streams.rl)
        for g in step
        for m in g.kept
        if m.credit is not None
    ]


def test_scalerls_weights_and_advantages_are_the_papers(tmp_path: Path) -> None:
    """arXiv:2510.13786: min(pi / pi_gen, 5) times the advantage over the deviation of all
    advantages.
    """
    config = loaded("ScaleRL's parts", tmp_path)
    loss = config.policy.loss
    for gap in (0.3, 1.0, 1.5, 2.0):
        logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        ones, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
        out = PolicyLoss(loss)(logprobs, logprobs.detach(), logprobs.detach() - gap, ones, zero)
        assert torch.autograd.grad(-out.rl.sum(), logprobs)[0].item() == pytest.approx(
            min(math.exp(gap), 5.0)
        )
    assert config.algorithm.advantage.kind == "batch_std"


def test_arpos_stored_success_is_replayed_and_its_clip_holds(tmp_path: Path) -> None:
    config = loaded("ARPO", tmp_path)
    buffer = ReplayBuffer(config.algorithm.replay, seed=0)
    success = make_member(TrajectoryId(0, 0), Scored(1.0), "task")
    buffer.store(Group(0, Task("task", ()), (success,)))
    failed = make_group(1, [0.0] * config.algorithm.group_size, "task")
    assert buffer.inject(failed).group.members[0].replayed
    assert config.policy.update.mini_batches == 2
