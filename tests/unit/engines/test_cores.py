"""The cores of a process, and how many torch threads a run gives to each process that computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rayloop.engines import machine
from rayloop.engines.machine import per_process, quota, usable
from rayloop.run.config import RunConfig
from tests.support.runs import settings


def test_a_control_group_takes_cores_away(tmp_path: Path) -> None:
    assert usable(tmp_path) == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("150000 100000\n", encoding="utf-8")
    assert (quota(tmp_path), usable(tmp_path)) == (1.5, 1)
    (tmp_path / "cpu.max").write_text("max 100000\n", encoding="utf-8")
    assert quota(tmp_path) is None


def threads(folder: Path, **changes: Any) -> tuple[int | None, int | None, int | None]:
    """Of an engine, a rank and a reference actor."""
    config = RunConfig.model_validate(
        settings(folder, folder, **{"rollout__engine": {}, "policy__engine": {}, **changes})
    )
    return (
        config.engine.threads,
        config.trainer.threads,
        config.scorer.threads,
    )


def test_processes_that_compute_at_once_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable", lambda: 12)
    assert [per_process(n) for n in (0, 1, 5, 12, 32)] == [12, 12, 2, 1, 1]
    assert threads(tmp_path) == (
        12,
        12,
        6,
    ), "engines and trainer take turns; the reference scores while engines generate"
    assert threads(tmp_path, rollout__actors=3, policy__ranks=2) == (4, 6, 3)
    assert threads(
        tmp_path, rollout__actors=3, policy__ranks=1, algorithm__staleness={"max_staleness": 1}
    ) == (3, 3, 3)


def test_a_number_of_the_configuration_counts(tmp_path: Path) -> None:
    assert threads(tmp_path, rollout__engine={"threads": 3}, policy__engine={"threads": 2}) == (
        3,
        2,
        2,
    )


def test_a_repeatable_run_and_one_on_gpus_do_not_look_at_the_cores(tmp_path: Path) -> None:
    assert threads(tmp_path, rollout__deterministic=True) == (None, None, None)
    assert threads(tmp_path, rollout__placement={"num_gpus": 1})[0] is None
