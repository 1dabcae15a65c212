"""``python -m rayloop.launch.fixed_size`` prints the environment of ``ray symmetric-run`` for
fixed_size.sbatch.
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

FIRST, PORTS = 20_000, 10_000
"""The head's port is FIRST + job id modulo PORTS."""
WAIT = "600"
"""Seconds in which all nodes must have joined.

Ray's own 30, and 5 for the first connection, are short on a busy machine.
"""
GONE = "30"
"""Seconds without the head after which a node ends (Ray's own: 60), so that all have ended before
the time limit.
"""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """``RAYLOOP_HEAD`` (address:port of this node) and Ray's variables; a missing token is made.

    Raises ConfigError.
    """
    interface = environment.get("RAYLOOP_INTERFACE") or None
    address = slurm_job.node_address(interface)
    token = Rendezvous(Path(environment.get("RAYLOOP_RENDEZVOUS", ROOT)), "fixed_size").open(
        insecure=False
    )
    return {
        **node_settings(
            token, runs_jobs=True
        ),  # symmetric-run joins Ray, and reads the exit code of the run
        **without_proxy(address),
        **interface_settings(interface),
        "RAYLOOP_HEAD": f"{address}:{FIRST + int(environment['SLURM_JOB_ID']) % PORTS}",
        "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": WAIT,
        "RAY_gcs_rpc_server_connect_timeout_s": WAIT,
        "RAY_gcs_rpc_server_reconnect_timeout_s": GONE,
        "RAY_TMPDIR": (
            environment.get("RAY_TMPDIR") or f"/tmp/ray-{os.getuid()}"
        ),  # /tmp/ray may be another user's
        "PATH": (
            f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
        ),  # symmetric-run calls `ray`
    }


if __name__ == "__main__":
    try:
        print(
            "".join(
                f"export {name}={shlex.quote(value)}\n"
                for name, value in variables(os.environ).items()
            ),
            end="",
        )
    except RayloopError as error:
        sys.exit(f"rayloop: {type(error).__name__}: {error}")
