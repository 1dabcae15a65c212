"""``python -m cluster train`` as a user meets it: exit codes, the run folder, preemption, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import finished, ledger_closes, settings

pytestmark = pytest.mark.timeout(300)


def test_a_run_trains_its_steps_and_leaves_nothing_behind(tmp_path: Path, digits_model: Path) -> None:
    run = finished(settings(tmp_path, digits_model))
    assert [record["step"] for record in run.metrics] == [1, 2, 3]
    [end] = run.named("finished")
    ledger_closes(end["ledger"])
    assert end["ledger"]["trained"] == 3 * 8
    assert [len(e["groups"]) for e in run.named("trained")] == [2, 2, 2]
