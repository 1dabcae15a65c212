"""examples/grpo_in_one_file.py against a run of the cluster: the same algorithm on the same rows
has the same numbers.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples import grpo_in_one_file as one_file
from rayloop.cli import main
from rayloop.engines.models import hf_state
from tests.support.runs import finished

pytestmark = pytest.mark.timeout(300)

STEPS = 3


def configuration(folder: Path) -> dict[str, Any]:
    """The settings of one_file.py as those of a run that samples and trains with the same kernels,
    threads and batches.
    """
    model = one_file.MODEL.model_dump(exclude_unset=True)
    return {
        "name": "run",
        "output": str(folder),
        "steps": STEPS,
        "seed": one_file.SEED,
        "model": model,
        "data": {
            "train": str(one_file.ROWS),
            "reader": {
                "use": "rayloop.recipes.arc_vision.data:GroundingRows",
                "with": one_file.READER.model_dump(),
            },
        },
        "rollout": {
            "sampling": {"max_tokens": one_file.SAMPLING.max_tokens},
            "engine": {"threads": one_file.THREADS},
            "deterministic": True,
        },
        "reward": {"source": {"use": "rayloop.recipes.arc_vision.reward:IoUReward"}},
        "policy": {
            "engine": {"threads": one_file.THREADS},
            "optimizer": one_file.OPTIMIZER.model_dump(exclude_unset=True),
            "loss": one_file.LOSS.model_dump(exclude_unset=True),
            "update": one_file.UPDATE.model_dump(exclude_unset=True),
        },
        "algorithm": {"group_size": one_file.GROUP_SIZE, "groups_per_step": one_file.GROUPS},
        "weight_sync": {"logprob_check": "stop"},
        "checkpoint": {"every": STEPS},
    }


@pytest.mark.slow_faults
def test_one_file_and_the_cluster_have_the_same_rewards_losses_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_file, "GROUPS", 4)
    before = torch.get_num_threads()
    try:
        alone = one_file.OneFile()
        reports = list(itertools.islice(alone.steps(), STEPS))
    finally:
        torch.set_num_threads(before)
    made = finished(configuration(tmp_path))

    assert alone.updates == STEPS * one_file.UPDATE.mini_batches
    assert [metrics["actor/loss"] for metrics in made.metrics] == [loss for _, loss in reports]
    assert [metrics["reward/mean"] for metrics in made.metrics] == [reward for reward, _ in reports]
    assert main(["export", str(made.folder), str(tmp_path / "model")]) == 0
    trained, weights = load_file(tmp_path / "model" / "model.safetensors"), hf_state(alone.policy)
    start = load_file(Path(one_file.MODEL.path) / "model.safetensors")
    assert trained.keys() <= weights.keys()
    assert [name for name in trained if not torch.equal(trained[name], weights[name])] == []
    assert not any(torch.equal(trained[name], start[name].float()) for name in trained), (
        "every weight has been trained"
    )
