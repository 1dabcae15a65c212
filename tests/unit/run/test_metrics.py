"""The table of metrics: what producers write is in it, and docs/metrics.md says the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayloop.cluster.loop.loggers import open_logger
from rayloop.core.groups import (
    Credit,
    Group,
    Member,
    Scored,
    Status,
    TrajectoryState,
    Unscored,
    UnscoredKind,
)
from rayloop.core.types import EndReason, ImagesSent, Summary, Task, TrajectoryId, Version
from rayloop.grpo.losses.metrics import LossMetrics
from rayloop.grpo.losses.surrogates import LossOutputs
from rayloop.run.config import RunConfig
from rayloop.run.records.metrics import METRICS, prometheus, validate
from rayloop.run.records.step_metrics import Collected, step_metrics
from rayloop.run.reporter import Reporter
from tests.support.runs import settings
from tests.unit.groups import make_group, make_member
from tools.pages.metrics import reference

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_is_made_from_the_table() -> None:
    assert DOCS.read_text(encoding="utf-8") == reference(), (
        "run: python -m tools.pages.metrics > docs/metrics.md"
    )


def test_names_are_unique_and_explained() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.unit and metric.meaning.endswith(".") for metric in METRICS)


def test_unknown_names_are_found_and_families_allowed() -> None:
    assert validate(["reward/mean", "ledger/filtered[all_wrong]", "reward/geo3k/easy/mean"]) == ()
    assert validate(["reward/mena", "ledger/", "xreward/mean", "actor/anything"]) == (
        "reward/mena",
        "ledger/",
        "xreward/mean",
        "actor/anything",
    )


@pytest.mark.parametrize(
    ("name", "expected", "labels"),
    [
        ("reward/mean", "rayloop_reward_mean", {"source": ""}),
        ("reward/geo3k/easy/mean", "rayloop_reward_mean", {"source": "geo3k/easy"}),
        (
            "reward/component/iou/mean",
            "rayloop_reward_component_mean",
            {"name": "iou", "source": ""},
        ),
        ("ledger/filtered[all_wrong]", "rayloop_ledger", {"state": "filtered[all_wrong]"}),
        (
            "reward/geo/component/iou/mean",
            "rayloop_reward_component_mean",
            {"name": "iou", "source": "geo"},
        ),
        (
            "tool_call_counts/geo3k/easy/max",
            "rayloop_tool_call_counts_max",
            {"source": "geo3k/easy"},
        ),
        ("rollout/trained/geo", "rayloop_rollout_trained", {"source": "geo"}),
        ("actor/logprob_mismatch_k3/lag_2", "rayloop_actor_logprob_mismatch_k3_lag", {"lag": "2"}),
        ("val/reward/mean", "rayloop_val_reward_mean", {"source": ""}),
        ("val/digits/reward/mean", "rayloop_val_reward_mean", {"source": "digits"}),
        ("val/iou/mean", "rayloop_val_mean", {"component": "iou"}),
        (
            "val/control/other source/iou/mean",
            "rayloop_val_control_mean",
            {"arm": "other source", "component": "iou"},
        ),
        ("my recipe's/own-number", "rayloop_my_recipe_s_own_number", {}),
    ],
)
def test_parts_of_a_name_are_labels_for_prometheus(
    name: str, expected: str, labels: dict[str, str]
) -> None:
    row, found = prometheus(name)
    assert (row.prometheus, found) == (expected, labels)


def test_no_two_metrics_are_one_series_of_prometheus() -> None:
    assert len({(metric.prometheus, frozenset(metric.labels)) for metric in METRICS}) == len(
        METRICS
    )
    assert not any("run" in metric.labels for metric in METRICS), "it is the label of the run"
    assert {"rayloop_step", "rayloop_timing_s_gen", "rayloop_ledger"} <= {
        metric.prometheus for metric in METRICS
    }


def test_what_the_driver_records_is_in_the_table() -> None:
    version = Version(0, 1)
    outcomes = (
        (Scored(1.0, {"exact": 1.0}, ("late",)), None),
        (Scored(0.0, {"exact": 0.0}), Status(TrajectoryState.FILTERED, "max_length")),
        (Unscored(UnscoredKind.TIMEOUT), Status(TrajectoryState.EXCLUDED, "timeout")),
    )
    ended = Summary(
        TrajectoryId(0, 0), 0, "t", "digits", EndReason.DONE, 9, 3, 1, 1, 0, True, version, version
    )
    sent = ImagesSent(images=2, bytes=100, again=1)
    spans = (
        ("reset", 0.0, 0.5),
        ("generate", 1.0, 3.0),
        ("step", 3.0, 4.0),
        ("generate", 4.0, 4.5),
    )
    members = tuple(
        Member(
            replace(ended, id=TrajectoryId(0, i), cut=i == 0, sent=sent, spans=spans[: 4 - i]),
            outcome,
            status=status,
        )
        for i, (outcome, status) in enumerate(outcomes)
    )
    group = Group(0, Task("t", ()), members)
    held = {"stored": 3, "tasks": 2, "per_task": {}}
    produced = step_metrics(Collected((group,), (group,), replay=held), target=4)
    assert (produced["replay/stored"], produced["replay/tasks"]) == (3.0, 2.0)
    assert "replay/stored" not in step_metrics(Collected((group,), (group,)), target=4)
    assert {
        "reward/mean",
        "reward/digits/mean",
        "filtered/max_length",
        "excluded/timeout",
    } <= produced.keys()
    assert produced["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert produced["rollout/seconds/engine"] == pytest.approx((2.5 + 2 + 2) / 3)
    assert produced["rollout/seconds/environment"] == pytest.approx((1.5 + 1.5 + 0.5) / 3)
    names = ("rollout/images_sent", "rollout/images_sent_again", "rollout/image_bytes_sent")
    assert [produced[name] for name in names] == [6, 3, 300]
    assert validate(produced) == ()


def test_a_source_has_its_components_and_calls() -> None:
    """Of a mixed step; a right answer that is pushed down is one that others of its group beat by
    their calls.
    """
    rows = [
        ("charts", 1.0, 0, -0.1),
        ("charts", 1.2, 2, 0.1),
        ("charts", 0.0, 1, -1.0),
        ("maps", 0.0, 0, -0.5),
    ]
    members = tuple(
        make_member(
            TrajectoryId(0, i),
            Scored(value, {"right": float(value >= 1), "calls": calls}),
            source=source,
        )
        for i, (source, value, calls, _) in enumerate(rows)
    )
    credits = [None if row[3] is None else Credit(row[3]) for row in rows]
    members = tuple(
        replace(member, credit=credit) for member, credit in zip(members, credits, strict=True)
    )
    taken = Group(0, Task("t", ()), members[:3])
    found = step_metrics(
        Collected((taken,), (taken, Group(1, Task("u", ()), members[3:]))), target=4
    )
    assert found["reward/charts/component/calls/mean"] == 1
    assert found["reward/charts/component/right/mean"] == pytest.approx(2 / 3)
    assert [found[f"tool_call_counts/charts/{name}"] for name in ("min", "max", "zero_ratio")] == [
        0,
        2,
        pytest.approx(1 / 3),
    ]
    assert found["tool_call_counts/maps/zero_ratio"] == 1
    assert (
        found["rollout/trained/charts"],
        found["rollout/played/maps"],
        "rollout/trained/maps" in found,
    ) == (3, 1, False)
    assert found["rollout/right_negative_advantage"] == 0.5
    assert validate(found) == ()
    judged = [replace(member, outcome=Scored(1.0, {"accuracy": 1.0})) for member in members[:2]]
    group = Group(0, Task("t", ()), tuple(judged))
    assert step_metrics(Collected((group,)), target=2)["rollout/right_negative_advantage"] == 0.5
    assert "rollout/right_negative_advantage" not in step_metrics(
        Collected((make_group(0, [1.0, 0.0]),)), target=2
    )


def test_the_last_turn_is_told_apart_by_what_the_environment_paid() -> None:
    paid = [
        make_member(TrajectoryId(0, n), Scored(1.0), end_reason=EndReason.MAX_TURNS, env_result=r)
        for n, r in enumerate((0.5, 0.0))
    ]
    others = [
        make_member(TrajectoryId(0, 2), Scored(1.0), end_reason=EndReason.MAX_TURNS),
        make_member(TrajectoryId(0, 3), Scored(1.0)),
    ]
    group = Group(0, Task("t", ()), (*paid, *others))
    found = step_metrics(Collected((group,), (group,)), target=4)
    assert (found["rollout/paid_at_max_turns"], found["end_reason/done"]) == (0.25, 0.25)
    assert validate(found) == ()


def test_rates_are_those_of_a_step_without_its_evaluation(tmp_path: Path) -> None:
    """With it the curve would show the evaluation in every so many steps."""
    config = RunConfig.model_validate(settings(tmp_path, tmp_path))
    version = Version(0, 1)
    ended = Summary(
        TrajectoryId(0, 0), 0, "t", "", EndReason.DONE, 900, 600, 1, 0, 0, True, version, version
    )
    group = Group(0, Task("t", ()), (Member(ended, Scored(1.0)),))
    seconds = {"gen": 2.0, "update_actor": 1.0, "testing": 12.0}
    record = Reporter(config, tmp_path, open_logger).step(
        1, {}, Collected((group,), (group,)), {}, seconds, {}
    )
    assert record["perf/tokens_per_second"] == pytest.approx(200)
    assert record["perf/trajectories_per_second"] == pytest.approx(1 / 3)
    assert record["timing_s/step"] == pytest.approx(15)


def test_what_the_loss_reports_is_in_the_table() -> None:
    ones = torch.ones(5)
    metrics = LossMetrics.of(
        ratio=ones,
        clips=LossOutputs(ones, ones > 0, ones > 0, ones > 0),
        capped=ones > 0,
        mismatch=ones,
        mismatch_k3=ones,
        kl=ones,
        entropy=ones,
        lag=torch.arange(5),
    ).finalize()
    assert len(metrics) == 19
    assert validate(f"actor/{name}" for name in metrics) == ()
