"""The ``train`` process, which owns the driver actor.

It shows the driver's progress, restarts it, and turns its end into an exit code.
"""

import math
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayloop.actors.failures import brief, is_lost, typed
from rayloop.actors.handles import Handle, create, submit
from rayloop.cluster.driver_actor import DriverActor
from rayloop.cluster.services import actor_name
from rayloop.cluster.session import metrics_ports, session
from rayloop.cluster.stages.evaluate import config_hash
from rayloop.cluster.stages.following import Following
from rayloop.cluster.supervision.watchdog import HeadWatch, RayDead, watched
from rayloop.config.settings import dump
from rayloop.core import events, incidents
from rayloop.core.failures import (
    START_AGAIN_EXIT_CODE,
    NotSaved,
    Preempted,
    RayloopError,
    Unforeseen,
    WorkerLost,
)
from rayloop.core.files import needed, write_whole
from rayloop.core.ledger import Ledger
from rayloop.estimate.memory import with_micro_batch
from rayloop.launch.restarts import Budget, is_restart
from rayloop.launch.signals import STOP, handling, leave_terminal
from rayloop.run.config import RunConfig
from rayloop.run.demand import bundles, total
from rayloop.run.folder import RunFolder, make_folder
from rayloop.run.identity import ResumeRefused
from rayloop.run.identity import check as check_fit
from rayloop.run.origin import Origin
from rayloop.run.place import STARTED_IN, findable, namespace
from rayloop.run.preflight import Prepared, doubtful_settings
from rayloop.run.protocols.conditions import held_out_protocol
from rayloop.run.reporter import failure
from rayloop.view.formatting import describe, sampled
from rayloop.view.pictures import draw_or_emit
from rayloop.view.progress import Progress

DRIVER_COROUTINES = 10_000
"""Coroutines of the driver: one per episode in flight, and the calls of the environment actors."""

Check = Callable[[], None]


class DriverLost(RayloopError):
    """The driver actor died more often than a sixth of ``recovery.replacements`` an hour."""

    exit_code = START_AGAIN_EXIT_CODE


def train(prepared: Prepared, address: str | None, temporary: str | None) -> int:
    """Run to the end, in the cluster at ``address`` or in a private one in ``temporary``.

    Returns 0; raises RayloopError.
    """
    config = prepared.config
    folder = RunFolder.at(config.folder)
    # Before the folder is made, which would hide that its storage is missing.
    if is_restart():
        folder.begun_before()
    make_folder(folder.path, "output=FOLDER")

    origin = Origin.of(folder.checkpoints.resolve(), config.checkpoint.resume)
    prepared = with_micro_batch(prepared.begun(folder.path, origin.find()))
    config = prepared.config

    with (
        # Signals first, so that one unwinds everything below. ``_recorded`` comes last: it writes
        # its event while the lock is still held.
        _while_idle(lambda: origin.stopped(folder.last_step)) as check,
        folder.acquired(config.checkpoint.resume),
        _shown(config, folder, address) as progress,
        _recorded(folder, origin),
    ):
        hashes = prepared.identity
        # Another start may have saved one before this one had the lock.
        checkpoint = origin.find()
        if checkpoint is None:
            folder.write_config(dump(config))
        else:
            # The driver writes the configuration when it has restored.
            check_fit(checkpoint, config, hashes)

        with needed(folder.path):
            write_whole(folder.path / STARTED_IN, str(Path.cwd()).encode())

        names = namespace(folder.path)
        room = prepared.store
        started = session(total(bundles(config)), address, temporary, folder.logs, names, room)
        with started, _findable(folder, names):
            start = events.Start(config_hash(config), _versions(), held_out_protocol(prepared))
            folder.events.emit(start)
            # The driver continues writing the events.
            folder.events.close()
            with watched(progress.note) as head:
                attempts = DriverAttempts(prepared, folder, origin, progress, head)
                result = attempts.run(check)
            draw_or_emit(folder, progress.note)
            progress.close(result)
    return 0


