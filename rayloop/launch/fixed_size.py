"""``python -m rayloop.launch.fixed_size`` prints the environment of ``ray symmetric-run``.

fixed_size.sbatch reads it.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from rayloop.core.failures import RayloopError
from rayloop.launch import slurm_job
from rayloop.launch.ray_variables import interface_settings, node_settings, without_proxy
from rayloop.launch.rendezvous import ROOT, Rendezvous

FIRST_PORT = 20_000
PORT_COUNT = 10_000
"""The head's port is FIRST_PORT + job id modulo PORT_COUNT."""
JOIN_TIMEOUT_S = "600"
"""Seconds in which all nodes must have joined.

Ray's 30, and 5 for the first connection, are short on a busy machine.
"""
HEAD_TIMEOUT_S = "30"
"""Seconds without the head after which a node ends (Ray's default: 60).

All nodes have then ended before the time limit.
"""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """``RAYLOOP_HEAD`` (address:port of this node) and Ray's variables; a missing token is made.

    Raises ConfigError.
    """
    interface = environment.get("RAYLOOP_INTERFACE") or None
    address = slurm_job.node_address(interface)
    port = FIRST_PORT + int(environment["SLURM_JOB_ID"]) % PORT_COUNT
    rendezvous = Rendezvous(Path(environment.get("RAYLOOP_RENDEZVOUS", ROOT)), "fixed_size")
    token = rendezvous.open(insecure=False)
    programs = Path(sys.executable).parent
    path = environment.get("PATH", os.defpath)
    return {
        # symmetric-run joins Ray, and reads the exit code of the run.
        **node_settings(token, runs_jobs=True),
        **without_proxy(address),
        **interface_settings(interface),
        "RAYLOOP_HEAD": f"{address}:{port}",
        "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": JOIN_TIMEOUT_S,
        "RAY_gcs_rpc_server_connect_timeout_s": JOIN_TIMEOUT_S,
        "RAY_gcs_rpc_server_reconnect_timeout_s": HEAD_TIMEOUT_S,
        # /tmp/ray may be another user's.
        "RAY_TMPDIR": environment.get("RAY_TMPDIR") or f"/tmp/ray-{os.getuid()}",
        # symmetric-run calls ``ray``.
        "PATH": f"{programs}:{path}",
    }


if __name__ == "__main__":
    try:
        for name, value in variables(os.environ).items():
            print(f"export {name}={shlex.quote(value)}")
    except RayloopError as error:
        sys.exit(f"rayloop: {type(error).__name__}: {error}")
