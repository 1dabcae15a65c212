"""Connecting to Ray, or starting a private local cluster on this machine.

The only file that uses private names of Ray.
"""

import atexit
import functools
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import AuthenticationError

from rayloop.core.failures import ConfigError, MachineFailed, ResourcesUnavailable
from rayloop.engines.machine import needs_linux, open_files
from rayloop.launch.network import unreachable
from rayloop.launch.ray_process import LOGS, await_end, end, keep, with_descendants
from rayloop.launch.ray_variables import OBJECT_STORE_BYTES

logger = logging.getLogger(__name__)


@contextmanager
def session(
    needed: Mapping[str, float],
    address: str | None,
    temporary: str | None,
    logs: Path,
    namespace: str | None = None,
    store: int = OBJECT_STORE_BYTES,
) -> Iterator[None]:
    """Join the cluster at ``address``, or start a private cluster that ends with the block.

    The private cluster has as many logical CPUs as ``needed``, so that a laptop can hold all roles.
    Its files are below ``temporary``; ``store``: in bytes. Raises ConfigError on another system
    than Linux.
    """
    needs_linux("a command that starts actors")
    if address:
        ray.init(address=address, log_to_driver=False, namespace=namespace)
        try:
            yield
        finally:
            ray.shutdown()
        return
    # A short name: the sockets below it have long paths.
    with tempfile.TemporaryDirectory(
        prefix="", dir=temporary, ignore_cleanup_errors=True
    ) as folder:
        visible_gpus = _gpus()
        if needed.get("GPU", 0) > visible_gpus:
            raise ResourcesUnavailable(
                f"the run needs {needed['GPU']:g} GPUs, this machine has {visible_gpus}. "
                "Lower the roles' num_gpus, or join a cluster with --address"
            )
        clean = functools.partial(_clean_up, folder)

        # A signal may end the process within ``ray.init``, when no ``finally`` below is in place.
        atexit.register(clean)
        cpus = max(os.cpu_count() or 1, math.ceil(needed.get("CPU", 0.0)))
        custom = {name: amount for name, amount in needed.items() if name not in ("CPU", "GPU")}
        earlier_children = set(psutil.Process().children())
        try:
            start(folder, store=store, num_cpus=cpus, resources=custom, namespace=namespace)
        except MachineFailed as error:
            _keep_logs(Path(folder), logs)
            error.add_note(f"Ray's own words are in {logs / 'ray'}")
            raise
        daemons = set(psutil.Process().children()) - earlier_children
        try:
            yield
        finally:
            # Asked now: what a daemon started has another parent once the daemon has ended.
            processes = with_descendants(daemons)
            ray.shutdown()
            _keep_logs(Path(folder), logs)
            # One that lives a moment longer would make its folder again after the removal.
            await_end(processes)
            atexit.unregister(clean)


MIN_OPEN_FILES = 128
"""Minimum limit of open files.

Ray's processes have up to 71 open with four actors; with 64 its daemon dies and the run hangs.
"""
START_ATTEMPTS = 3
"""Attempts at starting a cluster.

Ray ends an attempt after 30 seconds, which a busy machine may exceed.
"""


def start(folder: str, *, store: int = OBJECT_STORE_BYTES, **options: Any) -> None:
    """Start a cluster on this machine, with all its files in ``folder``.

    Raises ConfigError where fewer than ``MIN_OPEN_FILES`` files may be open at once, MachineFailed
    when Ray does not start.
    """
    _, hard_limit = open_files()
    if 0 <= hard_limit < MIN_OPEN_FILES:
        raise ConfigError(
            f"{hard_limit} files may be open at once here (ulimit -Hn), and Ray needs"
            f" {MIN_OPEN_FILES} at least. Run `ulimit -n 8192` before the command, as root if the"
            " shell refuses it"
        )

    # Children that exist already are not Ray's: a failed attempt must not end them.
    earlier_children = psutil.Process().children(recursive=True)
    began = time.monotonic()
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with _separate_sessions():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    object_store_memory=store,
                    _temp_dir=folder,
                    **options,
                )
            return
        except Exception as error:
            ray.shutdown()
            # Daemons of a failed attempt would otherwise stay when the next attempt starts its own.
            children = psutil.Process().children(recursive=True)
            end([child for child in children if child not in earlier_children])
            # Only a start that was too slow is worth another try; anything else would fail again.
            if attempt == START_ATTEMPTS or "timed out during startup" not in str(error):
                plural = "s" if attempt > 1 else ""
                seconds = time.monotonic() - began
                first_line = str(error).partition("\n")[0]
                raise MachineFailed(
                    f"Ray did not start here, {attempt} attempt{plural} in {seconds:.0f} s:"
                    f" {first_line} Look at `uptime` (other work), `free -g` and `df -h /dev/shm`"
                ) from error
            logger.warning("Ray did not start within 30 s, this machine has much to do: once more")


