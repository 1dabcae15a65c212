"""The environment variables that configure Ray.

They are set before Ray is imported, which is when it reads them.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from rayloop.core.failures import ConfigError
from rayloop.core.files import lock_file, new_secret

PREFIX, LOCK = "rayloop-", "lock"
"""A private cluster's temporary folder, and the file in it that the owning process keeps locked."""
UNLOCKED = "unlocked"
"""The name of that file until it is locked."""
OBJECT_STORE = 512 * 2**20
"""Bytes of shared memory of a private cluster."""
UNREAD = {"RAY_task_events_report_interval_ms": "0"}
"""A private cluster has no dashboard to show Ray's record of each call, which costs a tenth of the
CPU time of short calls.
"""
NICENESS = "RAY_worker_niceness"
"""Ray's own value is 15: any other program on the cores then gets thirty times the share of an
actor.
"""
SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
STOP_WAIT = 600
"""Seconds that Ray gives a job to stop.

The run's own ``preemption.grace`` is shorter, and decides.
"""

HEALTH_PERIOD = 1000
"""Milliseconds between two health checks of a node; after five failures in a row it is lost: in 5 s
when it refuses connections.
"""
LONGEST = 43
"""Characters of the folder of a private cluster's files: Ray's sockets are 64 longer, and a
socket's path may have 107.
"""


def node_settings(token: Path | None, *, runs_jobs: bool = False) -> dict[str, str]:
    """The variables of every Ray process that we start.

    ``token``: its path; None: no authentication. The raylet ends the processes of a killed worker
    (subreaper), but not on a node that ``runs_jobs``: there Ray's workers would not get their
    children's exit codes, and each failed job would count as succeeded (Ray 2.60).
    """
    authentication = (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        if token
        else {"RAY_AUTH_MODE": "disabled"}
    )
    return authentication | {
        SUBREAPER: "false" if runs_jobs else "true",
        NICENESS: os.environ.get(NICENESS, "0"),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT),
        "RAY_health_check_period_ms": str(HEALTH_PERIOD),
    }


def interface_settings(interface: str | None) -> dict[str, str]:
    """The variables by which the ranks of a policy and the weight sync use the same network
    interface as Ray.
    """
    return (
        {}
        if interface is None
        else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    )


def without_proxy(*hosts: str) -> dict[str, str]:
    """``NO_PROXY`` and ``no_proxy`` with these hosts and this machine in them: a proxy never sees
    our own traffic.
    """
    known = os.environ.get("NO_PROXY", "") + "," + os.environ.get("no_proxy", "")
    names = dict.fromkeys(
        name for name in (*known.split(","), "localhost", "127.0.0.1", "::1", *hosts) if name
    )
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(names))


@contextmanager
def private_cluster(insecure: bool = False) -> Iterator[str]:
    """For a cluster of this process's own.

    Yields a temporary folder for the cluster's files; the token lies in it.
    """
    with temporary_folder() as folder:
        if len(str(folder)) > LONGEST:
            raise ConfigError(
                f"{folder}: the sockets that Ray makes below it would have too long paths. Set"
                f" TMPDIR to a folder of at most {LONGEST - len(folder.name) - 1} characters"
            )
        token = None if insecure else new_secret(folder / "token", "the cluster's token")
        with _set(node_settings(token) | without_proxy() | UNREAD):
            yield str(folder)


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """For Ray's files on this machine, removed with the block.

    Those that killed processes left in TMPDIR are removed too.
    """
    sweep()
    with (
        tempfile.TemporaryDirectory(
            prefix=PREFIX, dir=parent, ignore_cleanup_errors=True
        ) as folder,
        open(Path(folder) / UNLOCKED, "w", encoding="utf-8") as lock,
    ):
        with suppress(OSError):  # without locks `sweep` leaves folders where they are
            lock_file(lock)
        # Only now under the name that ``sweep`` looks for: another process
        # would take a folder whose lock is still free for an abandoned one.
        Path(lock.name).rename(Path(folder) / LOCK)
        yield Path(folder)


@contextmanager
def joined_cluster(
    address: str, token: Path | None, insecure: bool = False, within: int | None = None
) -> Iterator[None]:
    """For a cluster that is already there.

    ``token``: the file with its token; None: the environment's (``RAY_AUTH_TOKEN_PATH``).
    ``within``: seconds in which a node of it must be found on this machine, instead of Ray's 60;
    Ray reads them when it is imported. Raises ConfigError when there is no such file.
    """
    if token is not None and not token.is_file():
        raise ConfigError(
            f"--token-file: {token} is no file. It is on the head, where the cluster was started"
        )
    limits = {} if within is None else {"RAY_gcs_server_request_timeout_seconds": str(within)}
    with _set(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            **limits,
            **authentication(token, insecure),
            **past_proxies(address),
        }
    ):
        yield


def authentication(token: Path | None, insecure: bool) -> dict[str, str]:
    """Ray's variables for a cluster with this token, or ``insecure`` without one; none for what the
    environment says.
    """
    if insecure:
        return {"RAY_AUTH_MODE": "disabled"}
    return (
        {}
        if token is None
        else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.resolve())}
    )


def past_proxies(address: str) -> dict[str, str]:
    """The variables with which the host of ``address`` is reached without a proxy."""
    host = urlsplit(address if "//" in address else f"//{address}").hostname
    return without_proxy(*([host] if host else []))


@contextmanager
def _set(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def in_job() -> bool:
    """Whether this process is the entrypoint of a Ray job."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def sweep() -> None:
    """Remove the temporary folders of private clusters whose process was killed: nothing could do
    it then.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            with open(lock, "r+", encoding="utf-8") as file:
                lock_file(file)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # its process lives, or it is another user's
