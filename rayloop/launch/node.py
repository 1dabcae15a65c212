"""``node head|worker``: one Ray node of a cluster as a process, and beside a worker optionally a
program.

The head publishes its address (rayloop/launch/rendezvous.py). Workers join it, leave when another
head is published or theirs does not listen any more, and wait for the next one. When Ray of the
head ends by itself, it is started again with the same ports.

SIGTERM, SIGINT and SIGUSR1 (Slurm's ``--signal``: the time limit is near) end the program, which
may save first, and then the node; a second signal ends both at once. With --requeue the Slurm job
is requeued after SIGUSR1, and, after a pause, when the machines failed (exit code 69); without
Slurm the node starts again by itself. A worker without a program stays for --grace after SIGUSR1,
since others need it to save; without --requeue it ignores SIGUSR1 and leaves with the head.
"""

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

from rayloop.core.failures import AGAIN, ConfigError, Preempted
from rayloop.core.signals import STOP, StopSignals, handling
from rayloop.launch import slurm_job
from rayloop.launch.limits import memory_limit, ray_memory
from rayloop.launch.network import Ports, block, kernels, port_range
from rayloop.launch.ray_process import (
    DRAIN,
    POLL,
    NodeFailed,
    child,
    kept_logs,
    ray_node,
    reap,
    started,
    tail,
)
from rayloop.launch.ray_variables import (
    interface_settings,
    node_settings,
    temporary_folder,
    without_proxy,
)
from rayloop.launch.rendezvous import Gone, Head, NoHead, Rendezvous, Unpublished, accepts
from rayloop.launch.restarts import RESTARTED, Budget, backed_off
from rayloop.sandbox.kernel import adopt_orphans

SERVICES = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
HEAD_SERVICES = ("port", "dashboard-port", "ray-client-server-port")
ATTEMPTS = 5
"""Failures of Ray in a row after which a worker ends; the pauses between them take four minutes in
all (``backed_off``).
"""
RESTARTS = 6
"""Times an hour that a head restarts a Ray that ended by itself."""
PARTING = 15.0
"""Seconds for a program to end by itself after its cluster is gone: it cannot save, and prints
where a resume starts.
"""


class End(Enum):
    """Why a node leaves."""

    SIGNAL = "a signal came"
    PROGRAM = "the program ended"
    GONE = "the head is gone"
    RAY = "Ray ended"


def run_node(a: argparse.Namespace) -> int:
    """Run the node of ``python -m rayloop node`` until it ends; returns its exit code."""
    signals, job, starts = StopSignals(), slurm_job.job(), slurm_job.restarts()
    if a.requeue and job is not None and not slurm_job.can_ask():
        print(
            "node: --requeue does nothing without scontrol (in a container?): submit a job that has"
            " saved again",
            flush=True,
        )
        a.requeue = 0
    print(
        f"node: open between the nodes: {a.ports} (Ray), and {kernels()} (the policy's ranks: gloo,"
        " NCCL)",
        flush=True,
    )
    ignores = a.role is worker and not a.program and not a.requeue
    # Processes that Ray leaves behind become children of this one, which ends them with the node.
    adopt_orphans()
    place = Rendezvous(a.rendezvous, a.cluster)
    with (
        handling(signals, *STOP),
        handling((lambda *_: None) if ignores else signals, signal.SIGUSR1),
    ):
        if job is not None:
            place.register(job, program=bool(a.program))
        while True:
            code = _attempt(a, place, signals, starts)
            if not _again(a, signals, code, starts) or (
                code == AGAIN and not backed_off(signals, starts)
            ):
                return code
            starts += 1
            if job is not None:  # within the block: the requeue sends SIGTERM to this process
                print(f"node: requeued, restart {starts} of {a.requeue}", flush=True)
                slurm_job.requeue()
                return code
            print(f"node: again, {starts} of {a.requeue}", flush=True)


def _attempt(a: argparse.Namespace, place: Rendezvous, signals: StopSignals, starts: int) -> int:
    """Run the node once.

    Returns its exit code: AGAIN also when Ray failed or no head came, and the node will start
    again.
    """
    try:
        code: int = a.role(a, place, signals)
    except (NodeFailed, NoHead) as error:
        if not _again(a, signals, AGAIN, starts):
            raise
        print(f"node: {error}", flush=True)
        return AGAIN
    return code


def _again(a: argparse.Namespace, signals: StopSignals, code: int, starts: int) -> bool:
    """Whether the node starts again after ``starts`` restarts: machines failed without signal, or
    it saved for Slurm's limit.
    """
    saved = (
        slurm_job.job() is not None
        and signals.near_limit()
        and (code == Preempted.exit_code or not a.program)
    )
    return starts < a.requeue and (saved or (signals.first is None and code == AGAIN))


