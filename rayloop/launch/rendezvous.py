"""The folder on the shared file system through which the nodes of a cluster find each other.

Its name is the cluster's. It holds:

- ``head.json``: the head's address, dashboard, token file and job. It is written under another name
  and renamed, and removed when the head leaves or its Ray ended.
- ``token``: the cluster's token, readable by its owner only. Processes get its path, never the
  token.
- ``left``: the same as head.json, once that head has begun to leave: runs save, and workers stay
  while it still listens.
- ``jobs/``: one file per Slurm job that belongs to the cluster.

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

from rayloop.core.failures import START_AGAIN_EXIT_CODE, ConfigError, InfrastructureFailure
from rayloop.core.files import new_secret, trusted, write_whole
from rayloop.launch import slurm_job
from rayloop.launch.network import unreachable

ROOT = "~/.rayloop"
"""Where rendezvous folders are by default: home folders are shared on most clusters."""
POLL_INTERVAL_S = 0.5
"""Seconds between two looks into the folder."""
HEAD_LOST_AFTER_S = 60.0
"""Seconds without an accepted connection after which a head counts as lost.

Ray's processes take as long.
"""
UNPUBLISHED_TIMEOUT_S = 600.0
"""Seconds after which a head ends that cannot publish its entry.

No new node can find it during that time.
"""
REPORT_AFTER_S = 5.0
"""Seconds that a problem lasts before it is reported."""


def default_root() -> Path:
    """Where this user's rendezvous folders are, unless a command names another place."""
    return Path(os.environ.get("RAYLOOP_RENDEZVOUS", ROOT)).expanduser()


