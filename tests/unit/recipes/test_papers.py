"""docs/papers.md: each block is valid beside a model, data and a reward."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayloop.config.settings import check_components
from rayloop.run.config import read
from tests.support.runs import ROOT

PAGE = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def test_each_paper_has_a_block() -> None:
    assert list(BLOCKS) == re.findall(r"^## (.+)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("paper", BLOCKS)
def test_a_block_is_valid_beside_model_data_and_reward(paper: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    own = "" if "\nreward:" in BLOCKS[paper] else 'reward: {source: {use: "rayloop.recipes.arc_vision.reward:IoUReward"}}\n'
    base = "name: paper\nsteps: 10\nmodel: {path: model}\ndata: {train: rows.jsonl}\n" + own
    file.write_text(base + BLOCKS[paper], encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    config = read(file, [])
    assert config.algorithm.group_size > 1
    check_components(config)
