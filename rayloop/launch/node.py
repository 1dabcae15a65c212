"""``node head|worker``: one Ray node of a cluster as a process, with a program or without.

The head publishes its address (rayloop/launch/rendezvous.py). Workers join it, leave when another
head is published or theirs does not listen any more, and wait for the next one. When the head's Ray
ends by itself, it is started again with the same ports. A program runs next to a worker.

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

from rayloop.core.failures import START_AGAIN_EXIT_CODE, ConfigError, Preempted
from rayloop.launch import slurm_job
from rayloop.launch.limits import memory_limit, ray_memory
from rayloop.launch.network import Ports, block, kernels, port_range
from rayloop.launch.ray_process import (
    DRAIN_TIMEOUT_S,
    POLL_INTERVAL_S,
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
from rayloop.launch.rendezvous import Head, HeadLeft, NoHead, Rendezvous, Unpublished, accepts
from rayloop.launch.restarts import RESTARTED, Budget, backed_off
from rayloop.launch.signals import STOP, StopSignals, handling
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
MAX_FAILURES = 5
"""Failures of Ray in a row after which a worker ends.

The pauses between them take four minutes in all (``backed_off``).
"""
RESTARTS_PER_HOUR = 6
"""Times an hour that a head restarts a Ray that ended by itself."""
PROGRAM_END_S = 15.0
"""Seconds for a program to end by itself after its cluster was lost.

