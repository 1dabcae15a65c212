"""The folder on the shared file system through which the nodes of a cluster find each other; its name is the cluster's.

head.json   the head: address, dashboard, token file, job; written aside and renamed, gone when the head leaves, or Ray of it ended
token       the cluster's token, readable by its owner only; processes get its path, never the token
done        the same as head.json, once that cluster has done its work: its workers end
left        the same, once that head has begun to leave and another one will come: runs save, workers stay while it still listens

A file that cannot be read (a slow or failing file system, half a file) is as one that is not there.
jobs/       one file per Slurm job that belongs to the cluster
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rayloop.core.failures import AGAIN, ConfigError, InfrastructureFailure
from rayloop.core.files import new_secret, trusted, write_whole
from rayloop.launch import slurm_job
from rayloop.launch.addresses import unreachable

ROOT = "~/.rayloop"
"""Where rendezvous folders are by default: home folders are shared on most clusters."""
POLL = 0.5
"""Seconds between two looks into the folder."""


class NoHead(InfrastructureFailure):
    """No live head was published within the deadline."""

    exit_code = AGAIN


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
                f"or end it with `python -m rayloop slurm down`"
            )
        elif former is not None:
            print(f"removing what a former head left: {why}", flush=True)
        for name in ("head.json", "done", "left"):
            (self.folder / name).unlink(missing_ok=True)
        return None if insecure else new_secret(self.folder / "token", "the cluster's token")

    def register(self, number: str, *, program: bool = False) -> None:
        """Record a Slurm job of the cluster. `slurm down` ends all of them, those with a ``program`` first."""
        self._make()
        (self.folder / "jobs").mkdir(exist_ok=True)
        with (self.folder / "jobs" / number).open("a", encoding="utf-8") as file:  # a job may have several nodes
            file.write("program\n" if program else "")

    def jobs(self, *, programs: bool = False) -> list[str]:
        """The recorded jobs; with ``programs`` those that have one."""
        return sorted(file.name for file in (self.folder / "jobs").glob("*") if not programs or file.read_text(encoding="utf-8"))

    def publish(self, head: Head) -> None:
        """Write the entry of a head. Raises OSError."""
        self._write("head.json", head)

    def seen(self) -> Head | str:
        """The head that is published, which may be stale; else why there is none, with the file. Raises ConfigError."""
        return self._read("head.json")

    def head(self) -> Head | None:
        """The head that is published, which may be stale; None: there is none that can be read. Raises ConfigError."""
        seen = self.seen()
        return None if isinstance(seen, str) else seen

    def withdraw(self, head: Head, *, done: bool = False, left: bool = False) -> None:
        """Remove the entry, unless it is another head's. ``done``: no other head will come. ``left``: another one will, and this
        one listens for a while, so that runs save.

        Errors of the file system are ignored: the node ends anyway, and the others notice that it does not listen.
        """
        with suppress(OSError):
            if self.head() in (head, None):
                if done or left:
                    self._write("done" if done else "left", head)
                (self.folder / "head.json").unlink(missing_ok=True)

    def done(self, head: Head) -> bool:
        """Whether the cluster of this head has done its work."""
        return self._read("done") == head

    def left(self, head: Head) -> bool:
        """Whether this head has begun to leave."""
        return self._read("left") == head

    def wait(self, seconds: float, former: Head | None = None, stop: Callable[[], bool] = lambda: False) -> Head | None:
        """The head, as soon as one is published that is not stale. None: ``stop`` says so, or ``former``'s cluster is done.

        Raises NoHead after ``seconds``, with what was found instead.
        """
        deadline, found = time.monotonic() + seconds, ""
        while time.monotonic() < deadline:
            if stop() or (former is not None and self.done(former)):
                return None
            head = self.seen()
            if isinstance(head, str):
                found = head
            elif (why := head.stale()) is None:
                return head
            else:
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

    def _read(self, name: str) -> Head | str:
        file = self.folder / name
        try:
            trusted(self.folder, "the cluster's folder")  # what it says is where code is run, and with which token
            return Head(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return f"nothing was published in {self.folder}"
        except (OSError, ValueError, TypeError) as error:  # ESTALE on NFS: replaced or removed while it was read
            return f"{file} cannot be read: {error}"
