"""docs/papers.md: each block is valid beside a model, data and a reward."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rayloop.config.settings import check_components
from rayloop.grpo.advantage import build_advantage, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.selection import apply_filters
from rayloop.run.config import RunConfig, read
from tests.support.runs import ROOT
from tests.unit.groups import make_group

PAGE = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def test_each_paper_has_a_block() -> None:
    assert list(BLOCKS) == re.findall(r"^## (.+)$", PAGE, re.MULTILINE)


def loaded(paper: str, tmp_path: Path) -> RunConfig:
    file = tmp_path / "run.yaml"
    own = "" if "\nreward:" in BLOCKS[paper] else 'reward: {source: {use: "rayloop.recipes.arc_vision.reward:IoUReward"}}\n'
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
