"""Loggers: one that keeps failing or blocks is dropped, the others get every step; what
TensorBoard, W&B and Prometheus see.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from rayloop.cluster.loop.loggers import open_logger
from rayloop.config.settings import SettingsModel, check_components
from rayloop.core.failures import ConfigError
from rayloop.loggers.settings import AnySettings, TensorBoardSettings, WandbSettings
from rayloop.loggers.threads import Logger, Loggers
from rayloop.run.folder import RunFolder
from rayloop.run.preflight import preflight, prepare
from tests.cluster.test_preflight import config
from tests.support.runs import ROOT, eventually
from tests.support.storage import full

GOOD, BAD = TensorBoardSettings(), WandbSettings()
STEP = {"step": 1.0, "reward/mean": 0.5}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayloop.loggers.threads.CALL_TIMEOUT_S", 0.2)


class Kept:
    """A logger that remembers, and does ``also`` at each call."""

    def __init__(self, also: Callable[[int], None] = lambda step: None) -> None:
        self.steps: list[int] = []
        self.closed, self.also = False, also

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.also(step)
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


class Watched:
    """Two loggers, of which W&B's place is taken by ``bad``, and the reports of them."""

    def __init__(self, bad: Callable[[], Logger]) -> None:
        self.good, self.failed = Kept(), list[tuple[str, str]]()
        opening: dict[str, Callable[[], Logger]] = {"tensorboard": lambda: self.good, "wandb": bad}
        self.loggers = Loggers(
            (GOOD, BAD), lambda s: opening[s.kind](), lambda *failure: self.failed.append(failure)
        )

    def steps_until_dropped(self) -> int:
        """Log step after step until a failure is reported; returns their number."""
        done = 0

        def step() -> bool:
            nonlocal done
            done += 1
            self.loggers.log(done, STEP)
            return bool(self.failed)

        eventually(step, "a failure is reported", 10)
        return done

    def close(self) -> None:
        asyncio.run(self.loggers.close())


def refuse(error: BaseException) -> Callable[..., Any]:
    def raising(*_: Any) -> Any:
        raise error

    return raising


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (
            refuse(OSError(28, "No space left on device")),
            "OSError: [Errno 28] No space left on device",
        ),
        (lambda: Kept(refuse(ConnectionError("no network"))), "ConnectionError: no network"),
        (lambda: Kept(refuse(SystemExit(3))), "SystemExit: 3"),
    ],
    ids=["opening", "logging", "exiting"],
)
def test_a_logger_that_fails_is_dropped_once_and_the_other_gets_every_step(
    bad: Callable[[], Logger], why: str
) -> None:
    watched = Watched(bad)
    last = watched.steps_until_dropped()
    watched.loggers.log(last + 1, STEP)
    watched.close()
    assert watched.failed == [("wandb", why)]
    assert watched.good.steps == list(range(1, last + 2))
    assert watched.good.closed


class Away:
    """Opens loggers whose calls fail for the steps ``away``. ``steps``: what they kept."""

    def __init__(self, *away: int) -> None:
        self.away, self.opened, self.steps = away, list[Kept](), list[int]()

    def __call__(self) -> Logger:
        self.opened.append(Kept(self._log))
        return self.opened[-1]

    def _log(self, step: int) -> None:
        if step in self.away:
            raise OSError(116, "Stale file handle")
        self.steps.append(step)


def test_a_logger_whose_storage_comes_back_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayloop.loggers.threads.CALL_TIMEOUT_S", 60.0)
    away = Away(2, 3)
    watched = Watched(away)
    for step in range(1, 6):
        watched.loggers.log(step, STEP)
    watched.close()
    assert (away.steps, watched.failed) == ([1, 4, 5], [])
    assert [len(logger.steps) for logger in away.opened] == [
        1,
        0,
        2,
    ], "half a record may be in the file of one that failed"
    assert all(logger.closed for logger in away.opened)


