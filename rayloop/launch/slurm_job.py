"""Facts about the Slurm job of this process, and calls of Slurm's commands.

Without Slurm the facts are None or empty.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from rayloop.core.failures import InfrastructureFailure
from rayloop.launch.network import of_interface, this_node

FINAL_STATES = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
)
"""States of jobs that will not run again. PREEMPTED is not listed: it depends on the site."""
LOOPBACK = "127.0.0.1"
GPU_LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
"""Variables in which Slurm names a job's GPUs, where it does not count them."""


class SlurmError(InfrastructureFailure):
    """A command of Slurm failed; the message has its output."""


def job() -> str | None:
    """The id of the Slurm job that this process runs in. Each element of an array has its own."""
    return os.environ.get("SLURM_JOB_ID")


def restarts() -> int:
    """How many times Slurm has requeued this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def slurm(*command: str) -> str:
    """The output of a command of Slurm. Raises SlurmError when it is missing or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SlurmError(
            f"{command[0]}: no such command. Run this on a login node, which has Slurm's commands"
        ) from error
    if result.returncode:
        reason = result.stderr.strip() or f"exit code {result.returncode}"
        raise SlurmError(f"{' '.join(command)}: {reason}")
    return result.stdout


@dataclass(frozen=True)
class Queued:
    """A job that waits, runs or ends just now; each element of an array is a separate one.

    ``text`` describes it in words.
    """

    number: str
    state: str
    text: str


def active(jobs: Iterable[str]) -> list[Queued]:
    """The ``jobs`` that Slurm still has; an array's number stands for its elements.

    Raises SlurmError.
    """
    numbers = set(jobs)
    # An element of an array has its number (%A) and that of the array (%F).
    lines = slurm("squeue", "--me", "-h", "-a", "-r", "-o", "%A %F %T %i %j %T %M %R").splitlines()
    result = []
    for line in lines:
        number, array, state, text = line.split(" ", 3)
        if number in numbers or array in numbers:
            result.append(Queued(number, state, text))
    return result


def ended(number: str) -> bool:
    """Whether Slurm says that a job does not run any more. False without Slurm."""
    if shutil.which("squeue") is None:
        return False
    try:
        state = slurm("squeue", "-h", "-a", "-j", number, "-o", "%T").strip()
    except SlurmError as error:
        # Slurm forgets a job some minutes after its end, and then calls its id invalid.
        return "Invalid job id" in str(error)
    return state in (*FINAL_STATES, "")


def node_address(interface: str | None = None) -> str:
    """The IPv4 address of this node.

    It is the address of ``interface``, else the one that Slurm knows the node by, else that of its
    outward route. The route counts also without scontrol, and when Slurm's address is a loopback.
    Raises ConfigError without such an interface.
    """
    if interface is not None:
        return of_interface(interface)
    outward = this_node() or LOOPBACK
    name = os.environ.get("SLURMD_NODENAME")
    if name is None or not can_ask():
        return outward
    host_name = _host_name(name)
    try:
        address = socket.gethostbyname(host_name)
    except OSError:
        # Only Slurm's controller knows the name.
        return outward
    # Debian's /etc/hosts gives the machine's name the address 127.0.1.1.
    return outward if address.startswith("127.") else address


def _host_name(node: str) -> str:
    """Slurm's NodeAddr of a node; the node's name without one. Raises SlurmError."""
    for entry in slurm("scontrol", "-o", "show", "node", node).split():
        key, _, value = entry.partition("=")
        if key == "NodeAddr":
            return value
    return node


def can_ask() -> bool:
    """Whether Slurm's ``scontrol`` is installed; containers often lack it."""
    return shutil.which("scontrol") is not None


def cpus() -> int | None:
    """CPUs of this job on this node."""
    count = os.environ.get("SLURM_CPUS_ON_NODE")
    return None if count is None else int(count)


def gpus() -> int | None:
    """GPUs of this job on this node; None outside of a job.

    They are counted in a list of devices where Slurm sets no SLURM_GPUS_ON_NODE (no GRES
    accounting).
    """
    if job() is None:
        return None
    count = os.environ.get("SLURM_GPUS_ON_NODE")
    if count is not None:
        return int(count)
    for name in GPU_LISTS:
        devices = os.environ.get(name)
        if devices:
            return _devices(devices)
    return 0


def _devices(text: str) -> int:
    """The number of devices in a list like ``0,2-3`` or ``GPU-5f2c,GPU-81aa``.

    It is 0 for Slurm's ``NoDevFiles``.
    """
    count = 0
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            count += int(high or low) - int(low) + 1
        elif part.startswith(("GPU-", "MIG-")):
            count += 1
    return count


def requeue() -> None:
    """Requeue this job. Raises SlurmError."""
    slurm("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
