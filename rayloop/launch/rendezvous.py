"""Where the nodes of a cluster find each other: a folder on the shared file system, named after the cluster.

head.json   the head: address, dashboard, token file, job; written aside and renamed, gone when the head leaves
token       the cluster's token, readable by its owner only; its path is handed over, never the token
done        the same as head.json, once that cluster has done its work: its workers end
jobs/       one file per Slurm job that belongs to the cluster
"""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.core.files import new_secret, trusted, write_whole
from rayloop.launch import slurm_job
from rayloop.launch.addresses import unreachable

POLL = 0.5
"""Seconds between two looks into the folder."""


class NoHead(InfrastructureFailure):
    """No live head was published within the deadline."""


@dataclass(frozen=True)
class Head:
    """A head as it is published. ``job`` and ``restart`` are Slurm's; ``published`` is in Unix seconds."""

    address: str
    dashboard: str
    token: str | None
    node: str
    job: str | None
    restart: int
    published: float

    def accepts(self) -> bool:
        """Whether somebody listens at the address."""
        return accepts(self.address)

    def stale(self) -> str | None:
        """Why this head cannot be there any more; None: it answers, and its job is not known to have ended."""
        if not self.accepts():
            return f"{self.address} accepts no connection"
        if self.job is not None and slurm_job.ended(self.job):
            return f"its job {self.job} has ended"
        return None


def accepts(address: str) -> bool:
    """Whether ``host:port`` accepts a TCP connection."""
    host, _, port = address.rpartition(":")
    return not unreachable(host, int(port))


class Rendezvous:
    """The folder of one cluster, below ``root``."""

    def __init__(self, root: Path, cluster: str) -> None:
        if not cluster or "/" in cluster or cluster.startswith("."):
            raise ConfigError(f"--cluster {cluster}: expected a name that can be a folder's")
        self.cluster = cluster
        self.folder = root.expanduser().absolute() / cluster

    def open(self, insecure: bool) -> Path | None:
        """Prepare the folder for a new head: the token's path, or None without one. What a former head left is removed.

        Raises ConfigError while the cluster has a live head, and for a folder or a token that others may have written.
        """
        self._make()
        former = self.head()
        if former is not None and (why := former.stale()) is None:
            raise ConfigError(
                f"the cluster {self.cluster} has a head already, at {former.address} on {former.node}. Choose another name, "
                f"or end it with `python -m cluster slurm down`"
            )
        elif former is not None:
            print(f"removing what a former head left: {why}", flush=True)
        for name in ("head.json", "done"):
            (self.folder / name).unlink(missing_ok=True)
        return None if insecure else new_secret(self.folder / "token", "the cluster's token")

    def register(self, number: str, *, program: bool = False) -> None:
        """Note a Slurm job as the cluster's: whoever ends the cluster ends it too, those with a ``program`` first."""
        self._make()
        (self.folder / "jobs").mkdir(exist_ok=True)
        with (self.folder / "jobs" / number).open("a") as file:  # a job may have several nodes
            file.write("program\n" if program else "")

    def jobs(self, *, programs: bool = False) -> list[str]:
        """The jobs that were noted; with ``programs`` those that have one."""
        return sorted(file.name for file in (self.folder / "jobs").glob("*") if not programs or file.read_text())

    def publish(self, head: Head) -> None:
        self._write("head.json", head)

    def head(self) -> Head | None:
        """The head that is published, which may be stale; None: there is none."""
        return self._read("head.json")

    def withdraw(self, head: Head, *, done: bool = False) -> None:
        """Take the entry back, unless another head has replaced it. ``done``: nobody need wait for another head."""
        if self.head() == head:
            if done:
                self._write("done", head)
            (self.folder / "head.json").unlink()

    def done(self, head: Head) -> bool:
        """Whether the cluster of this head has done its work."""
        return self._read("done") == head

    def wait(self, seconds: float, former: Head | None = None, stop: Callable[[], bool] = lambda: False) -> Head | None:
        """The head, as soon as one is published that is not stale. None: ``stop`` says so, or ``former``'s cluster is done.

        Raises NoHead after ``seconds``, with what was found instead.
        """
        deadline, found = time.monotonic() + seconds, f"nothing was published in {self.folder}"
        while time.monotonic() < deadline:
            if stop() or (former is not None and self.done(former)):
                return None
            head = self.head()
            if head is not None:
                if (why := head.stale()) is None:
                    return head
                found = f"the entry in {self.folder} is stale: {why}"
            time.sleep(POLL)
        raise NoHead(f"no head of the cluster {self.cluster} within {seconds:g} s: {found}. Is its job running?")

    def remove(self) -> None:
        """Remove the folder, the token with it."""
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _make(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        trusted(self.folder, "the cluster's folder")

    def _write(self, name: str, head: Head) -> None:
        write_whole(self.folder / name, json.dumps(asdict(head)).encode())

    def _read(self, name: str) -> Head | None:
        try:
            trusted(self.folder, "the cluster's folder")  # what it says is where code is run, and with which token
            return Head(**json.loads((self.folder / name).read_text()))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # ESTALE: on NFS, replaced or removed while it was read
                return None
            raise
