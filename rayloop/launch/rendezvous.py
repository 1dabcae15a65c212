"""The folder on the shared file system through which the nodes of a cluster find each other; its
name is the cluster's.

head.json the head: address, dashboard, token file, job; written aside and renamed, gone when the
head leaves, or Ray of it ended token the cluster's token, readable by its owner only; processes get
its path, never the token left the same as head.json, once that head has begun to leave: runs save,
workers stay while it still listens jobs/ one file per Slurm job that belongs to the cluster

A file that cannot be read (a slow or failing file system, half a file) counts as missing, and nodes
that have joined stay. A head that does not listen gets as long as Ray itself gives it: a network
may come back, and a head restarts Ray.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rayloop.core.failures import AGAIN, ConfigError, InfrastructureFailure
from rayloop.core.files import new_secret, trusted, write_whole
from rayloop.launch import slurm_job
from rayloop.launch.network import unreachable

ROOT = "~/.rayloop"
"""Where rendezvous folders are by default: home folders are shared on most clusters."""
POLL = 0.5
"""Seconds between two looks into the folder."""
SILENCE = 60.0
"""Seconds without an accepted connection after which a head counts as gone, as for Ray's own
processes.
"""
UNPUBLISHED = 600.0
"""Seconds after which a head ends that cannot publish its entry: no new node can find it meanwhile.
"""
WAITS = 5.0
"""Seconds that a problem lasts before it is reported."""


def default_root() -> Path:
    """Where this user's rendezvous folders are, unless a command names another place."""
    return Path(os.environ.get("RAYLOOP_RENDEZVOUS", ROOT)).expanduser()


class NoHead(InfrastructureFailure):
    """No live head was published within the deadline."""

    exit_code = AGAIN


