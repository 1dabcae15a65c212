"""The arms of ``python -m benchmarks.evidence filtering``: their configurations, and whom their
filters refuse.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.evidence.filtering import ARMS, LEARNERS, configuration, curve
from benchmarks.evidence.staleness import GROUPS
from rayloop.config.settings import check_components

ROOT = Path(__file__).parents[3]


def test_arms_differ_in_filters_ranking_and_groups_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for learner in (learner for learner in LEARNERS.values() if learner.config):
        runs = {arm: configuration(learner, arm, 3) for arm in ARMS}
        assert (
            len(
                {
                    run.model_dump_json(
                        exclude={"steps": True, "algorithm": {"filtering", "groups_per_step"}}
                    )
                    for run in runs.values()
                }
            )
            == 1
        )
        for arm, run in runs.items():
            check_components(run)
            filtering = run.algorithm.filtering
            assert (run.steps, run.seed) == (learner.steps * (2 if arm == "none" else 1), 3)
            assert filtering.ranking == ("std" if "ranked" in arm else "fifo")
            assert filtering.groups_per_generation == (
                12 if arm.endswith("ranked, half as many more") else None
            )
            assert run.algorithm.groups_per_step == (12 if arm == "none, half as many more" else 8)
            assert len(filtering.filters) == (
                0 if arm.startswith("none") else 1 if arm == "equal rewards" else 2
            )


def test_the_formula_trains_full_steps_and_each_filter_plays_for_what_it_drops() -> None:
    short = replace(LEARNERS["formula, learning rate 0.05"], steps=5)
    habits = {
        arm: curve(short, arm, 0).habits
        for arm in ("none", "equal rewards", "partial", "whole group")
    }
    assert habits["none"]["groups"] == GROUPS
    assert habits["none"]["trained"] == 1
    assert habits["none"]["used"] == pytest.approx(1 - habits["none"]["equal"])
    assert (
        habits["none"]["groups"]
        < habits["equal rewards"]["groups"]
        < habits["whole group"]["groups"]
    )
    assert habits["none"]["advantage"] == pytest.approx(0, abs=1e-3)
    assert habits["partial"]["advantage"] > 0.01, (
        "the malformed answers, which are below the mean, are missing"
    )
