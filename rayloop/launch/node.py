"""``node head|worker``: one Ray node of a cluster as a process, and a program beside it if one is given.

The head publishes where it is (rayloop/launch/rendezvous.py); workers wait for it, join, leave within seconds when it is gone or
another one has come, and then wait for that one. Nothing of a node outlives its process.

SIGTERM, SIGINT and SIGUSR1 (Slurm's ``--signal``: the time limit is near) end the program, with time to save, and then the
node; a second one does not wait. After SIGUSR1 a job that may be requeued is, and, after a while, one whose program, or Ray, the
machines failed (exit code 69). A worker without program and without --requeue
takes no notice of SIGUSR1: it is needed while others save, and leaves with the head.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from rayloop.core.failures import AGAIN, ConfigError, InfrastructureFailure, Preempted
from rayloop.core.signals import STOP, StopSignals, handling
from rayloop.launch import slurm_job
from rayloop.launch.kept_logs import kept_logs
from rayloop.launch.limits import memory_limit, ray_memory
from rayloop.launch.ports import Ports, block, kernels, port_range
from rayloop.launch.ray_variables import node_settings, temporary_folder, without_proxy
from rayloop.launch.rendezvous import Head, NoHead, Rendezvous, accepts

ROOT = "~/.rayloop"
"""Where rendezvous folders are by default: home folders are shared on most clusters."""
SERVICES = (
    "node-manager-port", "object-manager-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
    "runtime-env-agent-port", "metrics-export-port",
)  # fmt: skip
HEAD_SERVICES = ("port", "dashboard-port", "ray-client-server-port")
LOG = "ray-start.log"
"""What ``ray start`` prints, in the temporary folder."""
POLL = 0.5
ATTEMPTS = 5
"""Times in a row that Ray may fail on a worker."""
START = 120.0
"""Seconds within which Ray must accept connections."""
SILENCE = 10.0
"""Seconds without an accepted connection after which a head is gone that did not take leave."""
BACKOFF, LONGEST = 15.0, 300.0
"""Seconds before a job is requeued for the first time since the machines failed, and at most: it keeps its nodes meanwhile."""
DRAIN = 5
"""Seconds that a leaving worker waits for what runs on it (Ray's own default, 30, is all that Slurm allows before SIGKILL)."""
END = 5.0
"""Seconds that Ray then gets to end by itself."""
PATH_LIMIT = 40
"""Characters of the temporary folder: Ray's sockets lie below it, and a socket's path may have 107."""
SUBREAPER, DEATH_SIGNAL = 36, 1
"""Of prctl(2): orphans of our children become ours, so that they can be ended; our children get a signal when we are killed."""


class NodeFailed(InfrastructureFailure):
    """Ray did not start, or ended by itself while the cluster went on."""


class End(Enum):
    """Why a node leaves."""

    TOLD = "a signal came"
    PROGRAM = "the program ended"
    GONE = "the head is gone"
    RAY = "Ray ended"


def run_node(a: argparse.Namespace) -> int:
    """The node of ``python -m cluster node`` until it ends; its exit code."""
    told = StopSignals()
    if a.requeue and slurm_job.job() is not None and not slurm_job.can_ask():
        print(
            "node: --requeue does nothing here, there is no scontrol (a container?): submit the job again when it has saved",
            flush=True,
        )
        a.requeue = 0
    print(
        f"node: open between the nodes: {a.ports} (Ray), and {kernels()} (the policy's ranks: gloo, NCCL)", flush=True
    )
    deaf = a.role is worker and not a.program and not a.requeue
    _prctl(SUBREAPER, 1)
    place = Rendezvous(a.rendezvous, a.cluster)
    with handling(told, *STOP), handling((lambda *_: None) if deaf else told, signal.SIGUSR1):
        if (job := slurm_job.job()) is not None:
            place.register(job, program=bool(a.program))
        code = _code(a, place, told)
        psutil.wait_procs(
            psutil.Process().children(), timeout=DRAIN + END
        )  # cluster.sbatch's srun: its nodes leave now
        if _requeued(a, told, code):  # within the block: to be requeued is to be sent SIGTERM
            if code == AGAIN and not _backed_off(told):
                return code
            print(f"node: requeued, restart {slurm_job.restarts() + 1} of {a.requeue}", flush=True)
            slurm_job.requeue()
    return code


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _child(command: Sequence[str], environment: Mapping[str, str], log: Any = None) -> subprocess.Popen[bytes]:
    """A process out of reach of the signals for our process group; it gets SIGTERM when this process dies."""
    return subprocess.Popen(
        command, env=environment, stdout=log, stderr=log, start_new_session=True,
        preexec_fn=lambda: _prctl(DEATH_SIGNAL, signal.SIGTERM),
    )  # fmt: skip


def _requeued(a: argparse.Namespace, told: StopSignals, code: int) -> bool:
    """Whether this job will be started again, not too often: near its time limit, if its program has saved, and when the machines
    failed while nobody had asked it to end."""
    saved = code == Preempted.exit_code or not a.program
    due = (told.near_limit() and saved) or (told.first is None and code == AGAIN)
    return due and slurm_job.job() is not None and slurm_job.restarts() < a.requeue


def _code(a: argparse.Namespace, place: Rendezvous, told: StopSignals) -> int:
    """Be the node until it ends. Its exit code: AGAIN when Ray failed, or no head came, and the job may be requeued for that."""
    try:
        code: int = a.role(a, place, told)
        return code
    except (NodeFailed, NoHead) as error:
        if not _requeued(a, told, AGAIN):
            raise
        print(f"node: {error}", flush=True)
        return AGAIN


def _backed_off(told: StopSignals) -> bool:
    """Wait before the job is requeued, longer each time: what has failed may take a while. False when told to end meanwhile."""
    seconds = min(BACKOFF * 2 ** slurm_job.restarts(), LONGEST)
    print(f"node: the machines failed: the job is requeued in {seconds:g} s", flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until and told.first is None:
        time.sleep(POLL)
    return told.first is None or told.near_limit()


def head(a: argparse.Namespace, place: Rendezvous, told: StopSignals) -> int:
    """Start a head, publish it, and stay until a signal, or the end of the program, whose exit code is returned."""
    token = place.open(a.insecure)
    address = slurm_job.node_address(a.interface)
    with block(*port_range(a.ports), (*SERVICES, *HEAD_SERVICES)) as ports, temporary_folder(a.temp_dir) as folder:
        me = Head(
            f"{address}:{ports['port']}", f"http://{address}:{ports['dashboard-port']}", str(token) if token else None,
            os.uname().nodename, slurm_job.job(), slurm_job.restarts(), time.time(),
        )  # fmt: skip
        settings = node_settings(token, runs_jobs=True) | without_proxy(address) | _drain(0) | _network(a.interface)
        command = ["--head", f"--dashboard-host={address}", "--include-dashboard=true"]
        command += _offers(a, cpus=0, gpus=0)
        with kept_logs(folder, place.folder), ray_node(command, address, ports, folder, settings) as ray:
            if not _started(ray, folder, [me.address, me.dashboard.removeprefix("http://")], told):
                return Preempted.exit_code if a.program else 0
            place.publish(me)
            print(f"node: head of {a.cluster} at {me.address}, dashboard {me.dashboard}", flush=True)
            with beside(a, me, settings, told) as program:
                why = attend(ray, program, told, lambda: place.head() != me)
            code = program.returncode if program else 0
            place.withdraw(
                me, done=program is not None and why in (End.PROGRAM, End.TOLD) and not _requeued(a, told, code)
            )
            if why is End.TOLD and not program and told.near_limit():
                _pause(a.grace, told)  # the others save
            if why is End.RAY:
                raise NodeFailed(f"Ray ended with code {ray.returncode}:\n{_tail(folder)}")
            if why is End.GONE:
                raise NodeFailed(f"this head's entry in {place.folder} was removed or replaced by another head's")
    return code


def worker(a: argparse.Namespace, place: Rendezvous, told: StopSignals) -> int:
    """Join the head, and each head that comes after it, until a signal, the end of the program or of the cluster's work.

    Ray gives a node 30 s to start, which a busy machine may need more than once. Raises NodeFailed after ATTEMPTS in a row, and
    at once when there is a program, whose run continues from its checkpoint in another attempt of the job.
    """
    former, failures = None, 0
    while (joined := place.wait(a.wait, former, lambda: told.first is not None)) is not None:
        try:
            why, code = _join(a, place, joined, told)
        except NodeFailed as error:
            failures += 1
            if a.program or failures == ATTEMPTS:
                raise
            print(f"node: {error}\nnode: trying again, {failures} of {ATTEMPTS} attempts failed", flush=True)
            continue
        failures = 0
        if why in (End.TOLD, End.PROGRAM):
            return code
        print(f"node: left {joined.address}: {why.value}", flush=True)
        former = joined
    return Preempted.exit_code if a.program and told.first else 0


def _join(a: argparse.Namespace, place: Rendezvous, joined: Head, told: StopSignals) -> tuple[End, int]:
    """Be a node of this head until one of the two ends. Returns why, and the exit code of the program (0 without one)."""
    address, host = slurm_job.node_address(a.interface), joined.address.rpartition(":")[0]
    gone = Gone(place, joined)
    settings = (
        node_settings(Path(joined.token) if joined.token else None)
        | without_proxy(address, host)
        | _drain(DRAIN)
        | _network(a.interface)
    )
    with block(*port_range(a.ports), SERVICES) as ports, temporary_folder(a.temp_dir) as folder:
        command = [f"--address={joined.address}", *_offers(a, cpus=slurm_job.cpus(), gpus=slurm_job.gpus())]
        with kept_logs(folder, place.folder), ray_node(command, address, ports, folder, settings) as ray:
            print(f"node: joining {joined.address} as {address}", flush=True)
            if not _started(ray, folder, [f"{address}:{ports['node-manager-port']}"], told, gone):
                return (End.TOLD, Preempted.exit_code if a.program else 0) if told.first else (End.GONE, 0)
            with beside(a, joined, settings, told) as program:
                why = attend(ray, program, told, gone)
                if why is End.GONE and program and not joined.accepts():
                    program.kill()  # without a head it cannot save
            code = program.returncode if program else 0
            lost = place.head() != joined or joined.stale() is not None
            if why is End.RAY and not lost:
                raise NodeFailed(
                    f"Ray ended with code {ray.returncode}, while {joined.address} goes on:\n{_tail(folder)}"
                )
            if why is End.PROGRAM and code not in (0, Preempted.exit_code) and lost:
                why = End.GONE  # it failed since the cluster had gone
            if why is End.GONE:
                ray.kill()  # there is nobody left to take leave of
    return why, code


class Gone:
    """Whether a head has left: its entry is gone or another's, or it has accepted no connection for SILENCE seconds."""

    def __init__(self, place: Rendezvous, joined: Head) -> None:
        self._place, self._joined, self._heard = place, joined, time.monotonic()

    def __call__(self) -> bool:
        if self._place.head() != self._joined:
            return True
        if self._joined.accepts():
            self._heard = time.monotonic()
        return time.monotonic() - self._heard > SILENCE


def attend(ray: subprocess.Popen[bytes], program: subprocess.Popen[bytes] | None, told: StopSignals, gone: Any) -> End:
    """Wait until there is a reason to leave."""
    while True:
        if told.first is not None:
            print(f"node: received {signal.Signals(told.first).name}", flush=True)
            return End.TOLD
        if program is not None and program.poll() is not None:
            return End.PROGRAM
        if ray.poll() is not None:
            return End.RAY
        if gone():
            return End.GONE
        time.sleep(POLL)


def _drain(seconds: int) -> dict[str, str]:
    return {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(seconds)}


def _network(interface: str | None) -> dict[str, str]:
    """The ranks of a policy and the broadcast of weights take the same interface as Ray."""
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def _offers(a: argparse.Namespace, cpus: int | None, gpus: int | None) -> list[str]:
    """Options for what the node offers; without a number Ray counts by itself. Raises ConfigError."""
    amounts = {
        "--num-cpus": cpus if a.num_cpus is None else a.num_cpus,
        "--num-gpus": gpus if a.num_gpus is None else a.num_gpus,
    }
    amounts |= ray_memory(a.object_store_memory, memory_limit())
    resources = {}
    for item in a.resource:
        name, _, amount = item.partition("=")
        try:
            resources[name] = float(amount)
        except ValueError:
            raise ConfigError(f"--resource {item}: expected NAME=N, for example rollout=1") from None
    return [f"{name}={n}" for name, n in amounts.items() if n is not None] + [f"--resources={json.dumps(resources)}"]


@contextmanager
def ray_node(
    options: Sequence[str], address: str, ports: Ports, folder: Path, settings: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """``ray start --block`` with these options; with the block all its processes end. Raises ConfigError."""
    if len(str(folder)) > PATH_LIMIT:
        raise ConfigError(
            f"{folder}: sockets below it would have too long paths. Name a shorter folder with --temp-dir"
        )
    before = set(psutil.Process().children())
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | settings | {"TMPDIR": str(folder)}
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--log-color=false",
        f"--node-ip-address={address}", f"--temp-dir={folder}", *options,
        *(f"--{service}={port}" for service, port in ports.services.items()),
        f"--min-worker-port={ports.workers[0]}", f"--max-worker-port={ports.workers[1]}",
    ]  # fmt: skip
    with (folder / LOG).open("wb") as log:
        ray = _child(command, environment, log)
    try:
        yield ray
    finally:
        ray.terminate()
        with suppress(subprocess.TimeoutExpired):
            ray.wait(DRAIN + END)
        _end_rest(before)


def _end_rest(before: set[psutil.Process]) -> None:
    """Kill what is left below this process, besides what was there before."""
    rest = [child for own in set(psutil.Process().children()) - before for child in (own, *_below(own))]
    for process in rest:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(rest, timeout=END)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _started(
    ray: subprocess.Popen[bytes], folder: Path, addresses: Sequence[str], told: StopSignals, gone: Any = lambda: False
) -> bool:
    """Wait until all addresses accept connections. Returns whether they do: False when a signal or ``gone`` came before.

    Raises NodeFailed.
    """
    deadline = time.monotonic() + START
    while not all(map(accepts, addresses)):
        if told.first is not None or gone():
            return False
        if ray.poll() is not None:
            raise NodeFailed(f"ray start ended with code {ray.returncode}:\n{_tail(folder)}")
        if time.monotonic() > deadline:
            raise NodeFailed(f"ray start did not open {', '.join(addresses)} within {START:g} s:\n{_tail(folder)}")
        time.sleep(POLL / 2)
    return True


def _tail(folder: Path) -> str:
    return (folder / LOG).read_text(errors="replace")[-2000:]


@contextmanager
def beside(
    a: argparse.Namespace, head: Head, settings: Mapping[str, str], told: StopSignals
) -> Iterator[subprocess.Popen[bytes] | None]:
    """Run the program, if there is one. After the block it has ended: by SIGTERM; after --grace, or a second signal, by SIGKILL."""
    if not a.program:
        yield None
        return
    program = _child(a.program, os.environ | settings | {"RAY_ADDRESS": head.address})
    try:
        yield program
    finally:
        if program.poll() is None:
            program.terminate()
            deadline = time.monotonic() + a.grace
            while program.poll() is None and time.monotonic() < deadline and not told.again:
                time.sleep(POLL)
        if program.poll() is None:
            print(f"node: {a.program[0]} did not end in time: it is killed", flush=True)
            program.kill()
        program.wait()


def _pause(seconds: float, told: StopSignals) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not told.again:
        time.sleep(POLL)
