"""Runs with a reference of their own: a teacher, and one that takes over the policy's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rayloop.engines.tiny_vlm import write_tiny_vlm
from rayloop.run.checkpoint import CheckpointStore
from tests.support.models import SIZES, TEXTS
from tests.support.runs import Run, finished, settings

pytestmark = pytest.mark.timeout(600)
DISTILL = {"kind": "distill"}
KL = {"kl_coef": 1.0, "kl": "k2"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of ``digits_model`` with other weights, more layers and a sharper head."""
    torch.set_num_threads(1)
    return write_tiny_vlm(
        tmp_path_factory.mktemp("teacher"),
        TEXTS,
        vision=False,
        seed=1,
        **SIZES | {"layers": 2, "init": 0.1},
    )


def kl(made: Run) -> dict[int, float]:
    return {record["step"]: record["actor/kl"] for record in made.metrics}


@pytest.mark.slow_faults
@pytest.mark.parametrize("engine", [{}, {"lora": {"rank": 16}}], ids=["full", "lora"])
def test_the_policy_approaches_its_teacher(
    tmp_path: Path, digits_model: Path, teacher: Path, engine: dict[str, Any]
) -> None:
    made = finished(
        settings(
            tmp_path,
            digits_model,
            policy__engine={"threads": 1, **engine},
            policy__loss=KL,
            policy__optimizer={"lr": 1.0e-2},
            reference={"path": str(teacher)},
            algorithm__advantage=DISTILL,
            algorithm__filtering={"filters": []},
        )
    )
    found = kl(made)
    assert found[1] > found[2] > found[3] > 0
    assert all(record["rollout/trained"] == 8 for record in made.metrics)


@pytest.mark.slow_faults
def test_a_refreshed_reference_is_the_same_after_a_resume(
    tmp_path: Path, digits_model: Path
) -> None:
    def config(name: str, steps: int) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return settings(
            folder,
            digits_model,
            steps=steps,
            rollout__deterministic=True,
            policy__loss={"kl_coef": 0.1},
            policy__optimizer={"lr": 1.0e-2, "schedule": "constant"},
            reference={"refresh_every": 2},
        )

    whole = finished(config("whole", 5))
    found = kl(whole)
    assert max(found[step] for step in (1, 3, 5)) < 1e-8 < min(found[step] for step in (2, 4))

    finished(config("resumed", 3))
    (made,) = (tmp_path / "resumed/run/reference").iterdir()
    assert made.name == "2-1"
    newest = CheckpointStore(tmp_path / "resumed/run/checkpoints", keep=1).newest_first()[0]
    weights = newest.folder / "reference/2-1/model.safetensors"
    assert weights.samefile(made / "model.safetensors"), "it costs no space"
    for file in made.iterdir():
        file.unlink()
    made.rmdir()
    resumed = finished(config("resumed", 5))
    assert resumed.named("begin")[-1]["restored"] is not None
    assert kl(resumed) == found
    assert sorted(path.name for path in (tmp_path / "resumed/run/reference").iterdir()) == [
        "2-1",
        "4-2",
    ]