@dataclass(frozen=True)
class Head:
    """A head as it is published.

    ``job`` and ``restart`` are Slurm's; ``published`` is in Unix seconds.
    """

    address: str
    dashboard: str
    token: str | None
    node: str
    job: str | None
    restart: int
    published: float

    def stale(self) -> str | None:
        """Why this head cannot be there any more; None: it answers, and its job is not known to
        have ended.
        """
        if not accepts(self.address):
            return f"{self.address} accepts no connection"
        return (
            f"its job {self.job} has ended"
            if self.job is not None and slurm_job.ended(self.job)
            else None
        )


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
        """Prepare the folder for a new head, without what a former one left.

        Returns the token's path, or None without one. Raises ConfigError while the cluster has a
        live head, and for a folder or a token that others may have written.
        """
        self._make()
        former = self.head()
        if former is not None and (why := former.stale()) is None:
            raise ConfigError(
                f"the cluster {self.cluster} has a head already, at {former.address} on"
                f" {former.node}. Choose another name, or end it with `python -m rayloop slurm"
                " down`"
            )
        elif former is not None:
            print(f"removing what a former head left: {why}", flush=True)
        for name in ("head.json", "left"):
            (self.folder / name).unlink(missing_ok=True)
        return None if insecure else new_secret(self.folder / "token", "the cluster's token")

    def register(self, number: str, *, program: bool = False) -> None:
        """Record a Slurm job of the cluster.

        `slurm down` ends all of them, those with a ``program`` first.
        """
        self._make()
        (self.folder / "jobs").mkdir(exist_ok=True)
        with (self.folder / "jobs" / number).open(
            "a", encoding="utf-8"
        ) as file:  # a job may have several nodes
            file.write("program\n" if program else "")

    def jobs(self, *, programs: bool = False) -> list[str]:
        """The recorded jobs; with ``programs`` those that have one."""
        return sorted(
            file.name
            for file in (self.folder / "jobs").glob("*")
            if not programs or file.read_text(encoding="utf-8")
        )

    def publish(self, head: Head) -> None:
        """Write the entry of a head. Raises OSError."""
        self._write("head.json", head)

    def seen(self) -> Head | str:
        """The head that is published, which may be stale; else why there is none, with the file.

        Raises ConfigError.
        """
        return self._read("head.json")

    def head(self) -> Head | None:
        """The head that is published, which may be stale; None: there is none that can be read.

        Raises ConfigError.
        """
        seen = self.seen()
        return None if isinstance(seen, str) else seen

    def withdraw(self, head: Head, *, left: bool) -> None:
        """Remove the entry, unless it is another head's.

        ``left``: this head still listens, so that runs save. Ignores OSError.
        """
        with suppress(OSError):
            if self.head() in (head, None):
                if left:
                    self._write("left", head)
                (self.folder / "head.json").unlink(missing_ok=True)

    def left(self, head: Head) -> bool:
        """Whether this head has begun to leave."""
        return self._read("left") == head

    def wait(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> Head | None:
        """The head, once one is published that is not stale; None when ``stop`` returns True.

        Raises NoHead after ``seconds``.
        """
        deadline, found = time.monotonic() + seconds, ""
        while time.monotonic() < deadline:
            if stop():
                return None
            head = self.seen()
            if isinstance(head, str):
                found = head
            elif (why := head.stale()) is None:
                return head
            else:
                found = f"the entry in {self.folder} is stale: {why}"
            time.sleep(POLL)
        raise NoHead(
            f"no head of the cluster {self.cluster} within {seconds:g} s: {found}. Is its job"
            " running?"
        )

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
            trusted(
                self.folder, "the cluster's folder"
            )  # what it says is where code is run, and with which token
            return Head(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return f"nothing was published in {self.folder}"
        except (
            OSError,
            ValueError,
            TypeError,
        ) as error:  # ESTALE on NFS: replaced or removed while it was read
            return f"{file} cannot be read: {error}"


class Gone:
    """Whether a head has left: another one is published, it began to leave and is silent, or it was
    silent for SILENCE seconds. ``saves``: a program must save as soon as the head begins to leave.
    Raises ConfigError when others may write the folder.
    """

    def __init__(self, place: Rendezvous, joined: Head, saves: bool) -> None:
        self._place, self._joined, self._saves = place, joined, saves
        self._listened = time.monotonic()
        self._report = Report(WAITS)

    def __call__(self) -> bool:
        """Look once."""
        seen, listens = self._place.seen(), accepts(self._joined.address)
        if isinstance(seen, Head) and seen != self._joined:
            return True
        left = isinstance(seen, str) and self._place.left(self._joined)
        if left and self._saves:
            return True
        if listens:
            self._listened = time.monotonic()
            unreadable = isinstance(seen, str) and not left
            self._report(
                f"{seen}; {self._joined.address} still listens, and this node stays"
                if unreadable
                else ""
            )
            return False
        self._report(
            f"{self._joined.address} accepts no connection: waiting, {SILENCE:g} s at most"
        )
        return left or time.monotonic() - self._listened > SILENCE

    def replaced(self) -> bool:
        """Whether another head is published: the state of the joined one is lost."""
        return self._place.head() not in (self._joined, None)


class Unpublished:
    """Whether another head is published in place of ``me``, or its own entry could not be written
    for UNPUBLISHED seconds.
    """

    def __init__(self, place: Rendezvous, me: Head) -> None:
        self._place, self._me = place, me
        self._there = time.monotonic()
        self._report = Report(0.0)
        self.why = ""
        """The reason in words, once there is one."""

    def __call__(self) -> bool:
        """Look once. Raises ConfigError when others may write the rendezvous folder."""
        seen = self._place.seen()
        if seen == self._me:
            self._there = time.monotonic()
            self._report("")
            return False
        if isinstance(seen, Head):
            self.why = (
                f"{self._place.folder} has another head's entry, that of {seen.address} on"
                f" {seen.node}"
            )
            return True
        self._report(f"{seen}; it is written again, this head goes on")
        try:
            self._place.publish(self._me)
        except OSError as error:
            self.why = (
                f"its entry in {self._place.folder} could not be published for {UNPUBLISHED:g} s:"
                f" {error}"
            )
        return time.monotonic() - self._there > UNPUBLISHED


class Report:
    """Prints a problem once, when it has lasted for ``waits`` seconds, and once that it is over."""

    def __init__(self, waits: float) -> None:
        self._waits = waits
        self._since: float | None = None
        self._printed = False

    def __call__(self, trouble: str) -> None:
        """``trouble`` in words; "" for none."""
        if not trouble:
            if self._printed:
                print("node: that is over", flush=True)
            self._since, self._printed = None, False
            return
        self._since = time.monotonic() if self._since is None else self._since
        if not self._printed and time.monotonic() - self._since >= self._waits:
            self._printed = True
            print(f"node: {trouble}", flush=True)
