"""The processes of one node: ``ray start --block`` and a program.

Ray's logs are copied when it has ended.
"""

import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rayloop.core.failures import START_AGAIN_EXIT_CODE, ConfigError, InfrastructureFailure
from rayloop.launch.network import Ports
from rayloop.launch.rendezvous import accepts
from rayloop.launch.signals import StopSignals

LOG = "ray-start.log"
"""The output of ``ray start``, in the temporary folder."""
POLL_INTERVAL_S = 0.5
"""Seconds between two looks."""
START_TIMEOUT_S = 120.0
"""Seconds within which Ray must accept connections."""
DRAIN_TIMEOUT_S = 5
"""Seconds that a leaving worker waits for the work that runs on it.

Ray's default, 30, is all that Slurm allows before SIGKILL.
"""
END_TIMEOUT_S = 5.0
OWN_END_TIMEOUT_S = 20.0
"""Seconds in which Ray's agents and workers notice that their daemon has ended, and end too."""
"""Seconds that Ray then gets to end by itself."""
MAX_PATH_CHARACTERS = 40
"""Characters of the temporary folder.

Ray's sockets are below it, and a socket's path may have 107.
"""
KEPT_LOG_BYTES = 200 * 2**20
"""Bytes of logs that are kept of a node."""
KEPT_LOG_FOLDERS = 5
"""Log folders that are kept of a machine, one for each end of its Ray."""
LOGS = Path("session_latest") / "logs"
"""Ray's folder of logs, below its temporary folder."""


class NodeFailed(InfrastructureFailure):
    """Ray did not start, or ended by itself while the cluster continued."""

    exit_code = START_AGAIN_EXIT_CODE


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
"""Asks for SIGTERM at its parent's death, then becomes the command that it gets.

See prctl(2), PR_SET_PDEATHSIG. ``preexec_fn`` would run the libraries' after-fork hooks between
fork and exec, where the hooks of gRPC and torch crash.
"""
_STARTED = weakref.WeakSet[subprocess.Popen[bytes]]()
"""The processes that ``child`` started. The owner of one polls it for its exit code."""


def child(
    command: Sequence[str], environment: Mapping[str, str], log: Any = None
) -> subprocess.Popen[bytes]:
    """Start a process that the signals for our process group do not reach.

    It gets SIGTERM when this process dies.
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
        process = _started_process(ended.si_pid)
        if process is None:
            os.waitpid(ended.si_pid, os.WNOHANG)
        else:
            # Keeps the exit code for the owner.
            process.poll()


def _started_process(number: int) -> subprocess.Popen[bytes] | None:
    """The process of ``child`` with this id, whose exit code has not been taken."""
    for process in _STARTED:
        if process.pid == number and process.returncode is None:
            return process
    return None


@contextmanager
def ray_node(
    options: Sequence[str], address: str, ports: Ports, folder: Path, settings: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``ray start --block`` with these options; with the block all its processes end.

    Raises ConfigError.
    """
    if len(str(folder)) > MAX_PATH_CHARACTERS:
        raise ConfigError(
            f"{folder}: sockets below it would have too long paths. Name a shorter folder with"
            " --temp-dir"
        )
    # Ray's daemons lose their parent and are adopted by this process: new children are Ray's.
    other_children = set(psutil.Process().children())
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment = {**inherited, **settings, "TMPDIR": str(folder)}
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
            ray.wait(DRAIN_TIMEOUT_S + END_TIMEOUT_S)
        _end_descendants(other_children)


def _end_descendants(spared: set[psutil.Process]) -> None:
    """Kill this process's children and their descendants, except the ``spared`` children."""
    end(with_descendants(set(psutil.Process().children()) - spared))


def with_descendants(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes and their descendants, without those that have ended."""
    processes: list[psutil.Process] = []
    for process in roots:
        with suppress(psutil.NoSuchProcess):
            processes += [process, *process.children(recursive=True)]
    return processes


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait until they have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END_TIMEOUT_S)


def await_end(processes: Sequence[psutil.Process]) -> None:
    """Wait until processes have ended by themselves, and kill those that have not in time."""
    _, living = psutil.wait_procs(processes, timeout=OWN_END_TIMEOUT_S)
    end(living)


def started(
    ray: subprocess.Popen[bytes],
    folder: Path,
    addresses: Sequence[str],
    signals: StopSignals,
    head_left: Any = lambda: False,
) -> bool:
    """Wait until all addresses accept connections.

    Returns False when a signal or ``head_left`` came before; raises NodeFailed.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while not all(map(accepts, addresses)):
        if signals.first is not None or head_left():
            return False
        if ray.poll() is not None:
            raise NodeFailed(f"ray start ended with code {ray.returncode}:\n{tail(folder)}")
        if time.monotonic() > deadline:
            raise NodeFailed(
                f"ray start did not open {', '.join(addresses)} within {START_TIMEOUT_S:g} s:\n"
                f"{tail(folder)}"
            )
        time.sleep(POLL_INTERVAL_S / 2)
    return True


def tail(folder: Path) -> str:
    """The last 2,000 characters that ``ray start`` printed."""
    return (folder / LOG).read_text(errors="replace", encoding="utf-8")[-2000:]


@contextmanager
def kept_logs(temporary: Path, beside: Path) -> Iterator[None]:
    """Copy the logs below ``temporary`` at the end of the block.

    They go to ``beside``.logs/HOST-TIME-PID, which outlives the cluster.
    """
    logs = beside.with_name(f"{beside.name}.logs")
    try:
        yield
    finally:
        host = os.uname().nodename
        target = logs / f"{host}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        with suppress(OSError):
            logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        count = keep(temporary / LOGS, target)
        if count:
            print(f"node: {count} logs of Ray are kept in {target}", flush=True)
        # The time follows the host in the names, so the oldest come first.
        for old in sorted(logs.glob(f"{host}-*"))[:-KEPT_LOG_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)


def keep(logs: Path, target: Path, most: int = KEPT_LOG_BYTES, but: str = "") -> int:
    """Copy the newest ``most`` bytes of the files in ``logs``, except files that match ``but``.

    Returns the number of files. Raises nothing: a file that cannot be read or written is left out.
    """
    files: list[tuple[os.stat_result, Path]] = []
    for file in logs.rglob("*"):
        with suppress(OSError):
            if file.is_file() and not file.match(but or "/"):
                files.append((file.stat(), file))
    files.sort(key=lambda entry: entry[0].st_mtime, reverse=True)
    count = 0
    for status, file in files:
        size = min(status.st_size, most)
        if not size:
            continue
        copy = target / file.relative_to(logs)
        with suppress(OSError):
            copy.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as source, copy.open("wb") as output:
                # The end of a log says most.
                source.seek(status.st_size - size)
                output.write(source.read(size))
            most -= size
            count += 1
    return count