It cannot save, and prints where a resume starts.
"""


class End(Enum):
    """Why a node leaves."""

    SIGNAL = "a signal came"
    PROGRAM = "the program ended"
    HEAD_LEFT = "the head has left"
    RAY = "Ray ended"


def run_node(args: argparse.Namespace) -> int:
    """Run the node of ``python -m rayloop node`` until it ends; returns its exit code."""
    signals = StopSignals()
    job = slurm_job.job()
    starts = slurm_job.restarts()
    if args.requeue and job is not None and not slurm_job.can_ask():
        print(
            "node: --requeue does nothing without scontrol (in a container?): submit a job that has"
            " saved again",
            flush=True,
        )
        args.requeue = 0
    print(
        f"node: open between the nodes: {args.ports} (Ray), and {kernels()} (the policy's ranks:"
        " gloo, NCCL)",
        flush=True,
    )
    ignores_limit = args.role is worker and not args.program and not args.requeue
    limit_handler = (lambda *_: None) if ignores_limit else signals
    # Processes that Ray leaves behind become children of this one, which ends them with the node.
    adopt_orphans()
    place = Rendezvous(args.rendezvous, args.cluster)
    with (
        handling(signals, *STOP),
        handling(limit_handler, signal.SIGUSR1),
    ):
        if job is not None:
            place.register(job, program=bool(args.program))
        while True:
            code = _attempt(args, place, signals, starts)
            if not _again(args, signals, code, starts):
                return code
            # A node that saved for Slurm's limit needs no pause.
            if code == START_AGAIN_EXIT_CODE and not backed_off(signals, starts):
                return code
            starts += 1
            if job is not None:
                # Still under the handlers: the requeue sends SIGTERM to this process.
                print(f"node: requeued, restart {starts} of {args.requeue}", flush=True)
                slurm_job.requeue()
                return code
            print(f"node: again, {starts} of {args.requeue}", flush=True)


def _attempt(args: argparse.Namespace, place: Rendezvous, signals: StopSignals, starts: int) -> int:
    """Run the node once.

    Returns its exit code: START_AGAIN_EXIT_CODE also when Ray failed or no head came, and the node
    will start again.
    """
    try:
        code: int = args.role(args, place, signals)
    except (NodeFailed, NoHead) as error:
        if not _again(args, signals, START_AGAIN_EXIT_CODE, starts):
            raise
        print(f"node: {error}", flush=True)
        return START_AGAIN_EXIT_CODE
    return code


def _again(args: argparse.Namespace, signals: StopSignals, code: int, starts: int) -> bool:
    """Whether the node starts again after ``starts`` restarts.

    It does when machines failed without a signal, or when it saved for Slurm's limit.
    """
    if starts >= args.requeue:
        return False
    if signals.first is None:
        return code == START_AGAIN_EXIT_CODE
    saved = code == Preempted.exit_code or not args.program
    return saved and signals.near_limit() and slurm_job.job() is not None


def head(args: argparse.Namespace, place: Rendezvous, signals: StopSignals) -> int:
    """Run a head until a signal, and start a Ray that ended again, RESTARTS_PER_HOUR times an hour.

    Returns 0; raises NodeFailed.
    """
    token = place.open(args.insecure)
    budget = Budget(RESTARTS_PER_HOUR)
    was_head = False
    with block(*port_range(args.ports), (*SERVICES, *HEAD_SERVICES)) as ports:
        while True:
            try:
                return _lead(args, place, signals, token, ports)
            except NodeFailed as error:
                # A head that ran before may also fail to start again, on a busy machine.
                was_head = was_head or isinstance(error, RayEnded)
                final = not was_head or isinstance(error, Displaced) or signals.first is not None
                if final or budget.wait(time.monotonic()):
                    raise
                budget.take(time.monotonic())
                print(
                    f"node: {_short(error)}; it is started again, with the same ports and token",
                    flush=True,
                )


def _short(error: NodeFailed) -> str:
    """The first line of the error, and the name of the process of Ray that ended."""
    first, *lines = str(error).splitlines()
    ends = [line for line in lines if "END " in line and "exit code" in line]
    return " ".join([first, *(line.partition("END ")[2].strip(" -") for line in ends)])


class RayEnded(NodeFailed):
    """The Ray of a published head ended by itself."""


class Displaced(NodeFailed):
    """Another head is published, or this one could not publish its entry for too long."""


def _lead(
    args: argparse.Namespace,
    place: Rendezvous,
    signals: StopSignals,
    token: Path | None,
    ports: Ports,
) -> int:
    """Run the head until a signal. Returns 0; raises RayEnded, Displaced and NodeFailed."""
    address = slurm_job.node_address(args.interface)
    with temporary_folder(args.temp_dir) as folder:
        dashboard = f"{address}:{ports['dashboard-port']}"
        entry = Head(
            address=f"{address}:{ports['port']}",
            dashboard=f"http://{dashboard}",
            token=str(token) if token else None,
            node=os.uname().nodename,
            job=slurm_job.job(),
            restart=slurm_job.restarts(),
            published=time.time(),
        )
        settings = _settings(token, 0, args.interface, address, runs_jobs=True)
        command = [
            "--head",
            f"--dashboard-host={address}",
            "--include-dashboard=true",
            *_offers(args, cpus=0, gpus=0),
        ]
        with (
            kept_logs(folder, place.folder),
            ray_node(command, address, ports, folder, settings) as ray,
        ):
            if not started(ray, folder, [entry.address, dashboard], signals):
                return 0
            unpublished = Unpublished(place, entry)
            # ``unpublished`` tries again.
            with suppress(OSError):
                place.publish(entry)
            print(
                f"node: head of {args.cluster} at {entry.address}, dashboard {entry.dashboard}",
                flush=True,
            )
            reason = attend(ray, None, signals, unpublished)
            # Before the pause: runs see that the head leaves, and save while it still listens.
            place.withdraw(entry, left=reason is not End.RAY)
            if reason is End.SIGNAL and signals.near_limit():
                # The other nodes save.
                _pause(args.grace, signals)
            if reason is End.RAY:
                raise RayEnded(f"Ray ended with code {ray.returncode}:\n{tail(folder)}")
            if reason is End.HEAD_LEFT:
                raise Displaced(unpublished.reason)
    return 0


def worker(args: argparse.Namespace, place: Rendezvous, signals: StopSignals) -> int:
    """Join the head, and each head that comes after it, until a signal or the end of the program.

    Raises NodeFailed after MAX_FAILURES failures in a row, and at once when there is a program: its
    job starts again.
    """
    failures = 0
    while True:
        joined = place.wait(args.wait, lambda: signals.first is not None)
        if joined is None:
            return Preempted.exit_code if args.program and signals.first else 0
        try:
            reason, code = _join(args, place, joined, signals)
        except NodeFailed as error:
            failures += 1
            if args.program or failures == MAX_FAILURES:
                raise
            print(
                f"node: {error}\nnode: trying again, {failures} of {MAX_FAILURES} attempts failed",
                flush=True,
            )
            # The cause, such as a full disk, may last longer than the attempts take.
            backed_off(signals, failures - 1)
            continue
        failures = 0
        if reason in (End.SIGNAL, End.PROGRAM):
            return code
        print(f"node: left {joined.address}: {reason.value}", flush=True)


def _join(
    args: argparse.Namespace, place: Rendezvous, joined: Head, signals: StopSignals
) -> tuple[End, int]:
    """Run a node of this head until one of the two ends.

    Returns the reason, and the exit code of the program (0 without one).
    """
    address = slurm_job.node_address(args.interface)
    head_host = joined.address.rpartition(":")[0]
    head_left = HeadLeft(place, joined, saves=bool(args.program))
    token = Path(joined.token) if joined.token else None
    settings = _settings(token, DRAIN_TIMEOUT_S, args.interface, address, head_host)
    with (
        block(*port_range(args.ports), SERVICES) as ports,
        temporary_folder(args.temp_dir) as folder,
    ):
        command = [
            f"--address={joined.address}",
            *_offers(args, cpus=slurm_job.cpus(), gpus=slurm_job.gpus()),
        ]
        with (
            kept_logs(folder, place.folder),
            ray_node(command, address, ports, folder, settings) as ray,
        ):
            print(f"node: joining {joined.address} as {address}", flush=True)
            node_manager = f"{address}:{ports['node-manager-port']}"
            if not started(ray, folder, [node_manager], signals, head_left):
                if signals.first:
                    return End.SIGNAL, Preempted.exit_code if args.program else 0
                return End.HEAD_LEFT, 0
            with beside(args, joined, settings, signals) as program:
                reason = attend(ray, program, signals, head_left)
                if reason is End.SIGNAL and program is None and signals.near_limit():
                    # Runs save, if their jobs are near their limits as well.
                    _pause(args.grace, signals, head_left)
                if reason in (End.HEAD_LEFT, End.RAY) and _cluster_lost(ray, head_left, joined):
                    _part(program)

            code = program.returncode if program else 0
            head_lost = place.head() != joined or joined.stale() is not None
            if reason is End.RAY and not head_lost:
                raise NodeFailed(
                    f"Ray ended with code {ray.returncode}, while {joined.address} still runs:\n"
                    f"{tail(folder)}"
                )
            program_failed = reason is End.PROGRAM and code not in (0, Preempted.exit_code)
            if program_failed and head_lost:
                # The lost cluster made it fail.
                reason = End.HEAD_LEFT
            if reason is End.HEAD_LEFT:
                # No head can drain this node any more.
                ray.kill()
    return reason, code


def _cluster_lost(ray: subprocess.Popen[bytes], head_left: HeadLeft, joined: Head) -> bool:
    """Whether a program on this node cannot reach its cluster any more."""
    return ray.poll() is not None or head_left.replaced() or not accepts(joined.address)


def attend(
    ray: subprocess.Popen[bytes],
    program: subprocess.Popen[bytes] | None,
    signals: StopSignals,
    head_left: Callable[[], bool],
) -> End:
    """Wait until there is a reason to leave, and return it."""
    while True:
        # The signal comes first: the program, or Ray, may have ended by it too.
        if signals.first is not None:
            print(f"node: received {signal.Signals(signals.first).name}", flush=True)
            return End.SIGNAL
        if program is not None and program.poll() is not None:
            return End.PROGRAM
        if ray.poll() is not None:
            return End.RAY
        if head_left():
            return End.HEAD_LEFT
        reap()
        time.sleep(POLL_INTERVAL_S)


def _settings(
    token: Path | None, drain: int, interface: str | None, *hosts: str, runs_jobs: bool = False
) -> dict[str, str]:
    """The variables of a node's processes.

    ``drain``: seconds that a leaving node waits for the work that runs on it.
    """
    return {
        **node_settings(token, runs_jobs=runs_jobs),
        **without_proxy(*hosts),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(drain),
        **interface_settings(interface),
    }


def _offers(args: argparse.Namespace, cpus: int | None, gpus: int | None) -> list[str]:
    """Options for the resources of the node; without a number Ray counts by itself.

    Raises ConfigError.
    """
    amounts = {
        "--num-cpus": cpus if args.num_cpus is None else args.num_cpus,
        "--num-gpus": gpus if args.num_gpus is None else args.num_gpus,
    }
    amounts |= ray_memory(args.object_store_memory, memory_limit())
    resources = {}
    for item in args.resource:
        name, _, amount = item.partition("=")
        try:
            resources[name] = float(amount)
        except ValueError:
            raise ConfigError(
                f"--resource {item}: expected NAME=N, for example rollout=1"
            ) from None
    options = [f"{name}={amount}" for name, amount in amounts.items() if amount is not None]
    return [*options, f"--resources={json.dumps(resources)}"]


@contextmanager
def beside(
    args: argparse.Namespace, head: Head, settings: Mapping[str, str], signals: StopSignals
) -> Iterator[subprocess.Popen[bytes] | None]:
    """Run the program, if there is one.

    The block ends it by SIGTERM; after --grace, or a second signal, by SIGKILL.
    """
    if not args.program:
        yield None
        return
    program = child(args.program, os.environ | settings | {"RAY_ADDRESS": head.address})
    # The next program continues the run that this one began.
    os.environ[RESTARTED] = "1"
    try:
        yield program
    finally:
        program.terminate()
        _pause(args.grace, signals, lambda: program.poll() is not None)
        if program.poll() is None:
            print(f"node: {args.program[0]} did not end in time: it is killed", flush=True)
            program.kill()
        program.wait()


def _part(program: subprocess.Popen[bytes] | None) -> None:
    """Wait PROGRAM_END_S for a program that lost its cluster, then kill it."""
    if program is None:
        return
    try:
        program.wait(PROGRAM_END_S)
    except subprocess.TimeoutExpired:
        print(
            f"node: the program did not end within {PROGRAM_END_S:g} s after its cluster: it is"
            " killed",
            flush=True,
        )
        program.kill()


def _pause(seconds: float, signals: StopSignals, over: Callable[[], bool] = lambda: False) -> None:
    """Wait ``seconds``, or until a second signal or ``over``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not signals.again and not over():
        reap()
        time.sleep(POLL_INTERVAL_S)
