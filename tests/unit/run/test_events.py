"""The table of events: every kind is emitted where it says, what is recorded fits it, and
docs/events.md says the same.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from rayloop.cluster.loop.loggers import open_logger
from rayloop.core import events, incidents
from rayloop.core.failures import DataFailure
from rayloop.measure.controls import RIGHT, SAMPLED, Item
from rayloop.run.config import RunConfig
from rayloop.run.folder import SHOWN_ROWS
from rayloop.run.order import training_rows
from rayloop.run.records.events import KINDS, PARTS, EventLog
from rayloop.run.records.step_metrics import Collected
from rayloop.run.reporter import Reporter, Updates
from rayloop.view.formatting import EXAMPLE
from tests.support.event_records import validate
from tests.support.runs import settings
from tools.pages.events import COMMON, reference

ROOT = Path(__file__).parents[3]
PACKAGES = ("rayloop", "judge", "recipes", "actors", "cluster", "serve_apps", "benchmarks")
MODULES = tuple(module.__name__.rpartition(".")[2] for module in PARTS.values())


def constructed() -> dict[str, set[str]]:
    """Class -> the files in which ``events.Class(...)`` or ``incidents.Class(...)`` is called."""
    found = defaultdict(set)
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if (
                    module in MODULES
                ):
                    found[name].add(str(path.relative_to(ROOT)))
    return found


def test_the_page_is_made_from_the_table() -> None:
    assert (ROOT / "docs/events.md").read_text(encoding="utf-8") == reference(), (
        "run: python -m tools.pages.events > docs/events.md"
    )


def test_every_kind_is_reported_by_the_file_that_it_names_and_by_no_other() -> None:
    assert constructed() == {cls.__name__: {cls.by} for cls in KINDS.values()}


def test_every_kind_and_every_field_says_what_it_means() -> None:
    silent = [
        kind
        for kind, cls in KINDS.items()
        if not (cls.__doc__ or "").rstrip().endswith(".") or cls.__doc__ == "."
    ]
    silent += [f"{cls.__name__}.{name}" for cls in KINDS.values() for name in unexplained(cls)]
    assert not silent


def unexplained(cls: type[events.Event]) -> set[str]:
    """Fields without a docstring that are not common ones.

    Only the fields are annotated in such a class.
    """
    (body,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(body, ast.ClassDef)
    found = set()
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            reported = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not reported and node.target.id not in COMMON and cls is not events.Evaluated:
                found.add(node.target.id)
    return found


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"event": "worker_last"}, "worker_last is no event"),
        ({"event": "policy_lost", "step": 1}, "policy_lost: why: Field required"),
        (
            {"event": "policy_lost", "why": "x", "rank": 1},
            "policy_lost: rank: Unexpected keyword argument",
        ),
        ({"event": "policy_lost", "why": 1}, "policy_lost: why: Input should be a valid string"),
        (
            {"event": "evaluated", "step": 0, "val/reward/maen": 1.0, "score": 1.0},
            "evaluated: score is no metric",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_found(record: dict[str, object], problem: str) -> None:
    assert any(found.startswith(problem) for found in validate([record])), validate([record])


def test_what_is_written_fits_and_reads_back(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(events.Begin(1, None, 0, {"reward": 0.5, "step": 2}), 0)
    log.emit(events.Evaluated({"val/reward/mean": 0.5}), 3)
    log.emit(events.SelfTest("vision", skipped="no probe has an image"), 3)
    log.emit(incidents.Changed({"steps": (3, None)}), 3)
    log.emit(incidents.PayloadLost(["1/0"]))
    log.close()
    records = list(log)
    assert validate(records) == ()
    assert [record.get("step") for record in records] == [0, 3, 3, 3, None]
    assert records[1]["val/reward/mean"] == 0.5
    assert records[2]["moved"] is None
    assert records[3]["values"] == {"steps": [3, None]}


def test_the_reporter_dates_events_and_keeps_bad_rows_out_of_the_file(tmp_path: Path) -> None:
    reporter = Reporter(
        RunConfig.model_validate(settings(tmp_path, tmp_path)), tmp_path, open_logger
    )
    reporter.event(incidents.WarningEvent("seldom meant"))
    reporter.event(events.CheckpointEvent("step_000002", 0.1), 2)
    reporter.bad_row(DataFailure("a.jsonl:3", "bad"))
    assert [record["step"] for record in reporter.folder.events] == [0, 2]
    assert validate(reporter.folder.events) == ()
    assert [record["event"] for _, record in reporter.updates] == [
        "warning",
        "checkpoint",
        "quarantined",
    ]
    assert validate(record for _, record in reporter.updates) == ()


def test_many_rows_left_out_for_one_reason_are_shown_once_and_counted(tmp_path: Path) -> None:
    rows = [
        {"id": str(number), "prompt" if number > 9_000 else "question": "1 + 1", "answer": "2"}
        for number in range(9_100)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = RunConfig.model_validate(
        settings(tmp_path, tmp_path, data={"train": str(tmp_path / "rows.jsonl")})
    )
    reporter = Reporter(config, tmp_path, open_logger)
    assert len(training_rows(config, reporter)) == 99
    assert len([*reporter.folder.quarantine]) == 9_001
    shown = [record for _, record in reporter.updates]
    assert [record["event"] for record in shown] == ["quarantined"] * SHOWN_ROWS + ["data_warning"]
    assert "9001 of the 9100 rows of" in shown[-1]["why"]


def test_a_grace_that_an_update_and_a_checkpoint_outlast_is_reported_once(tmp_path: Path) -> None:
    def reported(
        grace: float, saves: Sequence[float], updates: Sequence[float]
    ) -> list[dict[str, object]]:
        given = settings(tmp_path, tmp_path, preemption={"grace": grace})
        folder = tmp_path / f"{grace:g}-{len(saves)}"
        folder.mkdir()
        reporter = Reporter(RunConfig.model_validate(given), folder, open_logger)
        for number, seconds in enumerate(updates):
            reporter.step(number, {}, Collected(()), {}, {"update_actor": seconds}, {})
        for number, seconds in enumerate(saves):
            reporter.event(events.CheckpointEvent(f"step_{number}", seconds))
        assert validate(reporter.folder.events) == ()
        return [record for record in reporter.folder.events if record["event"] == "grace_too_short"]

    assert reported(120.0, [30.0, 50.0], [60.0, 40.0]) == []
    assert reported(120.0, [], [500.0]) == [], (
        "nothing was ever saved: how long it takes is not known"
    )
    (once,) = reported(100.0, [30.0, 50.0, 60.0], [60.0])
    assert (once["seconds"], once["grace"]) == (110.0, 100.0)


def test_what_the_storage_refuses_is_reported_once_until_it_is_well(tmp_path: Path) -> None:
    """A run goes on without it: a replacement that is reported, for one, is still started."""
    folder = tmp_path / "away"
    reporter = Reporter(RunConfig.model_validate(settings(tmp_path, tmp_path)), folder, open_logger)
    reporter.event(incidents.WorkerLostEvent("reward", 1, why="it died"))
    reporter.event(incidents.WorkerReplaced("reward", 1, seconds=1.0))
    assert [record.get("file", record["event"]) for _, record in reporter.updates] == [
        "worker_lost",
        "events.jsonl",
        "worker_replaced",
    ]
    folder.mkdir()
    (folder / "rollouts").touch()  # no step's file can be written there
    reporter.rollouts(1, [], {})
    reporter.rollouts(2, [], {})
    assert [record["event"] for record in reporter.folder.events] == [
        "worker_lost",
        "not_written",
        "worker_replaced",
        "not_written",
    ]
    assert validate(reporter.folder.events) == ()
    assert [record["file"] for record in reporter.folder.events if "file" in record] == [
        "events.jsonl",
        "rollouts",
    ]


def test_a_resumed_run_ends_with_its_gain_over_the_first_evaluation_of_an_earlier_start(
    tmp_path: Path,
) -> None:
    def answers(reward: float) -> list[Item]:
        return [
            Item(arm, f"t{n}", "page", reward=reward + n / 100)
            for arm in (RIGHT, SAMPLED)
            for n in range(10)
        ]

    config = RunConfig.model_validate(settings(tmp_path, tmp_path))
    first = Reporter(config, tmp_path, open_logger)
    first.folder.evaluations.path.mkdir()
    first.evaluated(0, answers(0.2), {})
    first.evaluated(4, answers(0.9), {})
    resumed = Reporter(config, tmp_path, open_logger)
    resumed.begin(2, 2, None)  # restored at step 2: what was recorded of step 4 is moved aside
    resumed.close(2, {})
    assert not [record for record in resumed.folder.events if record["event"] == "gain"], (
        "nothing was evaluated since"
    )
    resumed.evaluated(4, answers(0.3), {})
    resumed.close(4, {})
    (gain,) = (record for record in resumed.folder.events if record["event"] == "gain")
    assert validate([gain]) == ()
    assert (gain["step"], gain["since"]) == (4, 0)
    for pair in gain["rewards"].values():
        assert (pair["tasks"], pair["before"], pair["after"]) == (
            10,
            pytest.approx(0.245),
            pytest.approx(0.345),
        )
        assert pair["gain"] == pytest.approx([0.1, 0.1, 0.1])
    assert list(gain["rewards"]) == ["sampled", "greedy"]


def test_updates_hold_a_window_and_number_what_is_gone() -> None:
    updates = Updates()
    kept = [("step", {"step": number}) for number in range(Updates.KEPT_REPORTS + 5)]
    assert updates.since(0) == (0, [])
    for update in kept:
        updates.append(update)
    assert updates.since(0) == (len(kept), kept[5:])
    assert updates.since(len(kept) - 2) == (len(kept), kept[-2:])
    assert updates.since(len(kept)) == (len(kept), [])


def test_a_resumed_run_that_cannot_go_on_quotes_what_the_first_attempt_did(tmp_path: Path) -> None:
    reporter = Reporter(
        RunConfig.model_validate(settings(tmp_path, tmp_path)), tmp_path, open_logger
    )
    assert reporter.quoted_before(EXAMPLE) == ""
    why = "0 of 8 survived. For example task a, truth 3, was answered 4: reward 0."
    reporter.event(events.Failed("GenerationBudgetSpent", why, {}), 3)
    assert (
        reporter.quoted_before(EXAMPLE) == "For example task a, truth 3, was answered 4: reward 0."
    )
    reporter.event(events.Failed("DiskFull", "no space", {}), 3)
    assert reporter.quoted_before(EXAMPLE) == ""
