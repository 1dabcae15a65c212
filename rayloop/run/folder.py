"""The run folder and its layout (docs/run_folder.md).

The process that starts the run acquires it; the driver writes into it.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import yaml

from rayloop.core.failures import ConfigError, RunNameInUse, StorageFailed
from rayloop.core.files import YAML_LOADER, content, mount_of, needed, write_whole
from rayloop.run.lock import RunLock
from rayloop.run.records.events import EventLog
from rayloop.run.records.jsonl import SCHEMA_VERSION, JsonLines, encode, is_number
from rayloop.run.records.rollouts import RolloutDump, aside, is_rollout

MAX_CONFIG_BYTES = 2**22
MOST_VALUES = 100_000
SHOWN_ROWS = 10
"""Rows left out for one reason that the console shows; quarantine.jsonl has all."""


class RunFolder:
    """``<root>/<name>/``.

    ``metrics``, ``events`` and ``quarantine`` are append-only record files.
    """

    def __init__(self, root: str | Path, name: str) -> None:
        self.path = Path(root) / name
        self.config = self.path / "config.yaml"
        self.metrics = JsonLines(self.path / "metrics.jsonl", is_step)
        self.events = EventLog(self.path / "events.jsonl")
        self.quarantine = JsonLines(self.path / "quarantine.jsonl")
        self.rollouts = RolloutDump(self.path / "rollouts", is_rollout)
        self.evaluations = RolloutDump(self.path / "evaluations", is_answer)
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "weights"
        self.logs = self.path / "logs"
        self.tensorboard = self.path / "tensorboard"
        self.wandb = self.path / "wandb"
        self.cluster = self.path / "cluster.json"
        self.lock = RunLock(self.path / "run.lock")

    @classmethod
    def at(cls, path: str | Path) -> Self:
        """The run folder at ``path``, for the processes that were given one."""
        return cls(Path(path).parent, Path(path).name)

    @classmethod
    def begun(cls, path: Path) -> Self:
        """The folder of a run that has begun, for reading.

        Raises ConfigError when ``path`` is not such a folder.
        """
        folder = cls.at(path.resolve())
        if not folder.used:
            lacks = (
                "it has neither config.yaml nor metrics.jsonl. Name a run's folder,"
                " <output>/<name>."
            )
            raise ConfigError(f"{path} holds no run: {lacks}")
        return folder

    @property
    def configuration(self) -> dict[str, Any]:
        """The run's configuration as plain data.

        Another version of rayloop may have written it.
        """
        return configuration(self.config) if self.config.exists() else {}

    @contextmanager
    def acquired(self, resume: str = "auto") -> Iterator[Self]:
        """Make the layout and hold the lock.

        ``resume``: auto, never, or a checkpoint folder. Raises RunNameInUse (a live holder; with
        ``never`` any run), ConfigError (not possible to make) and StorageFailed (not writable).
        """
        make_folder(self.path, "output=FOLDER")
        try:
            with needed(self.lock.path):
                self.lock.acquire()
            # Under the lock, since another start may just be making the run.
            if resume == "never" and self.used:
                raise RunNameInUse(
                    f"{self.path} holds a run already (last step: {self.last_step()}). To continue"
                    " it, start it again with checkpoint.resume=auto; to start afresh, choose"
                    " another name=... or remove the folder."
                )
            with needed(self.path):
                for folder in (
                    self.rollouts.path,
                    self.evaluations.path,
                    self.checkpoints,
                    self.weights,
                    self.logs,
                ):
                    folder.mkdir(exist_ok=True)
            yield self
        finally:  # a signal may have ended acquire itself
            self.close()
            with suppress(OSError):  # then it is taken over, as that of a process that was killed
                self.lock.release()

    def begun_before(self) -> None:
        """For a start after a failure: raises StorageFailed when the folder is missing.

        The first start has made it.
        """
        if not (self.path.is_dir() and any(self.path.iterdir())):
            raise StorageFailed(
                f"{self.path} is not there, or empty, and this is a restart of the run that began"
                f" in it: is its storage mounted (now it would be on {mount_of(self.path)})?"
                " No new run was begun. If the run had not begun, start it by hand, or submit"
                " its job again"
            )

    @property
    def used(self) -> bool:
        """Whether a run has begun here."""
        return self.config.exists() or self.metrics.path.exists()

    def last_step(self) -> int:
        """The last step on record; 0 before the first record."""
        return max((int(record["step"]) for record in self.metrics if "step" in record), default=0)

    def write_config(self, text: str) -> None:
        """Write the expanded configuration.

        The one of an earlier attempt is kept in another file when it differs.
        """
        with needed(self.config):
            previous = self.config.read_bytes() if self.config.exists() else text.encode()
            # A copy and no rename, so that the folder has a configuration at every moment.
            if previous != text.encode():
                write_whole(aside(self.config), previous)
            write_whole(self.config, text.encode())

    def write_replay(self, step: int, stats: Mapping[str, Any]) -> None:
        """What the replay buffer held at ``step``, in place of what was known of it before."""
        record = {"schema_version": SCHEMA_VERSION, "step": step, **stats}
        write_whole(
            self.path / "replay_buffer_stats.json", (encode(record) + "\n").encode(), durable=False
        )

    def damage(self) -> str:
        """A sentence on the damaged lines that the last reads left out; "" without any."""
        files = (self.metrics, self.events, self.rollouts, self.evaluations)
        counts = [f"{file.damaged} of {file.path.name}" for file in files if file.damaged]
        return f"damaged lines are left out: {', '.join(counts)}" if counts else ""

    def truncate_after(self, step: int) -> int:
        """Move the records of later steps, and damaged lines, to ``*.attempt-K`` after a restore.

        Returns the number of metrics records moved.
        """
        with needed(self.path):
            moved_records = self.metrics.split(
                lambda record: int(record["step"]) <= step, aside(self.metrics.path)
            )
            self.rollouts.set_aside_after(step)
            self.evaluations.set_aside_after(step)
        return moved_records

    def close(self) -> None:
        """Close the record files; a later append opens them again."""
        for records in (self.metrics, self.quarantine):
            records.close()
        self.events.close()


def configuration(file: Path) -> dict[str, Any]:
    """The mapping in a run's YAML file, which may be another user's.

    It has at most ``MAX_CONFIG_BYTES`` and ``MOST_VALUES`` values, where the values behind an
    alias count each time. Raises ConfigError.
    """
    try:
        document = yaml.load(content(file, MAX_CONFIG_BYTES).decode("utf-8"), YAML_LOADER)
        # A stack, since recursion could end at a deep nesting; it counts an alias each time.
        pending = [document]
        count = 0
        while pending:
            value = pending.pop()
            count += 1
            if count > MOST_VALUES:
                raise ValueError(f"it has more than {MOST_VALUES} values")
            if isinstance(value, dict):
                pending += value.values()
            elif isinstance(value, list):
                pending += value
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(document, dict | None):
        raise ConfigError(
            f"{file} holds no configuration: expected keys and values, found"
            f" {type(document).__name__}"
        )
    return document or {}


def make_folder(path: Path, choice: str) -> None:
    """Make the folder unless it exists.

    Raises ConfigError, which names ``choice``, when it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission to write")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made or written to: {error.strerror}. Choose another folder with"
            f" {choice}"
        ) from error


def is_step(record: Mapping[str, Any]) -> bool:
    """Whether it is a record of metrics.jsonl.

    That is a step's numbers by name, null where one was not finite.
    """
    placed = is_number(record.get("step")) and is_number(record.get("time"))
    return placed and all(value is None or is_number(value) for value in record.values())


def is_answer(record: Mapping[str, Any]) -> bool:
    """Whether it is an answer of an evaluation (rayloop/measure/controls.py)."""
    return record.keys() >= {"arm", "task", "reward"}
