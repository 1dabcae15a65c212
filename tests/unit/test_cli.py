"""The command line: what words mean, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.cli import evaluation_folder
from cluster.config import RunConfig

RUN: dict[str, Any] = {
    "name": "mine", "steps": 1, "model": {"path": "nowhere"}, "data": {"train": "nowhere.jsonl"}, "output": "out",
    "reward": {"source": {"use": "recipes.digits.reward:SortReward"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("checkpoint", "folder"),
    [
        (None, "out/mine-eval"),
        ("runs/other", "{}/runs/other-eval"),
        ("runs/other/checkpoints/step_000003", "{}/runs/other-eval"),
        ("models/qwen", "out/qwen-eval"),
    ],
)
def test_an_evaluation_is_kept_beside_the_run_whose_checkpoint_it_measures(
    tmp_path: Path, checkpoint: str | None, folder: str
) -> None:
    (tmp_path / "runs/other/checkpoints/step_000003").mkdir(parents=True)
    (tmp_path / "runs/other/config.yaml").write_text("name: other")
    (tmp_path / "models/qwen").mkdir(parents=True)
    named = None if checkpoint is None else tmp_path / checkpoint
    assert evaluation_folder(RunConfig.model_validate(RUN), named) == Path(folder.format(tmp_path))
