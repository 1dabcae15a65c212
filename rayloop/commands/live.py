"""``status``, ``logs``, ``stacks`` and ``stop``: commands that need only a run's folder.

``stop`` sends SIGTERM to a process that it can see, and asks the driver of another machine's or
container's through the run's Ray cluster.
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rayloop.commands.arguments import add_run_folder, live_cluster
from rayloop.core.failures import ConfigError
from rayloop.run.folder import RunFolder
from rayloop.run.lock import Holder
from rayloop.run.place import own_copy
from rayloop.view.formatting import describe, span, visible
from rayloop.view.reader import ENDS
from rayloop.view.status import status, text

POLL_INTERVAL_S = 0.5
TAIL_BYTES = 2**20
"""Bytes at the end of a log in which its last lines are searched."""


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``status``."""
    add_run_folder(parser)
    parser.add_argument(
        "--json", action="store_true", help="the same as one JSON object, for programs"
    )
    parser.set_defaults(run=_status)


def _status(arguments: argparse.Namespace) -> int:
    """Print the status. Returns 0; raises ConfigError when the folder holds no run."""
    folder = RunFolder.begun(arguments.run_folder)
    run_status = status(folder, time.time(), folder.events)
    print(json.dumps(run_status) if arguments.json else visible(text(run_status)))
    return 0


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``logs``."""
    add_run_folder(parser)
    parser.add_argument(
        "--role",
        help="only these actors: driver, rollout, environment, reward, reference or policy",
    )
    parser.add_argument(
        "--lines", type=int, default=40, metavar="N", help="last lines of each file (40)"
    )
    parser.set_defaults(run=_logs)


def _logs(arguments: argparse.Namespace) -> int:
    """Print the last lines of each actor. Returns 0; raises ConfigError."""
    if arguments.lines < 1:
        raise ConfigError(f"--lines {arguments.lines}: expected 1 or more")
    folder = RunFolder.at(arguments.run_folder.resolve())
    if not own_copy(folder.cluster).exists():
        for name, text in _stored_logs(folder, arguments.role, arguments.lines):
            print(f"=== {name} ===\n{visible(text)}", flush=True)
        return 0
    with live_cluster(folder) as place:
        from rayloop.cluster.stages.live import logs  # imports ray

        for actor, text in logs(place, arguments.role, arguments.lines):
            print(f"=== {actor} ===\n{visible(text)}", flush=True)
    return 0


def _stored_logs(folder: RunFolder, role: str | None, lines: int) -> Iterator[tuple[str, str]]:
    """Name and last lines of each log of a run that has ended.

    Raises ConfigError for a folder without logs, and for a role: the files' names have no roles.
    """
    files = sorted(path for path in folder.logs.glob("**/*") if path.is_file())
    if not files:
        raise ConfigError(f"{folder.path} is not a live run, and its folder keeps no logs")
    if role is not None:
        raise ConfigError(
            f"{folder.path} is not a live run, and the names of its files have no roles: leave out"
            " --role"
        )
    for path in files:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            end = file.read(TAIL_BYTES).decode(errors="replace")
        yield str(path.relative_to(folder.path)), "".join(end.splitlines(keepends=True)[-lines:])


def add_stacks(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``stacks``."""
    add_run_folder(parser, "folder of the live run, <output>/<name>")
    parser.add_argument(
        "--role",
        help="only these actors: driver, rollout, environment, reward, reference or policy",
    )
    parser.set_defaults(run=_stacks)


def _stacks(arguments: argparse.Namespace) -> int:
    """Print the stacks of each actor. Returns 0; raises ConfigError."""
    with live_cluster(RunFolder.at(arguments.run_folder.resolve())) as place:
        from rayloop.cluster.stages.live import stacks  # imports ray

        for actor, text in stacks(place, arguments.role):
            print(f"=== {actor} ===\n{visible(text)}\n", flush=True)
    return 0


def add_stop(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``stop``."""
    parser.add_argument(
        "run_folders",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="folders of live runs, <output>/<name>",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="how long to wait for the end (180): above the run's preemption.grace",
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help=(
            "stop only runs of processes on this machine: for a machine that is about to be taken"
            " away"
        ),
    )
    parser.set_defaults(run=_stop)


def _stop(arguments: argparse.Namespace) -> int:
    """Returns 0 when all of the runs have saved or finished, else 1."""
    deadline = time.monotonic() + arguments.within
    runs = []
    for path in arguments.run_folders:
        folder = RunFolder.at(path.resolve())
        holder = folder.lock.holder()
        if arguments.here and (holder is None or holder.host != socket.gethostname()):
            continue
        if holder is None:
            raise ConfigError(
                f"{path}: no process runs it. `python -m rayloop status {path}` says how it ended"
            )
        runs.append((folder, holder, time.time() - 1.0))  # records have rounded times
        _ask_to_stop(folder, holder)
        print(
            f"{path}: asked {holder} to save and end; waiting for up to {span(arguments.within)}",
            flush=True,
        )
    codes = [_exit_code(folder, holder, since, deadline) for folder, holder, since in runs]
    return max(codes, default=0)


def _ask_to_stop(folder: RunFolder, holder: Holder) -> None:
    if holder.lives() is None:
        with live_cluster(folder) as place:
            from rayloop.cluster.stages.live import stop_driver  # imports ray

            return stop_driver(place)
    try:
        os.kill(holder.pid, signal.SIGTERM)
    except ProcessLookupError:
        return  # it has ended since its lock was read
    except PermissionError:
        raise ConfigError(f"{holder} belongs to another user, who alone can stop it") from None


def _exit_code(folder: RunFolder, holder: Holder, since: float, deadline: float) -> int:
    """Wait for the end of a run; 0 when it has saved or finished."""
    while folder.lock.holder() == holder:
        if time.monotonic() > deadline:
            print(
                f"rayloop: {folder.path}: {holder} has not ended in time. `python -m rayloop stacks"
                f" {folder.path}` shows what it does; a second `stop` ends it without saving",
                file=sys.stderr,
            )
            return 1
        time.sleep(POLL_INTERVAL_S)
    ends = [
        record for record in folder.events if record["event"] in ENDS and record["time"] >= since
    ]
    if not ends:
        print(
            f"rayloop: {folder.path}: it recorded no end; what is saved is in its checkpoints",
            file=sys.stderr,
        )
        return 1
    print(visible(f"{folder.path}: {describe(ends[-1])}"))
    return int(ends[-1]["event"] == "failed")
