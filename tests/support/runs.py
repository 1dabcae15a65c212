"""Real runs for tests: tiny models and configurations, ``python -m rayloop train`` as a process,
and what it leaves behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from rayloop.recipes.digits.data import rows
from rayloop.run.records import metrics
from tests.support import event_records

ROOT = Path(__file__).parents[2]
TAG = "RAYLOOP_TEST_RUN"
"""Environment variable that every process of a run inherits."""
START, END = 180.0, 300.0
"""Seconds that a run may take to begin, and altogether."""


def settings(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """A run of a few small groups on sorting digits.

    ``changes`` are dotted keys with ``__`` for the dots.
    """
    data = folder / "train.jsonl"
    if not data.exists():
        train, _ = rows(24, 0, 3, 5, seed=0)
        data.write_text("".join(json.dumps(row) + "\n" for row in train), encoding="utf-8")
    config: dict[str, Any] = {
        "name": "run",
        "output": str(folder),
        "steps": 3,
        "model": {"path": str(model)},
        "data": {"train": str(data), "reader": {"use": "rayloop.recipes.digits.data:DigitRows"}},
        "rollout": {"sampling": {"max_tokens": 8, "min_tokens": 2}, "engine": {"threads": 1}},
        "environment": {
            "episode": {
                "environment": {"use": "tests.support.faulty:FaultyEnvironment", "with": {}}
            }
        },
        "reward": {"source": {"use": "tests.support.rewards:TokenReward", "with": {}}},
        "policy": {"engine": {"threads": 1}, "optimizer": {"lr": 1.0e-3}},
        "algorithm": {"group_size": 4, "groups_per_step": 2},
        "weight_sync": {"logprob_check": "stop"},
        "checkpoint": {"every": 1},
        "recovery": {"health_timeout": 3600.0},  # only a call to a dead actor notices it
    }
    for key, value in changes.items():
        set_key(config, key.replace("__", "."), value)
    return config


def set_key(config: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    place = config
    for key in path:
        place = place.setdefault(key, {})
    place[last] = value


def tagged(tag: str) -> list[psutil.Process]:
    """All processes of a run, zombies left out."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TAG) == tag:
                found.append(process)
    return found


def eventually(
    condition: Callable[[], Any],
    what: str | Callable[[], str],
    deadline: float,
    every: float = 0.02,
) -> Any:
    """The first true value of ``condition``. Raises AssertionError after ``deadline`` seconds.

    ``what``: the start of its message; a function is called after the deadline.
    """
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(every)
    subject = what if isinstance(what, str) else what()
    raise AssertionError(f"{subject}: not within {deadline:g} s")