class NoHead(InfrastructureFailure):
    """No live head was published within the deadline."""

    exit_code = START_AGAIN_EXIT_CODE


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
        """The reason why this head cannot run any more.

        None: it answers, and its job is not known to have ended.
        """
        if not accepts(self.address):
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
        """Prepare the folder for a new head, and remove the files of a former one.

        Returns the token's path, or None without one. Raises ConfigError while the cluster has a
        live head, and for a folder or a token that others may have written.
        """
        self._make()
        former = self.head()
        if former is not None:
            reason = former.stale()
            if reason is None:
                raise ConfigError(
                    f"the cluster {self.cluster} has a head already, at {former.address} on"
                    f" {former.node}. Choose another name, or end it with `python -m rayloop slurm"
                    " down`"
                )
            print(f"removing the files of a former head: {reason}", flush=True)
        for name in ("head.json", "left"):
            (self.folder / name).unlink(missing_ok=True)
        return None if insecure else new_secret(self.folder / "token", "the cluster's token")

    def register(self, number: str, *, program: bool = False) -> None:
        """Record a Slurm job of the cluster.

        `slurm down` ends all of them, first the jobs with a ``program``.
        """
        self._make()
        (self.folder / "jobs").mkdir(exist_ok=True)
        # Appended, since a job may have several nodes.
        with (self.folder / "jobs" / number).open("a", encoding="utf-8") as file:
            file.write("program\n" if program else "")

    def jobs(self, *, programs: bool = False) -> list[str]:
        """The recorded jobs; with ``programs`` only the jobs that have a program."""
        files = sorted((self.folder / "jobs").glob("*"))
        if programs:
            files = [file for file in files if file.read_text(encoding="utf-8")]
        return [file.name for file in files]

    def publish(self, head: Head) -> None:
        """Write the entry of a head. Raises OSError."""
        self._write("head.json", head)

    def seen(self) -> Head | str:
        """The published head, which may be stale, or the reason for its absence.

        The reason names the file. Raises ConfigError.
        """
        return self._read("head.json")

    def head(self) -> Head | None:
        """The published head, which may be stale; None: no entry can be read.

        Raises ConfigError.
        """
        entry = self.seen()
        return None if isinstance(entry, str) else entry

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
        deadline = time.monotonic() + seconds
        problem = ""
        while time.monotonic() < deadline:
            if stop():
                return None
            entry = self.seen()
            if isinstance(entry, str):
                problem = entry
            else:
                reason = entry.stale()
                if reason is None:
                    return entry
                problem = f"the entry in {self.folder} is stale: {reason}"
            time.sleep(POLL_INTERVAL_S)
        raise NoHead(
            f"no head of the cluster {self.cluster} within {seconds:g} s: {problem}. Is its job"
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
            # The entry decides where code is run, and with which token.
            trusted(self.folder, "the cluster's folder")
            return Head(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return f"nothing was published in {self.folder}"
        except (OSError, ValueError, TypeError) as error:
            # Also ESTALE of NFS, when the file is replaced or removed while it is read.
            return f"{file} cannot be read: {error}"


class HeadLeft:
    """Whether a head has left.

    It has when another one is published, when it began to leave and is silent, or when it was
    silent for HEAD_LOST_AFTER_S. ``saves``: a program must save as soon as the head begins
    to leave.
    """

    def __init__(self, place: Rendezvous, joined: Head, saves: bool) -> None:
        self._place = place
        self._joined = joined
        self._saves = saves
        self._listened = time.monotonic()
        self._report = Report(REPORT_AFTER_S)

    def __call__(self) -> bool:
        """Look once. Raises ConfigError when others may write the rendezvous folder."""
        entry = self._place.seen()
        listens = accepts(self._joined.address)
        if isinstance(entry, Head) and entry != self._joined:
            return True
        leaving = isinstance(entry, str) and self._place.left(self._joined)
        if leaving and self._saves:
            return True
        if not listens:
            self._report(
                f"{self._joined.address} accepts no connection: waiting, {HEAD_LOST_AFTER_S:g} s at"
                " most"
            )
            return leaving or time.monotonic() - self._listened > HEAD_LOST_AFTER_S
        self._listened = time.monotonic()
        problem = ""
        if isinstance(entry, str) and not leaving:
            problem = f"{entry}; {self._joined.address} still listens, and this node stays"
        self._report(problem)
        return False

    def replaced(self) -> bool:
        """Whether another head is published: the state of the joined one is lost."""
        return self._place.head() not in (self._joined, None)


class Unpublished:
    """Whether a head cannot be found any more.

    Another head is published in its place, or its entry could not be written for
    UNPUBLISHED_TIMEOUT_S.
    """

    def __init__(self, place: Rendezvous, entry: Head) -> None:
        self._place = place
        self._entry = entry
        self._last_seen = time.monotonic()
        self._report = Report(0.0)
        self.reason = ""
        """The reason in words, once there is one."""

    def __call__(self) -> bool:
        """Look once. Raises ConfigError when others may write the rendezvous folder."""
        entry = self._place.seen()
        if entry == self._entry:
            self._last_seen = time.monotonic()
            self._report("")
            return False
        if isinstance(entry, Head):
            self.reason = (
                f"{self._place.folder} has another head's entry, that of {entry.address} on"
                f" {entry.node}"
            )
            return True
        self._report(f"{entry}; it is written again, this head continues")
        try:
            self._place.publish(self._entry)
        except OSError as error:
            self.reason = (
                f"its entry in {self._place.folder} could not be published for"
                f" {UNPUBLISHED_TIMEOUT_S:g} s: {error}"
            )
        return time.monotonic() - self._last_seen > UNPUBLISHED_TIMEOUT_S


class Report:
    """Prints a problem once, when it has lasted for ``after`` seconds, and once that it is over."""

    def __init__(self, after: float) -> None:
        self._after = after
        self._since: float | None = None
        self._printed = False

    def __call__(self, trouble: str) -> None:
        """Take the present ``trouble`` in words; "" for none."""
        if not trouble:
            if self._printed:
                print("node: that is over", flush=True)
            self._since = None
            self._printed = False
            return
        if self._since is None:
            self._since = time.monotonic()
        if not self._printed and time.monotonic() - self._since >= self._after:
            self._printed = True
            print(f"node: {trouble}", flush=True)
