"""However a run ends: 75 only with this very step on disk, else what a resume starts from; typed,
reported, saved if it can be.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray import exceptions

from rayloop.cluster.loop.ending import SUSPECT, ended
from rayloop.cluster.loop.loggers import open_logger
from rayloop.core import failures
from rayloop.core.failures import (
    START_AGAIN_EXIT_CODE,
    CheckpointError,
    ConfigError,
    EnvironmentFailed,
    GenerationBudgetSpent,
    GraderBroken,
    MachineFailed,
    NotSaved,
    PolicyLost,
    Preempted,
    RayloopError,
    RewardLost,
    RolesExhausted,
    Stalled,
    StorageFailed,
    Unforeseen,
    WorkerLost,
)
from rayloop.core.ledger import Ledger
from rayloop.core.types import Version
from rayloop.run.checkpoint import Checkpoint, CheckpointStore, complete
from rayloop.run.config import RunConfig
from rayloop.run.origin import Origin
from rayloop.run.reporter import Reporter
from tests.support.runs import settings

OLDER = 3
STEP = 5


@dataclass
class Driving:
    """A run at step 5 whose last checkpoint is of step 3.

    ``trouble``: what saving raises; ``hangs``: it never ends.
    """

    config: RunConfig
    folder: Path
    trouble: Exception | None = None
    hangs: bool = False
    policy_lost: bool = False
    updating: bool = False
    step: int = STEP
    restored_step: int = OLDER
    version: Version = field(default_factory=lambda: Version(1, STEP))
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    ledger: Ledger = field(default_factory=Ledger)
    saved: Checkpoint | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir()
        if self.hangs:  # else a busy machine must have time to save
            short = self.config.preemption.model_copy(update={"grace": 0.2})
            self.config = self.config.model_copy(update={"preemption": short})
        self.reporter = Reporter(self.config, self.folder, open_logger)
        self.origin = Origin.of(self.folder / "checkpoints", "auto")
        self.store = CheckpointStore(self.folder / "checkpoints", keep=2)
        self.store.next_lineage()
        asyncio.run(self.store.save(OLDER, {}, self.trainer))

    @property
    def saving(self) -> Driving:
        return self

    async def trainer(self, folder: str) -> None:
        Path(folder, "weights").write_bytes(b"1234")

    async def checkpoint(self, last: bool = False) -> None:
        assert last, "it may not be due"
        if self.hangs:
            await asyncio.sleep(30)
        if self.trouble is not None:
            raise self.trouble
        self.saved = await self.store.save(self.step, {}, self.trainer)

    async def settle(self) -> None: ...

    def on_disk(self, version: Version) -> bool:
        return self.saved is not None and complete(self.saved.folder) is not None

    def ends(self, error: Exception) -> RayloopError:
        return asyncio.run(ended(self, copy.copy(error).with_traceback(error.__traceback__)))

    def reported(self) -> dict[str, Any]:
        kind, last = list(self.reporter.updates)[-1]
        assert kind == "event"
        return dict(last)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("ending")
    return RunConfig.model_validate(
        settings(folder, Path("/models/any"), preemption={"grace": 20.0})
    )


FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "a rank is dead": {"policy_lost": True},
    "an update broke off": {"updating": True},
    "the disk is full": {"trouble": CheckpointError("no space left")},
    "the disk is gone": {"trouble": OSError(5, "Input/output error")},
    "a rank dies while it saves": {"trouble": PolicyLost("rank 0 died")},
    "a message is lost while it saves": {"trouble": exceptions.RpcError("lost")},
    "a rank raises while it saves": {
        "trouble": exceptions.RayTaskError("save", "trace", ValueError("a bug"))
    },
    "saving hangs": {"hangs": True},
}
ERRORS = [
    Preempted("asked to stop"),
    RolesExhausted("no engine"),
    RewardLost("no judge"),
    Stalled("nothing moved"),
    WorkerLost("no answer"),
    PolicyLost("restarts are spent"),
    StorageFailed("events.jsonl cannot be used"),
    exceptions.LocalRayletDiedError("gone"),
    OSError(28, "No space left on device"),
]
OTHERS = [
    KeyError("a bug"),
    GenerationBudgetSpent("too few"),
    EnvironmentFailed("it raised"),
    GraderBroken("it raised"),
    ConfigError("a key"),
]
"""What a run ends by that another start meets again, unless it stops."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("error", [*ERRORS, *OTHERS], ids=lambda error: type(error).__name__)
def test_75_is_true_whatever_fails_while_a_run_stops(
    config: RunConfig, tmp_path: Path, error: Exception, fault: str
) -> None:
    """SIGTERM has come; the machines, or the run itself, fail in any way at any moment."""
    run = Driving(config, tmp_path / "run", **FAULTS[fault])
    run.stopping.set()
    end = run.ends(error)
    found = run.origin.find()
    assert found is not None
    assert (end.exit_code == 75) == (found.step == STEP) == (fault == "none")
    assert type(end) is (Preempted if fault == "none" else NotSaved)
    assert end.exit_code == (75 if fault == "none" else 1)
    assert f"run again to continue from step {found.step} ({found.folder.name})" in str(end)
    assert run.reported()["event"] == ("preempted" if fault == "none" else "failed")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("error", ERRORS[1:], ids=lambda error: type(error).__name__)