@dataclass
class Run:
    """A running or ended ``train`` process.

    ``folder`` is the run folder, ``temporary`` its TMPDIR.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    temporary: Path
    tag: str
    output: Path
    shared_memory: frozenset[str]

    def records(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            return []
        return [
            json.loads(line)
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
            if line.endswith("\n")
        ]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Raises AssertionError when one of them is not as the table of events says
        (docs/events.md).
        """
        found = self.records("events")
        assert event_records.validate(found) == ()
        return found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Raises AssertionError when one of them is not in the table of metrics (docs/metrics.md)."""
        found = self.records("metrics")
        assert (
            metrics.validate(
                {name for record in found for name in record} - {"schema_version", "time"}
            )
            == ()
        )
        return found

    @property
    def text(self) -> str:
        """What the process printed."""
        return self.output.read_text(errors="replace", encoding="utf-8")

    def named(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """The events of this name whose fields have these values."""
        return [
            e
            for e in self.events
            if e["event"] == event and all(e.get(k) == v for k, v in fields.items())
        ]

    def until(self, condition: Callable[[], Any], what: str, deadline: float = START) -> Any:
        """Wait for a condition while the run goes on; fails at once, with its output, when it ends
        before.
        """

        def check() -> Any:
            ended = self.process.poll() is not None
            if not (value := condition()) and ended:
                raise AssertionError(
                    f"{what}: the run ended before, with code"
                    f" {self.process.returncode}:\n{self.text}"
                )
            return value

        return eventually(check, lambda: f"{what}\n{self.text}", deadline)

    def until_event(self, event: str, deadline: float = START, **fields: Any) -> dict[str, Any]:
        found: list[dict[str, Any]] = self.until(
            lambda: self.named(event, **fields), f"event {event} {fields}", deadline
        )
        return found[0]

    def actors(self, name: str) -> list[psutil.Process]:
        """The live processes of an actor class, oldest first: Ray names them ``ray::Class``."""
        found = []
        for process in tagged(self.tag):
            with suppress(psutil.Error):
                if "".join(process.cmdline()).startswith(f"ray::{name}"):
                    found.append(process)
        return sorted(found, key=psutil.Process.create_time)

    def actor(self, name: str) -> psutil.Process:
        found: list[psutil.Process] = self.until(lambda: self.actors(name), f"an actor {name}")
        return found[0]

    def wait(self, deadline: float = END) -> int:
        """The exit code.

        Raises AssertionError, with the output, when the run does not end in time.
        """
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the run did not end within {deadline:g} s:\n{self.text}"
            ) from None

    def ends(self, code: int, deadline: float = END) -> None:
        """The run ends with this code, and nothing is left behind."""
        found = self.wait(deadline)
        assert found == code, self.text
        _ = self.events, self.metrics  # each is compared with its table
        self.nothing_left_behind()

    def _kept_memory(self) -> list[str]:
        """Ray's shared memory that was not there before; that of clusters beside this one has a
        name for a moment only.
        """
        new = set(os.listdir("/dev/shm")) - self.shared_memory
        return [name for name in new if name.startswith(("plasma", "ray_"))]

    def killed(self) -> None:
        """SIGKILL for every process of the run at once, as when a node dies."""
        for process in tagged(self.tag):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)
        eventually(lambda: not tagged(self.tag), "the run's processes die", 10)

    def nothing_left_behind(self) -> None:
        """No process (hence no port), no file in TMPDIR, no shared memory, 10 s after the end; and
        the lock is free.
        """
        eventually(
            lambda: not tagged(self.tag), f"processes of the run end: {tagged(self.tag)}", 10
        )
        left = [str(path) for path in self.temporary.rglob("*")]
        assert not left, f"files in the run's TMPDIR: {left[:20]}"
        eventually(
            lambda: not self._kept_memory(),
            f"shared memory is given back: {self._kept_memory()}",
            10,
        )
        assert (self.folder / "run.lock").read_text(encoding="utf-8") == ""


@contextmanager
def run(
    config: Mapping[str, Any], overrides: Sequence[str] = (), module: str = "rayloop"
) -> Iterator[Run]:
    """Start a run, by ``python -m module train``; when the block ends, whatever still lives of it
    is killed.
    """
    folder = Path(config["output"])
    number = len(list(folder.glob("run-*.yaml")))
    path = folder / f"run-{number}.yaml"
    path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    temporary, tag = Path(tempfile.mkdtemp(prefix="")), uuid.uuid4().hex
    environment = {
        **os.environ,
        TAG: tag,
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    output = folder / f"run-{number}.log"
    before = frozenset(os.listdir("/dev/shm"))
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "train", str(path), *overrides],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    made = Run(process, folder / config["name"], temporary, tag, output, before)
    try:
        yield made
    finally:
        if made.process.poll() is None or tagged(tag):
            made.killed()
        shutil.rmtree(temporary, ignore_errors=True)


def finished(config: Mapping[str, Any], code: int = 0, overrides: Sequence[str] = ()) -> Run:
    """A run that was waited for, ended with ``code`` and left nothing behind."""
    with run(config, overrides) as made:
        made.ends(code)
    return made


def pause(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)


def resume(process: psutil.Process) -> None:
    process.send_signal(signal.SIGCONT)


def ledger_closes(counts: Mapping[str, int]) -> None:
    """Every issued trajectory is final, and counted once."""
    final = {
        name: n
        for name, n in counts.items()
        if name not in ("issued", "in_flight", "ready", "attempts", "replayed")
    }
    assert counts["in_flight"] == counts["ready"] == 0, counts
    assert counts["issued"] == sum(final.values()), counts
