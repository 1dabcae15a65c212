"""The processes that vLLM starts, found by who started whom.

Their titles (``VLLM::EngineCore``) cannot be relied on: `setproctitle` looks for its place in
memory from the first environment variable, and leaves the title as it was where a process has
changed that one.
"""

from __future__ import annotations

from contextlib import suppress

import psutil


def engine_cores(parent: psutil.Process) -> list[psutil.Process]:
    """The engine processes that this process started."""
    return _spawned(parent)


def engine_workers(parent: psutil.Process) -> list[psutil.Process]:
    """The workers that the engine processes of this process started."""
    return [worker for core in _spawned(parent) for worker in _spawned(core)]


def _spawned(parent: psutil.Process) -> list[psutil.Process]:
    """Its children from Python's spawn, without the tracker of shared memory that comes with them."""
    found = []
    for child in parent.children():
        with suppress(psutil.Error):
            line = " ".join(child.cmdline())
            if "VLLM::" in line or "multiprocessing.spawn" in line:
                found.append(child)
    return found
