"""Connecting to Ray, or starting a private local cluster on this machine."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from cluster.config import RunConfig
from cluster.services import bundles, total
from rayloop.core.failures import ResourcesUnavailable

OBJECT_STORE = 512 * 2**20
"""Bytes of shared memory of a private local cluster."""


@contextmanager
def session(config: RunConfig, address: str | None) -> Iterator[None]:
    """Join the cluster at ``address``; without one, start a private cluster that ends with the block.

    A private cluster is given as many logical CPUs as the run's actors ask for, so that a laptop can hold all roles; its
    files live in a temporary folder of its own (its token: cluster/environment.py).
    """
    if address:
        ray.init(address=address, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()
        return
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # runs after Ray's own: for an interrupted ray.init
        needed = total(bundles(config))
        if needed.get("GPU", 0) > (visible := _gpus()):
            raise ResourcesUnavailable(
                f"the run needs {needed['GPU']:g} GPUs, this machine has {visible}. "
                "Lower the roles' num_gpus, or join a cluster with --address"
            )
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(needed.get("CPU", 0.0))),
            resources={name: amount for name, amount in needed.items() if name not in ("CPU", "GPU")},
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


def _gpus() -> int:
    """GPUs that Ray would find, without importing torch."""
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    return NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
