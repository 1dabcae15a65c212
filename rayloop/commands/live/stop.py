"""``stop``: ask live runs to save and end, and wait until they have. A run whose process is on this machine gets SIGTERM; of
another machine's the driver is asked, through the run's Ray cluster."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

from rayloop.commands.arguments import live_cluster
from rayloop.core.failures import ConfigError
from rayloop.run.folder import RunFolder
from rayloop.run.lock import Holder
from rayloop.view.reader import ENDS
from rayloop.view.words import describe, span, visible

POLL = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``stop``."""
    parser.add_argument("run_folders", type=Path, nargs="+", metavar="RUN_DIR", help="folders of live runs, <output>/<name>")
    parser.add_argument(
        "--within", type=float, default=180.0, metavar="SECONDS",
        help="how long to wait for the end (180): above the run's preemption.grace",
    )  # fmt: skip
    parser.add_argument(
        "--here", action="store_true",
        help="leave alone what is no run of a process on this machine: for a machine that is about to be taken away",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 when all of the runs have ended as asked (saved, or finished), else 1."""
    deadline = time.monotonic() + arguments.within
    asked = []
    for path in arguments.run_folders:
        folder = RunFolder.at(path.resolve())
        holder = folder.lock.holder()
        if arguments.here and (holder is None or holder.host != socket.gethostname()):
            continue
        if holder is None:
            raise ConfigError(f"{path}: no process runs it. `python -m rayloop status {path}` says how it ended")
        asked.append((folder, holder, time.time() - 1.0))  # records have rounded times
        _ask(folder, holder)
        print(f"{path}: asked {holder} to save and end; waiting for up to {span(arguments.within)}", flush=True)
    return max([_waited(folder, holder, since, deadline) for folder, holder, since in asked], default=0)


def _ask(folder: RunFolder, holder: Holder) -> None:
    if holder.host != socket.gethostname():
        with live_cluster(folder) as place:
            from rayloop.cluster.stages.live import stop_driver  # imports ray

            return stop_driver(place)
    try:
        os.kill(holder.pid, signal.SIGTERM)
    except ProcessLookupError:
        return  # it ended in this moment
    except PermissionError:
        raise ConfigError(f"{holder} belongs to another user, who alone can stop it") from None


def _waited(folder: RunFolder, holder: Holder, since: float, deadline: float) -> int:
    while folder.lock.holder() == holder:
        if time.monotonic() > deadline:
            print(
                f"rayloop: {folder.path}: {holder} has not ended in time. `python -m rayloop stacks {folder.path}` shows what it "
                "does; a second `stop` ends it without saving",
                file=sys.stderr,
            )
            return 1
        time.sleep(POLL)
    ends = [record for record in folder.events if record["event"] in ENDS and record["time"] >= since]
    if not ends:
        print(f"rayloop: {folder.path}: it recorded no end; what is saved is in its checkpoints", file=sys.stderr)
        return 1
    print(visible(f"{folder.path}: {describe(ends[-1])}"))
    return int(ends[-1]["event"] == "failed")
