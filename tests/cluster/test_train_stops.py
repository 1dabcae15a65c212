"""The ``train`` process when drivers die: what the next one gets, and how a SIGTERM between two of
them ends. Ray is made up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    AuthenticationError,
    GetTimeoutError,
    LocalRayletDiedError,
    OutOfMemoryError,
    RayActorError,
)

from rayloop.cluster.stages import following, train
from rayloop.cluster.supervision.watchdog import HeadDead, HeadWatch, NodeDead
from rayloop.core.failures import (
    START_AGAIN_EXIT_CODE,
    ConfigError,
    NotSaved,
    Preempted,
    RayloopError,
    StorageFailed,
    WorkerLost,
)
from rayloop.launch.restarts import RESTARTED
from rayloop.run.checkpoint import CheckpointStore
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder
from rayloop.run.identity import ResumeRefused
from rayloop.run.lifetime import RecoverySettings
from rayloop.run.lock import Fence
from rayloop.run.origin import Origin
from rayloop.run.preflight import Prepared, prepare
from rayloop.run.records.events import EventLog
from tests.support.runs import settings

Life = Callable[[RunFolder], None]


class Stage:
    """``run`` follows drivers that live as ``lives`` say and then die; a SIGTERM comes when the
    ``stop``-th has died. ``ask`` raises when the cluster's head is away.
    """

    def __init__(
        self,
        folder: Path,
        lives: list[Life],
        stop: int | None = None,
        ask: Callable[[float], None] = lambda _: None,
        death: type[Exception] = RayActorError,
    ) -> None:
        self.ask, self.killed, self.death, self.node = ask, 0, death, True
        self.config = RunConfig.model_validate(
            settings(folder, folder, recovery={"replacements": 30})
        )
        self.folder = RunFolder(self.config.output, self.config.name)
        self.lives, self.stop, self.reported = lives, stop, list[tuple[Any, ...]]()

    def create(
        self,
        actor: type,
        options: Any,
        config: Any,
        path: str,
        resume: str,
        hashes: Any,
        since: int,
        fence: Fence,
        warnings: list[str],
    ) -> Any:
        self.reported.append((resume, since))
        assert warnings == ["a doubt"], "a driver that replaces another one warns as well"
        assert fence is self.folder.lock.fence, (
            "it must notice when the run is taken from this process"
        )
        return SimpleNamespace(stop=SimpleNamespace(remote=lambda: None))

    def follow(self) -> dict[str, Any]:
        if len(self.reported) > len(self.lives):
            return {}
        self.lives[len(self.reported) - 1](self.folder)
        raise self.death("it died") if self.death is not RayActorError else RayActorError

    def kill(self, driver: Any) -> None:
        self.killed += 1

    def note(self, text: str) -> None:
        if len(self.reported) == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)

    def run(self, monkeypatch: pytest.MonkeyPatch, resume: str = "auto") -> RayloopError | None:
        context = SimpleNamespace(get_node_id=lambda: "00" * 28)
        here = SimpleNamespace(get_runtime_context=lambda: context, kill=self.kill)
        monkeypatch.setattr(train, "ray", here)
        monkeypatch.setattr(train, "create", self.create)
        # The folder holds no model.
        monkeypatch.setattr(Prepared, "identity", {})
        monkeypatch.setattr(train, "doubtful_settings", lambda prepared: ["a doubt"])
        monkeypatch.setattr(train, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
        monkeypatch.setattr(train, "Following", lambda *_: SimpleNamespace(follow=self.follow))
        origin = Origin.of(self.folder.checkpoints, resume)
        progress: Any = SimpleNamespace(note=self.note)
        ended = lambda: origin.stopped(self.folder.last_step)  # noqa: E731
        try:
            with train._while_idle(ended) as check, self.folder.acquired(resume):
                head = HeadWatch(self.note, self.ask, lambda _: self.node)
                prepared = prepare(self.config)
                attempts = train.DriverAttempts(prepared, self.folder, origin, progress, head)
                attempts.run(check)
        except RayloopError as end:
            return end
        return None


def lives(*steps: int, saves: int | None = None) -> Life:
    """A driver that records these steps, and saves one of them."""

    def live(folder: RunFolder) -> None:
        store = CheckpointStore(folder.checkpoints, keep=3)
        store.next_lineage()
        for step in steps:
            folder.metrics.append({"step": step})
            if step == saves:
                asyncio.run(store.save(step, {}, _nothing))

    return live


async def _nothing(folder: str) -> None: ...


def dies_at_once(folder: RunFolder) -> None: ...


@pytest.mark.parametrize(
    ("life", "kind", "says"),
    [
        (
            lives(1, 2, 3),
            NotSaved,
            "stopped after step 3, not saved: .* continue from the beginning",
        ),
        (
            lives(1, 2, 3, saves=2),
            NotSaved,
            r"stopped after step 3, not saved: .* continue from step 2 \(step_000002\)",
        ),
        (lives(1, 2, 3, saves=3), Preempted, r"continue from step 3 \(step_000003\)"),
        (dies_at_once, NotSaved, "stopped before anything was trained: .* run again to start over"),
    ],
)
def test_a_stop_after_a_lost_driver_is_75_only_when_all_it_did_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, life: Life, kind: type[RayloopError], says: str
) -> None:
    end = Stage(tmp_path, [life], stop=1).run(monkeypatch)
    with pytest.raises(kind, match=says):
        raise end or AssertionError("it ended well")


def test_every_driver_gets_what_the_first_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So one that follows before anything is saved begins where the first did (``Origin``), not
    with what was rewound.
    """
    stage = Stage(tmp_path, [lives(1, saves=1), lives(2), lives(2, saves=2)])
    stage.folder.path.mkdir()
    CheckpointStore(stage.folder.checkpoints, keep=3).next_lineage()
    assert stage.run(monkeypatch, "somewhere") is None
    assert stage.reported == [("somewhere", 1)] * 4