@pytest.mark.parametrize(("away", "patience"), [((2,), 0.0), ((4, 5), 300.0)])
def test_a_logger_that_keeps_failing_is_reported(
    away: tuple[int, ...], patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.loggers.threads.CALL_TIMEOUT_S", 60.0)
    monkeypatch.setattr("rayloop.loggers.threads.MOST_FAILING_S", patience)
    watched = Watched(Away(*away))
    for step in range(1, 6):
        watched.loggers.log(step, STEP)
    watched.close()
    assert watched.failed == [("wandb", "OSError: [Errno 116] Stale file handle")]
    assert watched.good.steps == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("where", ["opening", "logging"])
def test_a_logger_that_blocks_is_dropped_and_delays_nobody(where: str) -> None:
    released, entered = threading.Event(), threading.Event()

    def block(*_: Any) -> None:
        entered.set()
        released.wait()

    def opening() -> Logger:
        if where == "opening":
            block()
        return Kept(block)

    watched = Watched(opening)
    watched.loggers.log(1, STEP)
    assert entered.wait(10)
    last = watched.steps_until_dropped()
    watched.close()
    released.set()
    assert watched.failed == [("wandb", "a call has not returned for 0.2 s")]
    assert watched.good.steps == [1, *range(1, last + 1)]


def test_a_close_that_blocks_or_fails_is_reported() -> None:
    released = threading.Event()

    class Slow(Kept):
        def close(self) -> None:
            released.wait()

    class Broken(Kept):
        def close(self) -> None:
            raise OSError("disk gone")

    for bad, why in ((Slow, "it could not be closed within 0.2 s"), (Broken, "OSError: disk gone")):
        watched = Watched(bad)
        watched.loggers.log(1, STEP)
        watched.close()
        assert watched.failed == [("wandb", why)]
        assert (watched.good.steps, watched.good.closed) == ([1], True)
    released.set()


def test_more_records_than_may_wait_drop_the_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayloop.loggers.threads.MOST_WAITING_RECORDS", 3)
    monkeypatch.setattr("rayloop.loggers.threads.CALL_TIMEOUT_S", 60.0)
    released = threading.Event()
    failed = list[tuple[str, str]]()
    slow = WandbSettings()
    loggers = Loggers(
        (slow,), lambda s: Kept(lambda step: released.wait() and None), lambda *f: failed.append(f)
    )
    for step in range(5):
        loggers.log(step, STEP)
    released.set()
    asyncio.run(loggers.close())
    assert failed == [("wandb", "3 records wait for it")]


# Configuration ------------------------------------------------------------------------------------


def test_a_missing_package_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    wanted = config(tmp_path, loggers=[{"kind": "wandb"}])
    with pytest.raises(
        ConfigError,
        match=r'loggers\.0: kind wandb .* not installed.* pip install "rayloop\[wandb\]"',
    ):
        preflight(prepare(wanted))


def test_a_folder_of_a_packages_name_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B itself makes ``./wandb``, which Python would import as an empty package."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()
    with pytest.raises(ConfigError, match="wandb, which is not installed"):
        preflight(prepare(config(tmp_path, loggers=[{"kind": "wandb"}])))


def test_a_kind_may_be_chosen_once(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="kind tensorboard is listed more than once"):
        config(tmp_path, loggers=[{"kind": "tensorboard"}, {"kind": "tensorboard"}])


# The loggers themselves ---------------------------------------------------------------------------


def logged(chosen: AnySettings, folder: RunFolder, *steps: tuple[int, float]) -> None:
    """What one driver does: open, log (step, reward) pairs, close."""
    logger = open_logger(chosen, "run", {"seed": 0}, folder)
    for step, reward in steps:
        logger.log(step, {"step": float(step), "reward/mean": reward, "actor/loss": float("nan")})
    logger.close()


def test_tensorboard_reads_each_step_once_over_restores_and_drivers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder.at(tmp_path)
    logged(
        GOOD, folder, (1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25), (3, 0.35)
    )  # the policy was lost, step 1 restored
    logged(GOOD, folder, (3, 0.375), (4, 0.5))  # the driver died after step 3 and restored step 2
    reader = EventAccumulator(str(folder.tensorboard))
    reader.Reload()
    assert reader.Tags()["scalars"] == ["reward/mean", "actor/loss"]
    found = [(event.step, event.value) for event in reader.Scalars("reward/mean")]
    assert found == [(1, pytest.approx(0.1)), (2, 0.25), (3, 0.375), (4, 0.5)]


def test_the_writers_leave_torch_alone() -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    code = (
        "import sys, tempfile; from rayloop.cluster.loop.loggers import *; from pathlib import"
        " Path\nTensorBoard(Path(tempfile.mkdtemp())).log(1, {'a': 1.0})\nsys.exit('torch' in"
        " sys.modules or 'tensorflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_wandb_continues_one_run_by_the_id_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FAKE of the part of W&B's module that is used; the real one is in the next test."""
    calls: list[tuple[str, Any]] = []

    class FakeRun:
        def define_metric(self, name: str, step_metric: str) -> None:
            calls.append(("define", (name, step_metric)))

        def log(self, record: Mapping[str, float]) -> None:
            calls.append(("log", record["step"]))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**options: Any) -> FakeRun:
        calls.append(("init", options))
        return FakeRun()

    fake = types.SimpleNamespace(init=init, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = RunFolder.at(tmp_path)
    chosen = WandbSettings()
    with full(3), pytest.raises(OSError, match="File too large"):
        logged(chosen, folder)
    logged(chosen, folder, (1, 0.1), (2, 0.2))
    logged(chosen, folder, (2, 0.3))
    assert [(name, value) for name, value in calls if name != "init"] == [
        ("define", ("*", "step")),
        ("log", 1),
        ("log", 2),
        ("finish", None),
        ("define", ("*", "step")),
        ("log", 2),
        ("finish", None),
    ]
    first, second = (options for name, options in calls if name == "init")
    assert first == second
    assert first["id"] == (tmp_path / "wandb" / "id").read_text(encoding="utf-8")
    assert len(first["id"]) == 8, "a full disk left no part of an id"
    assert {k: first[k] for k in ("project", "name", "config", "resume", "dir")} == {
        "project": "rayloop",
        "name": "run",
        "config": {"seed": 0},
        "resume": "allow",
        "dir": str(tmp_path),
    }


def test_wandb_offline_keeps_two_drivers_files_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    folder = RunFolder.at(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    offline = WandbSettings()
    logged(offline, folder, (1, 0.1))
    logged(offline, folder, (2, 0.2))
    (name,) = {path.name for path in folder.wandb.glob("offline-run-*/*.wandb")}
    assert name == f"run-{(folder.wandb / 'id').read_text(encoding='utf-8')}.wandb"


PROMETHEUS = """
import sys, time, tempfile, urllib.request
from rayloop.launch.ray_variables import private_cluster

with private_cluster() as temporary:
    import ray
    from rayloop.cluster.session import session
    from pathlib import Path

    @ray.remote
    class Stands:  # where the driver does
        def log(self):
            from rayloop.cluster.loop.loggers import Prometheus
            from rayloop.run.folder import RunFolder
            from rayloop.view.health import RunHealth
            self.logger = Prometheus("tested", RunHealth(RunFolder.at(tempfile.mkdtemp()), {}))
            self.logger.log(7, {"step": 7.0, "reward/mean": 0.5, "reward/digits/mean": 0.25, "actor/loss": float("nan"),
                                "ledger/filtered[all_wrong]": 3.0})
            return "torch" in sys.modules

    with session({}, None, temporary, Path(tempfile.mkdtemp())):
        def read():
            (node,) = ray.nodes()
            try:
                with urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics") as page:
                    return [line for line in page.read().decode().splitlines() if line.startswith("ray_rayloop_")]
            except OSError:
                return []

        def seen():
            for _ in range(60):
                if len(lines := read()) >= 4:
                    return lines
                time.sleep(1)
            return lines

        actor = Stands.remote()
        assert not ray.get(actor.log.remote()), "torch was imported"
        seen()
        time.sleep(25)  # longer than Ray keeps a gauge that nobody sets
        lines = seen()
        print("\\n".join(lines))
"""


@pytest.mark.slow_faults
@pytest.mark.timeout(180)
def test_prometheus_reads_the_gauges_from_a_private_cluster(tmp_path: Path) -> None:
    """A private cluster has no dashboard, but its node's agent serves the metrics port; a step may
    take minutes.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROMETHEUS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition("} ")
        ours = dict(part.split("=", 1) for part in labels.split(","))
        found[name, ours.get("source", ours.get("state", ""))] = float(value)
        assert ours["run"] == '"tested"'
    recovery = {name for name, _ in found if name.startswith("ray_rayloop_recovery_")}
    assert {"ray_rayloop_recovery_progress_age", "ray_rayloop_recovery_budget_left"} <= recovery
    assert {key: value for key, value in found.items() if key[0] not in recovery} == {
        ("ray_rayloop_step", ""): 7.0,
        ("ray_rayloop_reward_mean", '""'): 0.5,
        ("ray_rayloop_reward_mean", '"digits"'): 0.25,
        ("ray_rayloop_ledger", '"filtered[all_wrong]"'): 3.0,
    }


class Listed:
    """A logger as a user writes one."""

    class Settings(SettingsModel):
        title: str

    kept: ClassVar[list[Any]] = []

    def __init__(
        self, settings: Settings, name: str, config: Mapping[str, Any], folder: Path
    ) -> None:
        self.kept.append((settings.title, name, config["seed"], folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.kept.append((step, metrics["reward/mean"]))

    def close(self) -> None:
        self.kept.append("closed")


def test_a_logger_of_your_own_gets_the_run_and_each_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"use": f"{__name__}:Listed", "with": {"title": "mine"}}
    [chosen] = config(tmp_path, loggers=[own]).loggers
    logged(chosen, RunFolder.at(tmp_path), (1, 0.5))
    assert Listed.kept == [("mine", "run", 0, tmp_path), (1, 0.5), "closed"]
    with pytest.raises(ValidationError, match="more than once"):
        config(tmp_path, loggers=[own, own])
    with pytest.raises(ConfigError, match="title"):
        check_components(config(tmp_path, loggers=[{**own, "with": {}}]))