@contextmanager
def _recorded(folder: RunFolder, origin: Origin) -> Iterator[None]:
    """Make the error that ends the run a RayloopError and an event.

    Unless the driver recorded it, or its checkpoint refused the start.
    """
    try:
        yield
    except Exception as error:
        end = typed(error)
        # An error that came out of the driver's call was recorded by the driver.
        if not isinstance(error.__cause__, RayTaskError):
            trace = traceback.format_exc() if isinstance(end, Unforeseen) else ""
            _emit(folder, end, trace)
        if end is error:
            raise
        raise end from error
    except SystemExit as end:
        if end.code == signal.SIGTERM:
            # ``_while_idle`` raises it before there is a driver.
            _emit(folder, origin.stopped(folder.last_step))
        elif end.code:
            # The second signal.
            at_once = NotSaved(f"stopped at once, by a second signal; {origin.again()}")
            _emit(folder, at_once)
            raise at_once from None
        raise


def _emit(folder: RunFolder, end: RayloopError, trace: str = "") -> None:
    if not isinstance(end, Preempted | ResumeRefused):
        with suppress(OSError):
            folder.events.emit(failure(end, Ledger().counts(), trace))


@contextmanager
def _shown(config: RunConfig, folder: RunFolder, address: str | None) -> Iterator[Progress]:
    """The console of a run; it shows the run folder before Ray starts, which takes a while."""
    sampling = config.rollout.sampling
    held_out = config.in_evaluation.rollout.sampling.sampling(greedy=config.evaluation.greedy)
    with Progress(
        config.steps, sampled(sampling.temperature), sampled(held_out.temperature)
    ) as progress:
        progress.note(f"run folder {folder.path}; live: python -m rayloop console {folder.path}")
        progress.note(f"joining Ray at {address}" if address else "starting Ray on this machine")
        yield progress


def _findable(folder: RunFolder, names: str) -> AbstractContextManager[None]:
    """Let other commands find the run's cluster during the block."""
    address = ray.get_runtime_context().gcs_address
    return findable(folder.cluster, address, names, metrics_ports())


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "ray"):
        versions[package] = version(package)
    return versions


@dataclass
class DriverAttempts:
    """Creates the driver and follows it.

    When it dies, another driver continues from the newest checkpoint of this start.
    """

    prepared: Prepared
    folder: RunFolder
    origin: Origin
    progress: Progress
    head: HeadWatch

    def __post_init__(self) -> None:
        self.config = self.prepared.config
        self._budget = Budget(self.config.recovery.driver_restarts)

    def run(self, check: Check) -> dict[str, Any]:
        """Return the result of the driver that reaches the end.

        ``check`` raises ``Origin.stopped`` when a SIGTERM came while there was no driver. Raises
        RayDead when Ray has ended.
        """
        for restarts in count():
            driver = self._create()
            # For an error before the handler is in place: nobody has asked for a stop by then.
            until = _never
            try:
                with _stop_on_signal(driver, self.progress, self.config.preemption.grace) as until:
                    # A signal may have arrived before its handler was in place.
                    check()
                    following = Following(
                        driver,
                        self.progress,
                        self.config.recovery,
                        until,
                        self.origin,
                        self.folder,
                        self.head,
                    )
                    return following.follow()
            except RayDead as error:
                raise _without_ray(error, until, self.origin) from None
            except RayTaskError as error:
                raise typed(error) from error
            except (RayError, WorkerLost) as error:
                if not is_lost(error):
                    raise
                wait = self._wait_after_loss(error, restarts, until)
            finally:
                # The head and the node end the actors themselves.
                if not self.head.death:
                    ray.kill(driver)
            self.folder.lock.renew()
            time.sleep(wait)
            self._budget.take(time.monotonic())
        raise AssertionError("the loop has no end")

    def _create(self) -> Handle[DriverActor]:
        # num_cpus=0: the driver waits most of the time. Its death ends every actor it owns.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {
            "name": actor_name("driver"),
            "num_cpus": 0,
            "max_concurrency": DRIVER_COROUTINES,
            "scheduling_strategy": here,
        }
        return create(
            DriverActor,
            options,
            self.config,
            str(self.folder.path.resolve()),
            self.origin.resume,
            self.prepared.identity,
            self.origin.since,
            self.folder.lock.fence,
            doubtful_settings(self.prepared),
        )

    def _wait_after_loss(
        self, error: Exception, restarts: int, until: Callable[[], float]
    ) -> float:
        """Seconds until another driver may be created.

        Raises RayDead, NotSaved after a stop was asked for, and DriverLost.
        """
        try:
            # A lost driver may be the first sign of a lost
            # head, which could not start another one.
            self.head.decide()
        except RayDead as ray_error:
            raise _without_ray(ray_error, until, self.origin) from error
        event = incidents.DriverLostEvent(restarts, brief(error), socket.gethostname())
        record = self.folder.events.emit(event)
        # The next driver continues writing the events.
        self.folder.events.close()
        self.progress.note(describe(record))
        if until() < math.inf:
            resume = self.origin.again()
            raise NotSaved(f"the driver was lost while it saved; {resume}") from error
        wait = self._budget.wait(time.monotonic())
        if wait > self.config.recovery.start_timeout:
            raise DriverLost(
                f"the driver actor died {restarts + 1} times; a sixth of recovery.replacements"
                f" allows {self._budget.per_hour} an hour"
            ) from error
        return wait


