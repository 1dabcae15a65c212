"""A real Slurm on one machine: a controller, and one node daemon in a network, process and mount
namespace per node.

Every node has its own address, host name, processes and shared memory; the disk is what they share.
Needs root and Debian's packages: ``python -m tests.deploy.slurm.lab install``. ``python -m
tests.deploy.slurm.lab COMMAND`` runs a command beside a lab.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.debian import install
from tests.support.heads import free_ports

PACKAGES = ("slurm-wlm", "slurm-wlm-basic-plugins", "munge", "iproute2", "util-linux")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare")
NODES = {"cpu1": 0, "gpu1": 2, "gpu2": 2, "gpu3": 2}
"""Node -> GPUs, which are twins of /dev/null."""
KILL_WAIT = 30
"""Seconds from SIGTERM to SIGKILL, as Slurm has it by default."""

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}({network}.254)
SlurmctldPort={port}
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
MailProg=/bin/true
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=20
KillWait={kill_wait}
MinJobAge=600
InactiveLimit=0
"""
START_NODE = """\
hostname "$1"
mount --make-rprivate /
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs -o size=1g tmpfs /dev/shm
exec slurmd -D -N "$1" -f "$2/slurm.conf"
"""


def why_not() -> str | None:
    """What keeps a lab from being started here; None: nothing."""
    if os.geteuid() != 0:
        return "a lab needs root, for network namespaces"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return (
            f"{', '.join(missing)} missing: `python -m tests.deploy.slurm.lab install` installs"
            " Debian's packages"
        )
    tried = subprocess.run(
        ["unshare", "-n", "-m", "-u", "-p", "-f", "true"], capture_output=True, text=True
    )
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Lab:
    """A running lab.

    ``environment`` is what Slurm's commands need; ``nodes``: name -> the process that holds its
    namespaces, of those that have power; ``mark``: what names of its network begin with.
    """

    folder: Path
    environment: dict[str, str]
    nodes: dict[str, subprocess.Popen[bytes]]
    mark: str

    def cut(self, name: str) -> float:
        """Take the power of a node away: it is silent from one moment to the next, and nothing of
        it takes leave. Returns when.
        """
        now = time.time()
        _ip("link", "set", f"{self.mark}-{name}", "down")
        process = self.nodes.pop(name)
        process.kill()
        process.wait(10)
        return now

    def slurm(self, *command: str, cwd: Path | None = None) -> str:
        """What a command prints. Raises AssertionError with its errors when it fails."""
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def idle(self) -> bool:
        listed = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %t"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return len({line for line in listed.stdout.splitlines() if line.endswith(" idle")}) == len(
            self.nodes
        )

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """What runs on which node, besides Slurm's own daemons; zombies left out."""
        found = []
        for name, node in self.nodes.items():
            for process in psutil.Process(node.pid).children(recursive=True):
                try:
                    if process.status() != psutil.STATUS_ZOMBIE and not process.name().startswith(
                        "slurm"
                    ):
                        found.append((name, process))
                except psutil.NoSuchProcess:
                    continue
        return found

    def shared_memory(self) -> dict[str, list[str]]:
        """Node -> the files in its /dev/shm."""
        inside = {
            name: psutil.Process(node.pid).children()[0].pid for name, node in self.nodes.items()
        }
        return {name: os.listdir(f"/proc/{pid}/root/dev/shm") for name, pid in inside.items()}


@contextmanager
def lab() -> Iterator[Lab]:
    """Start a lab and wait until all nodes are idle; with the block everything of it ends."""
    mark = f"rl{os.getpid() % 100000}"
    network = f"10.{os.getpid() % 199 + 31}.{os.getpid() // 199 % 250}"
    with ExitStack() as after:
        folder = Path(
            after.enter_context(
                tempfile.TemporaryDirectory(prefix="slurm-lab-", ignore_cleanup_errors=True)
            )
        )
        folder.chmod(0o755)
        addresses = {name: f"{network}.{number}" for number, name in enumerate(NODES, 1)}
        _configure(folder, network, addresses)
        after.enter_context(
            _daemon(
                [
                    "munged",
                    "--foreground",
                    "--force",
                    f"--key-file={folder}/munge.key",
                    f"--socket={folder}/munge.socket",
                    f"--pid-file={folder}/munged.pid",
                    f"--log-file={folder}/munged.log",
                    f"--seed-file={folder}/munge.seed",
                ],
                folder / "munged.out",
            )
        )
        _until(lambda: (folder / "munge.socket").exists(), "munged's socket", folder)
        after.enter_context(_bridge(mark, network))
        environment = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf"}
        after.enter_context(
            _daemon(["slurmctld", "-D", "-f", f"{folder}/slurm.conf"], folder / "slurmctld.out")
        )
        nodes = {
            name: after.enter_context(_node(mark, name, addresses[name], network, folder))
            for name in NODES
        }
        started = Lab(folder, environment, nodes, mark)
        _until(started.idle, "the nodes idle", folder)
        yield started