def head(a: argparse.Namespace, place: Rendezvous, signals: StopSignals) -> int:
    """Run a head until a signal, and start a Ray that ended again, RESTARTS times an hour.

    Returns 0; raises NodeFailed.
    """
    token, budget, led = place.open(a.insecure), Budget(RESTARTS), False
    with block(*port_range(a.ports), (*SERVICES, *HEAD_SERVICES)) as ports:
        while True:
            try:
                return _lead(a, place, signals, token, ports)
            except (
                NodeFailed
            ) as error:  # Ray may also fail to start a second time, on a busy machine
                led = led or isinstance(error, RayEnded)
                if (
                    not led
                    or isinstance(error, Displaced)
                    or signals.first is not None
                    or budget.wait(time.monotonic())
                ):
                    raise
                budget.take(time.monotonic())
                print(
                    f"node: {_short(error)}; it is started again, with the same ports and token",
                    flush=True,
                )


def _short(error: NodeFailed) -> str:
    """The first line of the error, and the name of the process of Ray that ended."""
    first, *lines = str(error).splitlines()
    return " ".join(
        [
            first,
            *(
                line.partition("END ")[2].strip(" -")
                for line in lines
                if "END " in line and "exit code" in line
            ),
        ]
    )


class RayEnded(NodeFailed):
    """Ray of a head that was published ended by itself."""


class Displaced(NodeFailed):
    """Another head is published, or this one could not publish its entry for too long."""


def _lead(
    a: argparse.Namespace, place: Rendezvous, signals: StopSignals, token: Path | None, ports: Ports
) -> int:
    """Run the head until a signal. Returns 0; raises RayEnded, Displaced and NodeFailed."""
    address = slurm_job.node_address(a.interface)
    with temporary_folder(a.temp_dir) as folder:
        me = Head(
            f"{address}:{ports['port']}",
            f"http://{address}:{ports['dashboard-port']}",
            str(token) if token else None,
            os.uname().nodename,
            slurm_job.job(),
            slurm_job.restarts(),
            time.time(),
        )
        settings = _settings(token, 0, a.interface, address, runs_jobs=True)
        command = [
            "--head",
            f"--dashboard-host={address}",
            "--include-dashboard=true",
            *_offers(a, cpus=0, gpus=0),
        ]
        with (
            kept_logs(folder, place.folder),
            ray_node(command, address, ports, folder, settings) as ray,
        ):
            if not started(
                ray, folder, [me.address, me.dashboard.removeprefix("http://")], signals
            ):
                return 0
            gone = Unpublished(place, me)
            with suppress(OSError):  # ``gone`` tries again
                place.publish(me)
            print(
                f"node: head of {a.cluster} at {me.address}, dashboard {me.dashboard}", flush=True
            )
            why = attend(ray, None, signals, gone)
            # Before the pause: runs see that the head leaves, and save while it still listens.
            place.withdraw(me, left=why is not End.RAY)
            if why is End.SIGNAL and signals.near_limit():
                _pause(a.grace, signals)  # the others save
            if why is End.RAY:
                raise RayEnded(f"Ray ended with code {ray.returncode}:\n{tail(folder)}")
            if why is End.GONE:
                raise Displaced(gone.why)
    return 0


def worker(a: argparse.Namespace, place: Rendezvous, signals: StopSignals) -> int:
    """Join the head, and each head that comes after it, until a signal or the end of the program.

    Raises NodeFailed after ATTEMPTS failures in a row, and at once when there is a program: its job
    starts again.
    """
    failures = 0
    while (joined := place.wait(a.wait, lambda: signals.first is not None)) is not None:
        try:
            why, code = _join(a, place, joined, signals)
        except NodeFailed as error:
            failures += 1
            if a.program or failures == ATTEMPTS:
                raise
            print(
                f"node: {error}\nnode: trying again, {failures} of {ATTEMPTS} attempts failed",
                flush=True,
            )
            backed_off(
                signals, failures - 1
            )  # what is in the way, as a full disk, may last longer than the attempts take
            continue
        failures = 0
        if why in (End.SIGNAL, End.PROGRAM):
            return code
        print(f"node: left {joined.address}: {why.value}", flush=True)
    return Preempted.exit_code if a.program and signals.first else 0