def _without_ray(error: RayDead, until: Callable[[], float], origin: Origin) -> RayloopError:
    """The end of a run that lost Ray: that error, or NotSaved after a stop was asked for."""
    if until() < math.inf:
        return NotSaved(f"{error}; {origin.again()}")
    error.add_note(origin.again())
    return error


def _never() -> float:
    return math.inf


@contextmanager
def _while_idle(stopped: Callable[[], RayloopError]) -> Iterator[Callable[[], None]]:
    """Unwind at a SIGTERM, or the SIGHUP of a closed terminal, while there is no driver.

    The private cluster ends too then. Yields a function that raises ``stopped()`` after a signal: a
    callback may swallow the exception of a signal handler, but the wakeup pipe gets every signal.
    """
    reader, writer = socket.socketpair()

    def unwind(number: int, frame: Any) -> None:
        leave_terminal()
        sys.exit(signal.SIGTERM)

    with reader, writer, handling(unwind, signal.SIGTERM, signal.SIGHUP):
        reader.setblocking(False)
        writer.setblocking(False)
        # Only whether a signal came counts, so nothing is lost in a full buffer.
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

        def check() -> None:
            with suppress(BlockingIOError):
                # Python writes the number of each signal as one byte.
                if {signal.SIGTERM, signal.SIGHUP} & set(reader.recv(4096)):
                    raise stopped()

        try:
            yield check
        except SystemExit as end:
            if end.code == signal.SIGTERM:
                check()
            raise
        finally:
            signal.set_wakeup_fd(-1)


@contextmanager
def _stop_on_signal(
    driver: Handle[DriverActor], progress: Progress, grace: float
) -> Iterator[Callable[[], float]]:
    """Ask the driver to save and stop at the first signal of ``STOP``.

    The second signal ends this process at once, unless it is a SIGHUP. Yields a function that
    returns the time (``time.monotonic``) at which the driver must have ended: ``grace`` s after a
    signal.
    """
    until = math.inf

    def stop(number: int, frame: Any) -> None:
        nonlocal until
        until = time.monotonic() + grace
        leave_terminal()
        name = signal.Signals(number).name
        progress.note(f"received {name}: saving, within {grace:g} s; send it again to stop at once")
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, lambda *_: sys.exit(1))
        # A shell that closes sends a second SIGHUP, which does not ask for an end at once.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Not awaited: a handler must return, and ``until`` bounds the wait.
        submit(driver, DriverActor.stop)

    with handling(stop, *STOP):
        yield lambda: until
