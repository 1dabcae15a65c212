"""What a run's events say of its life: roles in service and lost, budgets of the last hour, ages."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from rayloop.core import events, incidents
from rayloop.core.events import Event
from rayloop.run.checkpoint import CheckpointStore
from rayloop.run.folder import RunFolder
from rayloop.run.records.metrics import validate
from rayloop.view.health import HOUR_S, RunHealth
from rayloop.view.status import status

ACTORS = {"rollout": 3, "environment": 2, "policy": 2}
BEGUN: tuple[Event, ...] = (
    events.Start("c0ffee", {}),
    events.Starting(ACTORS),
    events.Started(1.0),
    events.Begin(1, None, 0, None),
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path, "run")
    made.path.mkdir()
    return made


def reported(
    folder: RunFolder, *happened: tuple[Event, int | None], replacements: int = 4
) -> RunHealth:
    for event, step in happened:
        folder.events.emit(event, step)
    settings = {"recovery": {"replacements": replacements}, "checkpoint": {"every": 5}}
    health = RunHealth(folder, settings)
    health.update()
    return health


def begun(*more: Event) -> list[tuple[Event, int | None]]:
    return [(event, 0) for event in (*BEGUN, *more)]


def test_a_lost_actor_is_out_of_service_until_its_replacement_serves(folder: RunFolder) -> None:
    lost = begun(
        incidents.WorkerLostEvent("rollout", 2, why="killed"),
        incidents.ReplacementFailed("rollout", 2, why="no"),
    )
    found = reported(folder, *lost).metrics()
    assert (
        found["recovery/in_service/rollout"],
        found["recovery/wanted/rollout"],
        found["recovery/lost/rollout"],
    ) == (2, 3, 1)
    assert found["recovery/in_service/environment"] == 2
    replaced = reported(folder, (incidents.WorkerReplaced("rollout", 2, seconds=1.0), 0)).metrics()
    assert (replaced["recovery/in_service/rollout"], replaced["recovery/lost/rollout"]) == (3, 1)


def test_actors_on_a_lost_node_are_out_of_service_for_a_unit_of_each_budget(
    folder: RunFolder,
) -> None:
    """One of them was reported before the node, and is not in its ``workers``."""
    gone = incidents.NodeLost(
        "host-a",
        "a",
        {"rollout": 3, "environment": 1, "policy": 2},
        {"rollout": [1, 3], "environment": [2]},
    )
    found = reported(
        folder, *begun(incidents.WorkerLostEvent("rollout", 2, why="gone"), gone)
    ).metrics()
    assert [found[f"recovery/in_service/{role}"] for role in ACTORS] == [
        0,
        1,
        2,
    ], "the policy reports its own"
    assert [found[f"recovery/lost/{role}"] for role in ACTORS] == [3, 1, 0]
    assert [found[f"recovery/budget_left/{role}"] for role in ACTORS] == [4 * 3 - 2, 4 * 2 - 1, 2]
    back = reported(
        folder, *((incidents.WorkerReplaced("rollout", n, seconds=1.0), 0) for n in (1, 2, 3))
    ).metrics()
    assert (back["recovery/in_service/rollout"], back["recovery/lost/rollout"]) == (3, 3)


def test_budgets_are_of_the_last_hour_and_of_all_slots_of_a_role(folder: RunFolder) -> None:
    losses = [incidents.WorkerLostEvent("rollout", n, why="killed") for n in (1, 2)]
    health = reported(folder, *begun(*losses, incidents.ReplacementFailed("rollout", 1, why="no")))
    assert health.metrics()["recovery/budget_left/rollout"] == 4 * 3 - 3
    assert health.metrics()["recovery/budget_left/environment"] == 4 * 2
    assert health.metrics(time.time() + HOUR_S + 1)["recovery/budget_left/rollout"] == 4 * 3


def test_the_ranks_of_the_policy_are_lost_and_rebuilt_together(folder: RunFolder) -> None:
    lost = reported(folder, *begun(incidents.PolicyLostEvent(why="a rank died"))).metrics()
    assert (
        lost["recovery/in_service/policy"],
        lost["recovery/lost/policy"],
        lost["recovery/budget_left/policy"],
    ) == (0, 1, 1)
    rebuilt = reported(folder, (incidents.PolicyRebuilt(seconds=2.0), 0)).metrics()
    assert rebuilt["recovery/in_service/policy"] == 2


def test_a_lost_driver_takes_all_actors_along(folder: RunFolder) -> None:
    health = reported(
        folder,
        *begun(
            incidents.WorkerLostEvent("rollout", 1, why="x"),
            incidents.DriverLostEvent(0, why="killed"),
        ),
    )
    found = health.metrics()
    assert {found[f"recovery/in_service/{role}"] for role in ACTORS} == {0}
    assert (found["recovery/lost/driver"], found["recovery/budget_left/driver"]) == (1, 0)
    again = reported(folder, (events.Starting(ACTORS), 0), (events.Started(1.0), 0)).metrics()
    assert (again["recovery/in_service/rollout"], again["recovery/lost/rollout"]) == (3, 1)
    assert again["recovery/budget_left/rollout"] == 12, "the new driver has its budgets anew"


def test_checkpoints_and_progress_have_an_age(folder: RunFolder) -> None:
    health = reported(folder, *begun())
    assert "recovery/checkpoint_age" not in health.metrics()
    folder.events.emit(events.Trained({}), 7)
    folder.events.emit(events.CheckpointEvent("step_000007", 0.1), 7)
    folder.events.emit(events.Trained({}), 9)
    folder.events.emit(incidents.WarningEvent(why="odd"), 9)
    health.update()
    found = health.metrics(time.time() + 60)
    assert (
        health.step,
        found["recovery/steps_since_checkpoint"],
        found["recovery/checkpoint_every"],
    ) == (9, 2, 5)
    assert 59 < found["recovery/checkpoint_age"] < 70
    assert 59 < found["recovery/progress_age"] < 70
    assert [record["event"] for record in health.incidents] == ["warning"]


def test_a_restore_goes_back_to_its_checkpoint(folder: RunFolder) -> None:
    health = reported(
        folder, *begun(), (events.Trained({}), 9), (events.Begin(2, "step_000007", 2, None), 7)
    )
    assert (health.step, health.metrics()["recovery/steps_since_checkpoint"]) == (7, 0)


def test_the_end_of_a_run_is_no_service(folder: RunFolder) -> None:
    health = reported(folder, *begun(), (events.FinishedEvent({}), 3))
    assert health.end is not None
    assert health.metrics()["recovery/in_service/rollout"] == 0


def test_the_lock_tells_when_its_holder_last_gave_a_sign(folder: RunFolder) -> None:
    assert "recovery/lock_age" not in reported(folder, *begun()).metrics()
    with folder.acquired():
        os.utime(folder.lock.path, (time.time() - 40, time.time() - 40))
        assert 39 < reported(folder).metrics()["recovery/lock_age"] < 60
        assert folder.lock.holder() is not None
    assert folder.lock.holder() is None
    assert "recovery/lock_age" not in reported(folder).metrics()


def test_every_figure_is_in_the_table_of_metrics(folder: RunFolder) -> None:
    folder.events.emit(events.CheckpointEvent("step_000001", 0.1), 1)
    with folder.acquired():
        found = reported(
            folder, *begun(), (events.CheckpointEvent("step_000001", 0.1), 1)
        ).metrics()
    assert validate(found) == ()
    assert {"recovery/lock_age", "recovery/progress_age", "recovery/checkpoint_age"} <= found.keys()


def test_what_is_appended_is_read_once_and_a_torn_line_later(folder: RunFolder) -> None:
    health = reported(folder, *begun())
    whole = (folder.path / "events.jsonl").read_bytes()
    folder.events.emit(incidents.WorkerLostEvent("rollout", 1, why="x"), 0)
    folder.events.close()
    line = (folder.path / "events.jsonl").read_bytes()[len(whole) :]
    (folder.path / "events.jsonl").write_bytes(whole + line[:20])
    health.update()
    assert health.roles["rollout"].lost == 0
    (folder.path / "events.jsonl").write_bytes(whole + line)
    health.update()
    health.update()
    assert health.roles["rollout"].lost == 1


def test_status_names_the_newest_checkpoint_on_disk(folder: RunFolder) -> None:
    """A process that was killed behind a save has not recorded it."""

    async def trainer(path: str) -> None:
        Path(path, "weights").write_bytes(b"1234")

    folder.write_config("steps: 100\n")
    reported(folder, *begun(), (events.CheckpointEvent("step_000060", 1.0), 60))
    assert status(folder, time.time(), folder.events)["checkpoint_step"] == 60
    store = CheckpointStore(folder.checkpoints, keep=2)
    store.next_lineage()
    asyncio.run(store.save(64, {}, trainer))
    found = status(folder, time.time(), folder.events)
    assert found["checkpoint_step"] == 64
    assert -1 < found["checkpoint_age"] < 600