_separate = False


@contextmanager
def _separate_sessions() -> Iterator[None]:
    """Give daemons that are started within the block their own process session.

    A signal to our process group, as timeout(1) sends it, does not reach them: a run needs them
    while it saves. Ray starts them with ``preexec_fn``, so Python runs what ``register_at_fork``
    registered.
    """
    global _separate
    _separate = True
    try:
        yield
    finally:
        _separate = False


os.register_at_fork(after_in_child=lambda: os.setsid() if _separate else None)


def metrics_ports() -> list[str]:
    """The addresses (host:port) at which the cluster's nodes serve metrics."""
    return [
        f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
        for node in node_rows()
        if node["Alive"]
    ]


def serve_details() -> dict[str, Any] | None:
    """The address, options and applications of Ray Serve in this cluster; None without Serve."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else dict(client.get_serve_details())


def actor_table() -> list[dict[str, Any]]:
    """A row for every actor of the cluster.

    With ``Name``, ``ActorID``, ``State``, ``Pid``, and ``Address``, which has the ``NodeID``.
    """
    from ray._private.state import state

    return list(state.actor_table(None).values())


def logs_folder() -> Path:
    """The log folder of the cluster's node on this machine."""
    from ray._private.worker import global_worker

    return Path(global_worker.node.get_logs_dir_path())


def ask_head(seconds: float) -> None:
    """Check that the cluster's head listens. A silent head is only busy.

    Raises AuthenticationError when another head answers, ConnectionError when none listens.
    """
    from ray._private.worker import global_worker

    try:
        global_worker.gcs_client.internal_kv_exists(b"rayloop", None, timeout=seconds)
    except Exception as error:
        if "WrongClusterID" in str(error):
            raise AuthenticationError(str(error)) from error
        host, _, port = global_worker.gcs_client.address.rpartition(":")
        reason = unreachable(host, int(port))
        if reason:
            raise ConnectionError(f"{host}:{port}: {reason}") from error


def node_rows(seconds: float = 5.0) -> list[dict[str, Any]]:
    """Every node of the cluster, with these keys of ``ray.nodes``.

    ``ray.nodes``, and all else that asks Ray's state, aborts the process (SIGABRT) when a head that
    was started again answers. Raises what Ray does when no head answers within ``seconds``.
    """
    from ray._private.worker import global_worker
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    return [
        {
            "NodeID": node_id.hex(),
            "Alive": node.state == GcsNodeInfo.ALIVE,
            "NodeManagerHostname": node.node_manager_hostname,
            "NodeManagerAddress": node.node_manager_address,
            "NodeManagerPort": node.node_manager_port,
            "MetricsExportPort": node.metrics_export_port,
        }
        for node_id, node in global_worker.gcs_client.get_all_node_info(timeout=seconds).items()
    ]


def node_lives(seconds: float) -> bool:
    """Whether Ray's head counts the node of this process as alive. Raises as ``node_rows``."""
    here = ray.get_runtime_context().get_node_id()
    return not any(node["NodeID"] == here and not node["Alive"] for node in node_rows(seconds))


def room() -> dict[str, dict[str, float]]:
    """The free resources of each node, by Ray's id of it. Raises as ``node_rows``."""
    from ray._private.worker import global_worker

    usage = global_worker.gcs_client.get_all_resource_usage(timeout=5.0).resource_usage_data
    return {node.node_id.hex(): dict(node.resources_available) for node in usage.batch}


def _keep_logs(folder: Path, logs: Path) -> None:
    """Copy the logs of the actors and of Ray, without empty files.

    A disk that is full or not mounted does not end the run.
    """
    if not logs.is_dir():
        return
    for file in (folder / LOGS).glob("worker-*.*"):
        with suppress(OSError):
            if file.suffix in (".out", ".err") and file.stat().st_size:
                shutil.copyfile(file, logs / file.name)
    keep(folder / LOGS, logs / "ray", but="worker-*")


def _clean_up(folder: str) -> None:
    """End the daemons of an interrupted ray.init, and remove their files.

    Ray's own exit handler does not know them yet.
    """
    end(psutil.Process().children(recursive=True))
    shutil.rmtree(folder, ignore_errors=True)


def _gpus() -> int:
    """GPUs that Ray would find, without importing torch."""
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    return NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
