"""Ray's logs, kept when the node that wrote them has ended: they lie in its temporary folder, which is removed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOST = 200 * 2**20
"""Bytes that are kept of a node."""
ENDS = 5
"""Of the same machine, of which logs are kept."""
LOGS = Path("session_latest") / "logs"
"""Where Ray writes them, below its temporary folder."""


@contextmanager
def kept_logs(temporary: Path, beside: Path) -> Iterator[None]:
    """With the block the logs of the node whose files are in ``temporary`` are kept in ``beside``.logs/HOST-TIME-PID.

    Not in the folder ``beside`` itself: that one goes with the cluster.
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
        for old in sorted(logs.glob(f"{host}-*"))[:-ENDS]:
            shutil.rmtree(old, ignore_errors=True)


def keep(logs: Path, target: Path, most: int = MOST, but: str = "") -> int:
    """Copy the newest ``most`` bytes of the files in ``logs``; of one that does not fit, the end. Returns how many there are.
    Files that match ``but`` are left out.

    Raises nothing: what cannot be read or written is left out, and a node ends all the same.
    """
    kept = 0
    with suppress(OSError):
        found = [(file.stat(), file) for file in logs.rglob("*") if file.is_file() and not file.match(but or "/")]
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
