"""What a process learns from Slurm about its own job, and asks of it. Without Slurm the answers are None or empty."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from rayloop.core.failures import InfrastructureFailure
from rayloop.launch.addresses import this_node

LASTING = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
"""States of jobs that will not run again. Those of PREEMPTED jobs depends on the site."""


class SlurmError(InfrastructureFailure):
    """A command of Slurm failed; the message has its own words."""


def job() -> str | None:
    """The id of the Slurm job that this process runs in. Each element of an array has its own."""
    return os.environ.get("SLURM_JOB_ID")


def restarts() -> int:
    """How often Slurm has started this job again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def slurm(*command: str) -> str:
    """What a command of Slurm prints. Raises SlurmError when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SlurmError(
            f"{command[0]}: no such command. Run this where Slurm's commands are, on a login node"
        ) from error
    if done.returncode:
        raise SlurmError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


@dataclass(frozen=True)
class Queued:
    """A job that waits, runs or ends just now; an element of an array is one of its own. ``text`` is for people."""

    number: str
    state: str
    text: str


def active(jobs: Iterable[str]) -> list[Queued]:
    """Those of ``jobs`` (an array's number stands for its elements) that Slurm still has. Raises SlurmError."""
    wanted = set(jobs)
    lines = slurm("squeue", "--me", "-h", "-a", "-r", "-o", "%A %F %T %i %j %T %M %R").splitlines()
    listed = (line.split(" ", 3) for line in lines)
    return [Queued(number, state, text) for number, array, state, text in listed if number in wanted or array in wanted]


def ended(number: str) -> bool:
    """Whether a job is known not to run any more. False where it cannot be told (no Slurm here)."""
    if shutil.which("squeue") is None:
        return False
    try:
        state = slurm("squeue", "-h", "-a", "-j", number, "-o", "%T").strip()
    except SlurmError as error:
        return "Invalid job id" in str(error)
    return state in (*LASTING, "")


def node_address() -> str:
    """The IPv4 address of this node: the one that Slurm knows it by, else that of the interface to the rest of the world."""
    name = os.environ.get("SLURMD_NODENAME")
    if name is not None:
        fields = slurm("scontrol", "-o", "show", "node", name).split()
        addresses = [value for key, _, value in (field.partition("=") for field in fields) if key == "NodeAddr"]
        return socket.gethostbyname(addresses[0])
    return this_node() or "127.0.0.1"


def cpus() -> int | None:
    """CPUs of this job on this node."""
    count = os.environ.get("SLURM_CPUS_ON_NODE")
    return None if count is None else int(count)


def gpus() -> int | None:
    """GPUs of this job on this node: none when it asked for none, whatever the node has."""
    return None if job() is None else int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))


def requeue() -> None:
    """Have Slurm start this job again. Raises SlurmError."""
    slurm("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
