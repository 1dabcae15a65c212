"""The environment variables that configure Ray.

They are set before Ray is imported, which is when it reads them.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from rayloop.core.failures import ConfigError
from rayloop.core.files import lock_file, new_secret

PREFIX = "rayloop-"
"""Beginning of the name of a private cluster's temporary folder."""
LOCK = "lock"
"""The file in it that the owning process keeps locked."""
UNLOCKED = "unlocked"
"""The name of that file until it is locked."""
REMOVED_WITHIN_S = 10.0
"""Seconds in which a folder is removed that processes may still write to."""
OBJECT_STORE_BYTES = 512 * 2**20
"""Bytes of shared memory of a private cluster."""
UNREAD = {"RAY_task_events_report_interval_ms": "0"}
"""Turns off Ray's record of each call, which costs a tenth of the CPU time of short calls.

A private cluster has no dashboard to show it.
"""
NICENESS = "RAY_worker_niceness"
"""The variable of the niceness of Ray's workers.

With Ray's default, 15, any other program on the cores gets thirty times the share of an actor.
"""
SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
STOP_WAIT_S = 600
"""Seconds that Ray gives a job to stop.

The run's ``preemption.grace`` is shorter, and decides.
"""

HEALTH_PERIOD_MS = 1000
"""Milliseconds between two health checks of a node.

After five failures in a row it is lost: in 5 s when it refuses connections.
"""
MAX_SOCKET_PATH_BYTES = 107
"""Bytes in the path of a Unix socket, on Linux."""
LONGEST_SOCKET_PATH = "12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""The longest path of a socket below the folder of a private cluster's files.

cluster/session.py makes the first folder in it, Ray the others.
"""
MAX_FOLDER_CHARACTERS = MAX_SOCKET_PATH_BYTES - len(f"/{LONGEST_SOCKET_PATH}")
"""Characters of the folder of a private cluster's files."""


def node_settings(token: Path | None, *, runs_jobs: bool = False) -> dict[str, str]:
    """The variables of every Ray process that we start.

    ``token``: its path; None: no authentication. The raylet ends the processes of a killed worker
    (subreaper), but not on a node that ``runs_jobs``: there Ray's workers would not get their
    children's exit codes, and each failed job would count as succeeded (Ray 2.60).
    """
    return {
        **_authentication(token),
        SUBREAPER: "false" if runs_jobs else "true",
        NICENESS: os.environ.get(NICENESS, "0"),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
        "RAY_health_check_period_ms": str(HEALTH_PERIOD_MS),
    }


def _authentication(token: Path | None) -> dict[str, str]:
    if token is None:
        return {"RAY_AUTH_MODE": "disabled"}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


def interface_settings(interface: str | None) -> dict[str, str]:
    """The variables of the network interface for the ranks of a policy and the weight sync.

    They use the same interface as Ray.
    """
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def without_proxy(*hosts: str) -> dict[str, str]:
    """``NO_PROXY`` and ``no_proxy`` with these hosts and this machine in them.

    A proxy never sees the cluster's traffic.
    """
    present = [
        *os.environ.get("NO_PROXY", "").split(","),
        *os.environ.get("no_proxy", "").split(","),
    ]
    names = [*present, "localhost", "127.0.0.1", "::1", *hosts]
    text = ",".join(dict.fromkeys(name for name in names if name))
    return {"NO_PROXY": text, "no_proxy": text}


@contextmanager
def private_cluster(insecure: bool = False) -> Iterator[str]:
    """Set the variables of a cluster that only this process uses.

    Yields a temporary folder for the cluster's files, with the token in it.
    """
    with temporary_folder() as folder:
        if len(str(folder)) > MAX_FOLDER_CHARACTERS:
            raise ConfigError(
                f"{folder}: the sockets that Ray makes below it would have too long paths. Set"
                f" TMPDIR to a folder of at most {MAX_FOLDER_CHARACTERS - len(folder.name) - 1}"
                " characters"
            )
        token = None if insecure else new_secret(folder / "token", "the cluster's token")
        with _set(node_settings(token) | without_proxy() | UNREAD):
            yield str(folder)


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """A folder for Ray's files on this machine, removed with the block.

    Folders that killed processes left in TMPDIR are removed too.
    """
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        with open(folder / UNLOCKED, "w", encoding="utf-8") as lock:
            # Where locks do not work, ``sweep`` leaves folders alone.
            with suppress(OSError):
                lock_file(lock)
            # Only now under the name that ``sweep`` looks for: another process
            # would take a folder whose lock is still free for an abandoned one.
            Path(lock.name).rename(folder / LOCK)
            yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the folder, within ``REMOVED_WITHIN_S``."""
    deadline = time.monotonic() + REMOVED_WITHIN_S
    shutil.rmtree(folder, ignore_errors=True)
    # Ray's processes end a moment after ``ray.shutdown``: one of them may have written a file while
    # its folder was being removed, which then stays.
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def joined_cluster(
    address: str, token: Path | None, insecure: bool = False, within: int | None = None
) -> Iterator[None]:
    """Set the variables of a cluster that already runs.

    ``token``: the file with its token; None: the environment's (``RAY_AUTH_TOKEN_PATH``).
    ``within``: seconds in which a node of it must be found on this machine, instead of Ray's 60;
    Ray reads them when it is imported. Raises ConfigError when there is no such file.
    """
    if token is not None and not token.is_file():
        raise ConfigError(
            f"--token-file: {token} is not a file. It is on the head, where the cluster was started"
        )
    settings = {"RAY_USAGE_STATS_ENABLED": "0"}
    if within is not None:
        settings["RAY_gcs_server_request_timeout_seconds"] = str(within)
    settings |= authentication(token, insecure)
    settings |= past_proxies(address)
    with _set(settings):
        yield


def authentication(token: Path | None, insecure: bool) -> dict[str, str]:
    """Ray's variables for a cluster with this token, or ``insecure`` without one.

    Empty when neither is given: the environment's variables then apply.
    """
    if insecure:
        return _authentication(None)
    return {} if token is None else _authentication(token.resolve())


def past_proxies(address: str) -> dict[str, str]:
    """The variables with which the host of ``address`` is reached without a proxy."""
    host = urlsplit(address if "//" in address else f"//{address}").hostname
    return without_proxy(*([host] if host else []))


@contextmanager
def _set(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block."""
    former = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def in_job() -> bool:
    """Whether this process is the entrypoint of a Ray job."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def sweep() -> None:
    """Remove the temporary folders of private clusters whose process was killed.

    A killed process cannot remove its folder.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            with open(lock, "r+", encoding="utf-8") as file:
                lock_file(file)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            # Its process lives, or it is another user's.
            continue