@pytest.mark.parametrize("death", [RayActorError, OutOfMemoryError, GetTimeoutError])
def test_a_driver_that_is_lost_in_any_way_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: type[Exception]
) -> None:
    stage = Stage(tmp_path, [lives(1, saves=1), lives(2)], death=death)
    assert stage.run(monkeypatch) is None
    assert len(stage.reported) == 3


def test_a_driver_that_no_other_can_replace_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path, [lives(1)], death=LocalRayletDiedError)
    with pytest.raises(LocalRayletDiedError):
        stage.run(monkeypatch)
    assert len(stage.reported) == 1


@pytest.mark.parametrize(
    "death", [RayActorError(), OutOfMemoryError("ended by the memory monitor")]
)
def test_a_driver_that_dies_while_it_is_looked_at_is_asked_no_more(
    monkeypatch: pytest.MonkeyPatch, death: Exception
) -> None:
    """What ``updates`` ends with does not count: what ``main`` ended with does."""

    class Driver:
        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *_: method)

    def get(call: str, timeout: float = 0.0) -> Any:
        if call == "updates":
            raise death
        return {"main": "ended"}

    monkeypatch.setattr(
        following, "ray", SimpleNamespace(get=get, wait=lambda calls, timeout: (calls, []))
    )
    quiet: Any = SimpleNamespace(check=lambda: None, doing=lambda _: None)
    driver: Any = Driver()
    folder: Any = SimpleNamespace(lock=quiet)
    assert following.Following(
        driver, quiet, RecoverySettings(), train._never, quiet, folder, quiet
    ).follow() == {"main": "ended"}


def test_a_driver_that_answers_nothing_is_reported_soon_and_given_up_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(call: str, timeout: float) -> Any:
        time.sleep(0.1)
        raise GetTimeoutError

    for name in ("SILENCE_REPORT_AFTER_S", "ANSWER_TIMEOUT_S"):
        monkeypatch.setattr(following, name, 0.2)
    monkeypatch.setattr(following, "submit", lambda *_: "call")
    monkeypatch.setattr(
        following, "ray", SimpleNamespace(get=get, wait=lambda calls, timeout: ([], calls))
    )
    notes: list[str] = []
    quiet: Any = SimpleNamespace(check=lambda: None, doing=lambda _: None, note=notes.append)
    folder: Any = SimpleNamespace(lock=quiet, events=EventLog(tmp_path / "events.jsonl"))
    with pytest.raises(WorkerLost, match=r"the driver has not answered for \d s"):
        following.Following(
            quiet, quiet, RecoverySettings(stall_timeout=1.0), train._never, quiet, folder, quiet
        ).follow()
    first, *others = list(folder.events)
    assert (first["event"], first["seconds"] < 0.9) == ("driver_silent", True)
    assert len(others) < 3, "each is reported after twice that silence"
    assert notes[0].startswith("the driver has not answered for 0 s; it is given up in 1 s")


class Asked:
    """A driver that answers its first ``updates``, and then none.

    ``lives(n)``: whether its thread for questions answers the n-th one; ``main_ends_after`` so many
    looks, it has ended well.
    """

    def __init__(self, lives: Callable[[int], bool], main_ends_after: int = 1000) -> None:
        self.lives, self.looks, self.questions, self.left = lives, 0, 0, main_ends_after

    def submit(self, driver: Any, method: Any, *_: Any) -> str:
        return str(method.__name__)

    def get(self, call: str, timeout: float = 0.0) -> Any:
        if call == "main":
            return {"steps": 1}
        self.looks += 1
        if self.looks == 1:
            return 0, [], ""
        raise GetTimeoutError

    def wait(self, calls: list[str], timeout: float) -> tuple[list[str], list[str]]:
        if calls == ["main"]:
            self.left -= 1
            return (calls, []) if self.left < 0 else ([], calls)
        self.questions += 1
        return (calls, []) if self.lives(self.questions) else ([], calls)

    def follow(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **recovery: float) -> Any:
        monkeypatch.setattr(following, "submit", self.submit)
        monkeypatch.setattr(following, "ray", SimpleNamespace(get=self.get, wait=self.wait))
        quiet: Any = SimpleNamespace(check=lambda: None, doing=lambda _: None, note=lambda _: None)
        run: Any = SimpleNamespace(lock=quiet, events=EventLog(folder / "events.jsonl"))
        return following.Following(
            quiet, quiet, RecoverySettings(**recovery), train._never, quiet, run, quiet
        ).follow()