def _configure(folder: Path, network: str, addresses: dict[str, str]) -> None:
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(128))
    known = {
        "host": socket.gethostname(),
        "port": free_ports(1)[0],
        "network": network,
        "folder": folder,
    }
    lines = [CONFIGURATION.format(**known, kill_wait=KILL_WAIT)]
    for name, gpus in NODES.items():
        (folder / f"spool-{name}").mkdir()
        gres = f"Gres=gpu:{gpus} " if gpus else ""
        lines.append(
            f"NodeName={name} NodeAddr={addresses[name]} CPUs=4 RealMemory=4000"
            f" {gres}State=UNKNOWN\n"
        )
    lines += [
        "PartitionName=cpu Nodes=cpu1 Default=YES State=UP\n",
        "PartitionName=gpu Nodes=gpu[1-3] State=UP\n",
    ]
    (folder / "slurm.conf").write_text("".join(lines), encoding="utf-8")
    for number in range(max(NODES.values())):
        os.mknod(
            folder / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3)
        )  # Slurm wants a device file
    (folder / "gres.conf").write_text(
        "".join(
            f"NodeName={name} Name=gpu File={folder}/gpu[0-{gpus - 1}]\n"
            for name, gpus in NODES.items()
            if gpus
        ),
        encoding="utf-8",
    )
    constrain = "ConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n"
    (folder / "cgroup.conf").write_text(
        f"CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n{constrain}", encoding="utf-8"
    )
    hosts = {"127.0.0.1": "localhost", f"{network}.254": socket.gethostname()} | {
        a: name for name, a in addresses.items()
    }
    (folder / "hosts").write_text(
        "".join(f"{address} {name}\n" for address, name in hosts.items()), encoding="utf-8"
    )


@contextmanager
def _daemon(command: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


@contextmanager
def _bridge(mark: str, network: str) -> Iterator[None]:
    _ip("link", "add", mark, "type", "bridge")
    try:
        _ip("addr", "add", f"{network}.254/24", "dev", mark)
        _ip("link", "set", mark, "up")
        yield
    finally:
        _ip("link", "del", mark)


@contextmanager
def _node(
    mark: str, name: str, address: str, network: str, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    space = outside = f"{mark}-{name}"
    with ExitStack() as undo:
        _ip("netns", "add", space)
        undo.callback(_ip, "netns", "del", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        # Deleted by name: the kernel keeps a namespace and its link until the last process inside
        # has ended.
        undo.callback(_ip, "link", "del", outside)
        _ip("link", "set", outside, "master", mark, "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")
        _ip("-n", space, "route", "add", "default", "via", f"{network}.254")
        inside = (
            f"ip netns exec {space} unshare --mount --uts --pid --fork --mount-proc"
            " --kill-child=KILL bash -c"
        )
        command = [*inside.split(), START_NODE, "_", name, str(folder)]
        process = undo.enter_context(_daemon(command, folder / f"{name}.out"))
        undo.callback(
            process.kill
        )  # unshare ignores SIGTERM; its end is the end of everything in the namespace
        yield process


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _until(condition: Callable[[], bool], what: str, folder: Path) -> None:
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            tails = "\n".join(
                f"{log.name}: {log.read_text(encoding='utf-8')[-500:]}"
                for log in folder.glob("*.log")
            )
            raise AssertionError(f"{what}: not within 60 s\n{tails}")
        time.sleep(0.1)


if __name__ == "__main__":
    if sys.argv[1:] == ["install"]:
        install("test-slurm", PROGRAMS, PACKAGES)
    elif problem := why_not():
        raise SystemExit(f"test-slurm cannot run here: {problem}")
    else:
        with lab() as started:
            subprocess.run(sys.argv[1:] or ["bash"], env=started.environment, check=False)