def test_a_run_that_the_machines_end_is_saved_if_it_can_be(
    config: RunConfig, tmp_path: Path, error: Exception, fault: str
) -> None:
    run = Driving(config, tmp_path / "run", **FAULTS[fault])
    end = run.ends(error)
    found = run.origin.find()
    assert found is not None
    assert (found.step == STEP) == (fault == "none")
    assert end.exit_code == START_AGAIN_EXIT_CODE
    assert type(end) is (type(error) if isinstance(error, RayloopError) else MachineFailed)
    [note] = end.__notes__
    assert note.startswith("step 5 is saved" if fault == "none" else "step 5 is not saved: ")
    assert note.endswith(f"run again to continue from step {found.step} ({found.folder.name})")
    reported = run.reported()
    assert [reported[key] for key in ("event", "error", "saved")] == [
        "failed",
        type(end).__name__,
        note,
    ]


def classes() -> list[type[RayloopError]]:
    found = [
        kind
        for _, kind in inspect.getmembers(failures, inspect.isclass)
        if issubclass(kind, RayloopError)
    ]
    return [kind for kind in found if kind not in (RayloopError, Preempted, NotSaved)]


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_typed_error_keeps_its_type_and_is_reported(
    config: RunConfig, tmp_path: Path, kind: type[RayloopError]
) -> None:
    """Also from within an actor.

    What cannot be trusted is not saved: the older checkpoint stays the newest.
    """
    run = Driving(config, tmp_path / "run")
    error = kind.__new__(kind)
    error.__dict__ |= {"path": "a.png", "reason": "broken", "tokens": 9, "limit": 8}
    error.args = ("why",)
    end = asyncio.run(ended(run, exceptions.RayTaskError("method", "trace", error)))
    assert end is error
    assert run.reported()["error"] == kind.__name__
    assert (run.origin.find().step == STEP) == (not issubclass(kind, (*SUSPECT, CheckpointError)))  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", SUSPECT)
def test_a_stop_saves_nothing_that_cannot_be_trusted(
    config: RunConfig, tmp_path: Path, kind: type[RayloopError]
) -> None:
    run = Driving(config, tmp_path / "run")
    run.stopping.set()
    end = run.ends(kind("bad"))
    assert type(end) is kind
    assert run.origin.find().step == OLDER  # type: ignore[union-attr]