def test_a_driver_whose_process_is_frozen_is_lost_after_health_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Asked(lives=lambda n: False)
    with pytest.raises(WorkerLost, match="the driver has not answered"):
        driver.follow(monkeypatch, tmp_path, health_timeout=30.0)
    assert driver.questions == 2, "each look and question waits for 15 s"


def test_one_unanswered_question_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that asks may have been stopped itself."""
    driver = Asked(lives=lambda n: n % 2 == 0, main_ends_after=50)
    assert driver.follow(monkeypatch, tmp_path, health_timeout=1.0) == {"steps": 1}
    assert driver.questions > 40


def test_a_driver_whose_loop_waits_for_storage_has_until_stall_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Asked(lives=lambda n: True, main_ends_after=50)
    assert driver.follow(monkeypatch, tmp_path, health_timeout=0.1) == {"steps": 1}


def test_a_driver_that_was_lost_with_the_head_is_not_replaced_and_the_end_names_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(seconds: float) -> None:
        raise AuthenticationError(
            "RPC error: WrongClusterID: Perhaps the client is accessing GCS after it has restarted."
        )

    stage = Stage(tmp_path, [lives(1, 2, 3, saves=2)], ask=ask)
    with pytest.raises(HeadDead, match="was started again, and knows nothing of this run") as end:
        raise stage.run(monkeypatch) or AssertionError("it ended well")
    assert end.value.exit_code == START_AGAIN_EXIT_CODE
    assert end.value.__notes__ == ["run again to continue from step 2 (step_000002)"]
    assert (len(stage.reported), stage.killed) == (
        1,
        0,
    ), "the head is who would start one, and kill one"


@pytest.mark.parametrize(("asked", "kind"), [(False, NodeDead), (True, NotSaved)])
def test_a_driver_that_was_lost_with_ray_on_its_node_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool, kind: type[RayloopError]
) -> None:
    """Nor does a stop blame the time that it had: nothing could have saved."""

    def dies(folder: RunFolder) -> None:
        lives(1, 2, 3, saves=2)(folder)
        stage.node = False
        if asked:
            os.kill(os.getpid(), signal.SIGTERM)

    stage = Stage(tmp_path, [dies])
    end = stage.run(monkeypatch)
    assert isinstance(end, kind)
    text = "\n".join([str(end), *getattr(end, "__notes__", ())])
    assert "Ray on" in text
    assert "run again to continue from step 2 (step_000002)" in text
    assert "preemption.grace" not in text
    assert (len(stage.reported), stage.killed) == (1, 0)


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (OSError(5, "Input/output error"), ["MachineFailed"]),
        (StorageFailed("config.yaml cannot be used"), ["StorageFailed"]),
        (KeyError("a bug"), ["Unforeseen"]),
        (ResumeRefused("another model"), []),
    ],
)
def test_an_end_before_ray_starts_is_typed_and_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reported: list[str]
) -> None:
    """But a start that is refused because of its checkpoint writes nothing."""

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Prepared, "identity", property(fails))
    # The folder holds no chat template.
    monkeypatch.setattr(Prepared, "begun", lambda prepared, *_: prepared)
    config = RunConfig.model_validate(settings(tmp_path, tmp_path))
    with pytest.raises(RayloopError):
        train.train(prepare(config), None, None)
    found = RunFolder(config.output, config.name).events
    assert [(record["event"], record["error"]) for record in found] == [
        ("failed", name) for name in reported
    ]


@pytest.mark.parametrize(
    ("code", "says"), [(1, "second signal; run again to continue"), (15, "to start over")]
)
def test_an_end_by_a_signal_is_an_event(tmp_path: Path, code: int, says: str) -> None:
    folder = RunFolder(tmp_path, "run")
    folder.path.mkdir()
    with (
        pytest.raises(NotSaved if code == 1 else SystemExit),
        train._recorded(folder, Origin.of(folder.checkpoints, "auto")),
    ):
        raise SystemExit(code)
    [record] = list(folder.events)
    assert (record["event"], record["error"]) == ("failed", "NotSaved")
    assert says in record["why"]


def test_an_output_that_cannot_be_made_is_refused_before_anything_begins(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    config = RunConfig.model_validate(settings(tmp_path, tmp_path, output=str(tmp_path / "taken")))
    with pytest.raises(
        ConfigError, match="taken/run cannot be made or written to: Not a directory"
    ):
        train.train(prepare(config), None, None)


def test_a_restart_without_the_run_s_folder_begins_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESTARTED, "1")
    config = RunConfig.model_validate(settings(tmp_path, tmp_path, output=str(tmp_path / "mount")))
    with pytest.raises(StorageFailed, match="is its storage mounted"):
        train.train(prepare(config), None, None)
    assert not (tmp_path / "mount").exists()