def _join(
    a: argparse.Namespace, place: Rendezvous, joined: Head, signals: StopSignals
) -> tuple[End, int]:
    """Run a node of this head until one of the two ends.

    Returns why, and the exit code of the program (0 without one).
    """
    address, host = slurm_job.node_address(a.interface), joined.address.rpartition(":")[0]
    gone = Gone(place, joined, saves=bool(a.program))
    settings = _settings(
        Path(joined.token) if joined.token else None, DRAIN, a.interface, address, host
    )
    with block(*port_range(a.ports), SERVICES) as ports, temporary_folder(a.temp_dir) as folder:
        command = [
            f"--address={joined.address}",
            *_offers(a, cpus=slurm_job.cpus(), gpus=slurm_job.gpus()),
        ]
        with (
            kept_logs(folder, place.folder),
            ray_node(command, address, ports, folder, settings) as ray,
        ):
            print(f"node: joining {joined.address} as {address}", flush=True)
            if not started(ray, folder, [f"{address}:{ports['node-manager-port']}"], signals, gone):
                return (
                    (End.SIGNAL, Preempted.exit_code if a.program else 0)
                    if signals.first
                    else (End.GONE, 0)
                )
            with beside(a, joined, settings, signals) as program:
                why = attend(ray, program, signals, gone)
                if why is End.SIGNAL and program is None and signals.near_limit():
                    _pause(
                        a.grace, signals, gone
                    )  # runs save, if their jobs are near their limits as well
                if why in (End.GONE, End.RAY) and (
                    ray.poll() is not None or gone.replaced() or not accepts(joined.address)
                ):
                    _part(program)

            code = program.returncode if program else 0
            lost = place.head() != joined or joined.stale() is not None
            if why is End.RAY and not lost:
                raise NodeFailed(
                    f"Ray ended with code {ray.returncode}, while {joined.address} goes"
                    f" on:\n{tail(folder)}"
                )
            if why is End.PROGRAM and code not in (0, Preempted.exit_code) and lost:
                why = End.GONE  # it failed since the cluster had gone
            if why is End.GONE:
                ray.kill()  # no head is left to drain it
    return why, code


def attend(
    ray: subprocess.Popen[bytes],
    program: subprocess.Popen[bytes] | None,
    signals: StopSignals,
    gone: Callable[[], bool],
) -> End:
    """Wait until there is a reason to leave."""
    while True:
        # The signal comes first: the program, or Ray, may have ended by it too.
        if signals.first is not None:
            print(f"node: received {signal.Signals(signals.first).name}", flush=True)
            return End.SIGNAL
        if program is not None and program.poll() is not None:
            return End.PROGRAM
        if ray.poll() is not None:
            return End.RAY
        if gone():
            return End.GONE
        reap()
        time.sleep(POLL)


def _settings(
    token: Path | None, drain: int, interface: str | None, *hosts: str, runs_jobs: bool = False
) -> dict[str, str]:
    """The variables of a node's processes; ``drain``: seconds that a leaving node waits for what
    runs on it.
    """
    drains = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(drain)}
    return (
        node_settings(token, runs_jobs=runs_jobs)
        | without_proxy(*hosts)
        | drains
        | interface_settings(interface)
    )


def _offers(a: argparse.Namespace, cpus: int | None, gpus: int | None) -> list[str]:
    """Options for the resources of the node; without a number Ray counts by itself.

    Raises ConfigError.
    """
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
            raise ConfigError(
                f"--resource {item}: expected NAME=N, for example rollout=1"
            ) from None
    return [f"{name}={n}" for name, n in amounts.items() if n is not None] + [
        f"--resources={json.dumps(resources)}"
    ]


@contextmanager
def beside(
    a: argparse.Namespace, head: Head, settings: Mapping[str, str], signals: StopSignals
) -> Iterator[subprocess.Popen[bytes] | None]:
    """Run the program, if there is one.

    The block ends it by SIGTERM; after --grace, or a second signal, by SIGKILL.
    """
    if not a.program:
        yield None
        return
    program = child(a.program, os.environ | settings | {"RAY_ADDRESS": head.address})
    os.environ[RESTARTED] = "1"  # for the next one: it continues what this one began
    try:
        yield program
    finally:
        program.terminate()
        _pause(a.grace, signals, lambda: program.poll() is not None)
        if program.poll() is None:
            print(f"node: {a.program[0]} did not end in time: it is killed", flush=True)
            program.kill()
        program.wait()


def _part(program: subprocess.Popen[bytes] | None) -> None:
    """Wait PARTING seconds for a program whose cluster is gone, then kill it."""
    if program is None:
        return
    try:
        program.wait(PARTING)
    except subprocess.TimeoutExpired:
        print(
            f"node: the program did not end within {PARTING:g} s after its cluster: it is killed",
            flush=True,
        )
        program.kill()


def _pause(seconds: float, signals: StopSignals, over: Callable[[], bool] = lambda: False) -> None:
    """Wait ``seconds``, or until a second signal or ``over``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not signals.again and not over():
        reap()
        time.sleep(POLL)