@pytest.mark.parametrize("lineage", [0, 1])
def test_storage_that_is_away_does_not_replace_the_end_of_a_stop(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lineage: int
) -> None:
    """The words about what a resume starts from cannot be found either.

    ``lineage`` 0: the run had not begun.
    """
    run = Driving(
        config,
        tmp_path / "run",
        trouble=OSError(116, "Stale file handle"),
        version=Version(lineage, STEP),
    )

    def away(_: Origin) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Origin, "find", away)
    run.stopping.set()
    end = run.ends(Preempted("asked to stop"))
    assert type(end) is NotSaved
    assert "Stale file handle; run again" in str(end) or "cannot be reported now" in str(end)
    assert run.reported()["error"] == "NotSaved"


@pytest.mark.parametrize(
    "error",
    [Preempted("asked to stop"), RolesExhausted("no engine")],
    ids=lambda error: type(error).__name__,
)
def test_a_checkpoint_that_vanished_after_it_was_written_is_named(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RayloopError
) -> None:
    run = Driving(config, tmp_path / "run")
    write = run.checkpoint

    async def vanishes(last: bool = False) -> None:
        await write(last)
        run.folder.rename(tmp_path / "away")

    monkeypatch.setattr(run, "checkpoint", vanishes)
    if isinstance(error, Preempted):
        run.stopping.set()
    end = run.ends(error)
    said = "".join([str(end), *getattr(end, "__notes__", [])])
    assert type(end) is (NotSaved if isinstance(error, Preempted) else type(error))
    assert (
        f"not saved: its checkpoint was written, but {run.origin.folder} does not have it in full"
        " now; run again" in said
    )
    assert "which one that is cannot be seen now" in said


def test_what_nobody_foresaw_is_typed_saved_and_keeps_its_traceback(
    config: RunConfig, tmp_path: Path
) -> None:
    run = Driving(config, tmp_path / "run")
    try:
        {}["lost"]
    except KeyError as error:
        end = run.ends(error)
    assert type(end) is Unforeseen
    assert str(end) == "KeyError: 'lost'"
    assert run.origin.find().step == STEP  # type: ignore[union-attr]
    assert '{}["lost"]' in run.reported()["traceback"]


@pytest.mark.parametrize("error", [RolesExhausted("no engine"), GenerationBudgetSpent("too few")])
def test_nothing_is_saved_where_nothing_was_trained_since_the_checkpoint(
    config: RunConfig, tmp_path: Path, error: RayloopError
) -> None:
    """A first step that fails leaves no checkpoint of step 0 in the way of a start with another
    model.
    """
    run = Driving(config, tmp_path / "run", step=OLDER, trouble=AssertionError("it was saved"))
    assert run.ends(error).__notes__ == ["run again to continue from step 3 (step_000003)"]


@pytest.mark.parametrize(
    "error", [KeyError("a bug"), StorageFailed("no room"), OSError(5, "Input/output error")]
)
def test_nothing_is_saved_before_the_restored_version_is_known(
    config: RunConfig, tmp_path: Path, error: Exception
) -> None:
    """The driver has the step of its checkpoint, and no lineage yet: what it saved would replace
    that checkpoint.
    """
    run = Driving(
        config,
        tmp_path / "run",
        step=46,
        restored_step=0,
        version=Version(0, 0),
        trouble=AssertionError("it was saved"),
    )
    assert run.ends(error).__notes__[-1] == "run again to continue from step 3 (step_000003)"
    assert [found.step for found in run.store.newest_first()] == [OLDER]


def test_an_error_before_anything_was_trained_has_no_note(
    config: RunConfig, tmp_path: Path
) -> None:
    run = Driving(config, tmp_path / "run", step=0, restored_step=0)
    assert not hasattr(run.ends(ConfigError("a key")), "__notes__")


def test_a_disk_that_takes_no_events_does_not_hide_why_the_run_ends(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Driving(config, tmp_path / "run")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.reporter, "event", full)
    assert type(run.ends(RolesExhausted("no engine"))) is RolesExhausted
