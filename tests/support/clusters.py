"""A Ray cluster of several nodes on this machine, each with a raylet and workers of its own; one
can be lost as by a power cut.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.launch.ray_variables import node_settings, without_proxy
from tests.support.runs import ROOT, TAG, eventually, tagged

STORE = 80 * 2**20
"""Bytes of each node's object store."""


@contextmanager
def private_ray(cpus: int) -> Iterator[None]:
    """A Ray with so many CPUs in this process, which ends with the block."""
    import ray

    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


class Cluster:
    """A head without CPUs, where the driver lives, and nodes by name."""

    def __init__(self, made: Any, tag: str) -> None:
        self._made, self.tag = made, tag
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self._made.gcs_address)

    def join(self, name: str, **resources: float) -> None:
        """A node, with a CPU and these resources; returns when it lives."""
        self._nodes[name] = _patient(
            lambda: self._made.add_node(
                num_cpus=1, resources=resources, object_store_memory=STORE, include_dashboard=False
            )
        )

    def lose(self, name: str) -> float:
        """SIGKILL for everything on the node. Returns when that was."""
        [raylet] = [found.process.pid for found in self._nodes.pop(name).all_processes["raylet"]]
        process = psutil.Process(raylet)
        victims = [process, *process.children(recursive=True)]
        now = time.time()
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        return now

    def processes(self, begins: str) -> list[psutil.Process]:
        """Live workers whose title begins so: Ray names them ``ray::Class`` or
        ``ray::Class.method``, by what they run.
        """
        found = []
        for process in tagged(self.tag):
            with suppress(psutil.Error):
                if "".join(process.cmdline()).startswith(f"ray::{begins}"):
                    found.append(process)
        return found

    @contextmanager
    def frozen(
        self, actor: str, method: str, until: Callable[..., Any]
    ) -> Iterator[psutil.Process]:
        """While the block lasts, the actor is stopped in the middle of this method."""
        for _ in range(100):
            [victim, *_] = until(lambda: self.processes(actor), f"an actor {actor}")
            title = Path(f"/proc/{victim.pid}/cmdline")

            def runs(title: Path = title) -> bool:
                return title.read_bytes().startswith(f"ray::{actor}.{method}".encode())

            with suppress(OSError, psutil.NoSuchProcess):
                eventually(runs, f"{actor}.{method}", 60, 0.001)
                victim.suspend()
                try:
                    time.sleep(0.02)
                    if runs():
                        yield victim
                        return
                finally:
                    with suppress(psutil.NoSuchProcess):
                        victim.resume()
        raise AssertionError(f"{actor} was not caught in {method}")


def _patient(start: Callable[[], Any]) -> Any:
    """Ray gives a node 30 s to start and has no setting for it: a busy machine may need more."""
    for left in (2, 1, 0):
        try:
            return start()
        except Exception:
            if not left:
                raise
    return None


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Ends with all its processes."""
    from ray.cluster_utils import Cluster as Ray

    temporary, tag = tempfile.mkdtemp(prefix="rn", dir="/tmp"), uuid.uuid4().hex
    settings = (
        node_settings(None)
        | without_proxy()
        | {
            TAG: tag,
            "RAY_TMPDIR": temporary,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_max_direct_call_object_size": (
                "1"
            ),  # payloads are in the object store, as those with screenshots are
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.setattr("ray._private.utils.write_ray_address", lambda *_, **__: None)
        made = Ray(shutdown_at_exit=False)
        try:
            _patient(
                lambda: made.add_node(
                    num_cpus=0, object_store_memory=STORE, include_dashboard=False
                )
            )
            yield Cluster(made, tag)
        finally:
            for process in tagged(tag):
                if process.pid != os.getpid():
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            shutil.rmtree(temporary, ignore_errors=True)
