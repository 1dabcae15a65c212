"""The expected calibration error, and where it is logged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayloop.core.groups import Scored
from rayloop.measure.intervals import calibration_error
from rayloop.run.records.step_metrics import Collected, step_metrics
from tests.unit.groups import make_group


@pytest.mark.parametrize(
    ("confidences", "right", "error"),
    [
        ([1.0, 1.0], [1.0, 1.0], 0.0),
        ([1.0, 1.0], [0.0, 0.0], 1.0),
        ([0.9, 0.9, 0.9, 0.9], [1.0, 1.0, 1.0, 0.0], 0.15),
        ([0.95, 0.25], [1.0, 1.0], (0.05 + 0.75) / 2),
        ([0.72, 0.78], [1.0, 0.0], abs(0.5 - 0.75)),
        ([0.0, 1.0], [0.0, 1.0], 0.0),
    ],
)
def test_it_is_the_mean_gap_between_what_is_said_and_what_is_right(
    confidences: list[float], right: list[float], error: float
) -> None:
    assert calibration_error(confidences, right) == pytest.approx(error)


@pytest.mark.parametrize(("confidences", "right"), [([], []), ([0.5], [])])
def test_there_must_be_pairs(confidences: list[float], right: list[float]) -> None:
    with pytest.raises(ValueError, match="as many"):
        calibration_error(confidences, right)


def test_a_step_logs_it_where_answers_state_a_confidence() -> None:
    group = make_group(0, [1.0, 0.0])
    sure = {"confidence": 0.9, "right": 1.0}
    said = group.map({0: replace(group.members[0], outcome=Scored(1.0, sure))})
    assert step_metrics(Collected((said,), (said,)), 2)[
        "reward/calibration_error"
    ] == pytest.approx(0.1)
    assert "reward/calibration_error" not in step_metrics(Collected((group,), (group,)), 2)
