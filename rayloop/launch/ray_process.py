"""The processes of one node: ``ray start --block``, a program beside it, and Ray's logs, which are
kept when it has ended.
"""

import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rayloop.core.failures import AGAIN, ConfigError, InfrastructureFailure
from rayloop.core.signals import StopSignals
from rayloop.launch.network import Ports
from rayloop.launch.rendezvous import accepts

LOG = "ray-start.log"
"""What ``ray start`` prints, in the temporary folder."""
POLL = 0.5
"""Seconds between two looks."""
START = 120.0
"""Seconds within which Ray must accept connections."""
DRAIN = 5
"""Seconds that a leaving worker waits for what runs on it (Ray's own default, 30, is all that Slurm
allows before SIGKILL).
"""
END = 5.0
"""Seconds that Ray then gets to end by itself."""
PATH_LIMIT = 40
"""Characters of the temporary folder: Ray's sockets lie below it, and a socket's path may have 107.
"""
MOST = 200 * 2**20
"""Bytes that are kept of a node."""
ENDS = 5
"""Of the same machine, of which logs are kept."""
LOGS = Path("session_latest") / "logs"
"""Where Ray writes them, below its temporary folder."""


class NodeFailed(InfrastructureFailure):
    """Ray did not start, or ended by itself while the cluster went on."""

    exit_code = AGAIN


CHILD = """import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
    sys.exit(127)
"""
"""Asks for SIGTERM at its parent's death (prctl(2), PR_SET_PDEATHSIG), then becomes the command it
is given. ``preexec_fn`` would run the libraries' after-fork hooks between fork and exec, and those
of gRPC and torch crash.
"""
_STARTED = weakref.WeakSet[subprocess.Popen[bytes]]()
"""What ``child`` returned. Its exit code is for its owner, who polls it."""


def child(
    command: Sequence[str], environment: Mapping[str, str], log: Any = None
) -> subprocess.Popen[bytes]:
    """A process out of reach of the signals for our process group; it gets SIGTERM when this
    process dies.
    """
    shim = [sys.executable, "-ISc", CHILD, str(os.getpid())]
    process = subprocess.Popen(
        [*shim, *command], env=environment, stdout=log, stderr=log, start_new_session=True
    )
    _STARTED.add(process)
    return process


def reap() -> None:
    """Take the exit codes of adopted processes that have ended (``adopt_orphans``).

    Until somebody does, each is a zombie, which Ray counts as a living member of its job.
    """
    while True:
        try:
            # WNOWAIT leaves the exit code in place until it is clear whose child has ended.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        owned = [
            process
            for process in _STARTED
            if process.pid == ended.si_pid and process.returncode is None
        ]
        if owned:
            owned[0].poll()  # keeps the exit code for the owner
        else:
            os.waitpid(ended.si_pid, os.WNOHANG)


@contextmanager
def ray_node(
    options: Sequence[str], address: str, ports: Ports, folder: Path, settings: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """``ray start --block`` with these options; with the block all its processes end.

    Raises ConfigError.
    """
    if len(str(folder)) > PATH_LIMIT:
        raise ConfigError(
            f"{folder}: sockets below it would have too long paths. Name a shorter folder with"
            " --temp-dir"
        )
    # Daemons of Ray lose their parent and are adopted by this process: what is new later is Ray's.
    before = set(psutil.Process().children())
    environment = (
        {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        | settings
        | {"TMPDIR": str(folder)}
    )
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--disable-usage-stats",
        "--log-color=false",
        f"--node-ip-address={address}",
        f"--temp-dir={folder}",
        *options,
        *(f"--{service}={port}" for service, port in ports.services.items()),
        f"--min-worker-port={ports.workers[0]}",
        f"--max-worker-port={ports.workers[1]}",
    ]
    with (folder / LOG).open("wb") as log:
        ray = child(command, environment, log)
    try:
        yield ray
    finally:
        ray.terminate()
        with suppress(subprocess.TimeoutExpired):
            ray.wait(DRAIN + END)
        _end_rest(before)


def _end_rest(before: set[psutil.Process]) -> None:
    """Kill what is left below this process, besides what was there before."""
    rest = list[psutil.Process]()
    for own in set(psutil.Process().children()) - before:
        with suppress(psutil.NoSuchProcess):
            rest += [own, *own.children(recursive=True)]
    end(rest)


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END)


def started(
    ray: subprocess.Popen[bytes],
    folder: Path,
    addresses: Sequence[str],
    signals: StopSignals,
    gone: Any = lambda: False,
) -> bool:
    """Wait until all addresses accept connections.

    Returns False when a signal or ``gone`` came before; raises NodeFailed.
    """
    deadline = time.monotonic() + START
    while not all(map(accepts, addresses)):
        if signals.first is not None or gone():
            return False
        if ray.poll() is not None:
            raise NodeFailed(f"ray start ended with code {ray.returncode}:\n{tail(folder)}")
        if time.monotonic() > deadline:
            raise NodeFailed(
                f"ray start did not open {', '.join(addresses)} within {START:g} s:\n{tail(folder)}"
            )
        time.sleep(POLL / 2)
    return True


def tail(folder: Path) -> str:
    """The last 2,000 characters that ``ray start`` printed."""
    return (folder / LOG).read_text(errors="replace", encoding="utf-8")[-2000:]


@contextmanager
def kept_logs(temporary: Path, beside: Path) -> Iterator[None]:
    """Copy the logs below ``temporary`` at the end of the block to ``beside``.logs/HOST-TIME-PID,
    which outlives the cluster.
    """
    logs = beside.with_name(f"{beside.name}.logs")
    try:
        yield
    finally:
        host = os.uname().nodename
        target = logs / f"{host}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        with suppress(OSError):
            logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        if kept := keep(temporary / LOGS, target):
            print(f"node: {kept} logs of Ray are kept in {target}", flush=True)
        # The time follows the host in the names, so the oldest come first.
        for old in sorted(logs.glob(f"{host}-*"))[:-ENDS]:
            shutil.rmtree(old, ignore_errors=True)


def keep(logs: Path, target: Path, most: int = MOST, but: str = "") -> int:
    """Copy the newest ``most`` bytes of the files in ``logs``, but those that match ``but``.

    Returns the number of files. Raises nothing: a file that cannot be read or written is left out.
    """
    kept = 0
    with suppress(OSError):
        found = [
            (file.stat(), file)
            for file in logs.rglob("*")
            if file.is_file() and not file.match(but or "/")
        ]
        for about, file in sorted(found, key=lambda one: one[0].st_mtime, reverse=True):
            size = min(about.st_size, most)
            if not size:
                continue
            copy = target / file.relative_to(logs)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as source, copy.open("wb") as written:
                source.seek(about.st_size - size)
                written.write(source.read(size))
            most, kept = most - size, kept + 1
    return kept
