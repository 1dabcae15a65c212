"""The ``train`` process: owns the driver actor, shows its progress, restarts it, and turns its end
into an exit code.
"""

import math
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayloop.actors.failures import brief, is_lost, typed
from rayloop.actors.handles import Handle, create, submit
from rayloop.cluster.driver_actor import DriverActor
from rayloop.cluster.services import actor_name
from rayloop.cluster.session import metrics_ports, session
from rayloop.cluster.stages.evaluate import config_hash
from rayloop.cluster.supervision.watchdog import ASKED, HeadWatch, RayGone, watched
from rayloop.config.settings import dump
from rayloop.core import events, incidents
from rayloop.core.failures import AGAIN, NotSaved, Preempted, RayloopError, Unforeseen, WorkerLost
from rayloop.core.files import needed, write_whole
from rayloop.core.ledger import Ledger
from rayloop.core.signals import STOP, handling, leave_terminal
from rayloop.estimate.memory import with_micro_batch
from rayloop.estimate.shape import read_shape
from rayloop.launch.restarts import Budget, is_restart
from rayloop.run.checkpoint import Origin
from rayloop.run.config import RunConfig
from rayloop.run.demand import bundles, store, total
from rayloop.run.folder import RunFolder, make_folder
from rayloop.run.identity import ResumeRefused, dated, identity, pinned
from rayloop.run.identity import check as check_fit
from rayloop.run.lifetime import RecoverySettings
from rayloop.run.place import STARTED_IN, findable, namespace
from rayloop.run.reporter import failure
from rayloop.view.pictures import draw_or_emit
from rayloop.view.progress import Progress
from rayloop.view.words import describe, sampled

POLL = 0.5
"""Seconds between two looks at the driver."""
CONCURRENCY = 10_000
"""Coroutines of the driver: one per episode in flight, and the calls of the environment actors."""

ANSWER, SILENT, LIVE = 30.0, 10.0, 5.0
"""Seconds for the driver's first and last answer; those after which one that does not answer in
between is reported; and those in which its thread for questions must then show that the process
runs.
"""
Check = Callable[[], None]


class DriverLost(RayloopError):
    """The driver actor died more often than a sixth of ``recovery.replacements`` an hour."""

    exit_code = AGAIN


def train(config: RunConfig, address: str | None, temporary: str | None) -> int:
    """Run to the end, in the cluster at ``address`` or in a private one in ``temporary``.

    Returns 0; raises RayloopError.
    """
    folder = RunFolder(config.output, config.name)
    # Before the folder is made, which would hide that its storage is missing.
    if is_restart():
        folder.begun_before()
    make_folder(folder.path, "output=FOLDER")

    origin = Origin.of(folder.checkpoints.resolve(), config.checkpoint.resume)
    found = origin.find()
    config = with_micro_batch(pinned(config, found))
    then = found.about.get("config", {}).get("model") if found else None
    config = config.model_copy(update={"model": dated(config.model, folder.path, then)})

    with (
        # Signals first, so that one unwinds everything below. ``_recorded`` comes last: it writes
        # its event while the lock is still held.
        _while_idle(lambda: origin.stopped(folder.last_step)) as check,
        folder.acquired(config.checkpoint.resume),
        _shown(config, folder, address) as progress,
        _recorded(folder, origin),
    ):
        hashes = identity(config)
        if (checkpoint := origin.find()) is None:
            folder.write_config(dump(config))
        else:
            check_fit(
                checkpoint, config, hashes
            )  # the driver writes the configuration when it has restored

        with needed(folder.path):
            write_whole(folder.path / STARTED_IN, str(Path.cwd()).encode())

        names = namespace(folder.path)
        room = store(config, read_shape(config.model.path, config.model.revision).parameters)
        started = session(total(bundles(config)), address, temporary, folder.logs, names, room)
        with (
            started,
            findable(folder.cluster, ray.get_runtime_context().gcs_address, names, metrics_ports()),
        ):
            packages = {name: version(name) for name in ("torch", "transformers", "ray")}
            folder.events.emit(
                events.Start(config_hash(config), {"python": platform.python_version(), **packages})
            )
            folder.events.close()  # the driver goes on writing it
            with watched(progress.note) as head:
                result = _run(config, folder, origin, hashes, progress, check, head)
            draw_or_emit(folder, progress.note)
            progress.close(result)
    return 0


@contextmanager
def _recorded(folder: RunFolder, origin: Origin) -> Iterator[None]:
    """Make what ends the run a RayloopError and an event, unless the driver recorded it, or its
    checkpoint refused the start.
    """
    try:
        yield
    except Exception as error:
        end = typed(error)
        # An error that came out of the driver's call was recorded by the driver.
        if not isinstance(error.__cause__, RayTaskError):
            _emit(folder, end, traceback.format_exc() if isinstance(end, Unforeseen) else "")
        if end is error:
            raise
        raise end from error
    except SystemExit as end:
        if end.code == signal.SIGTERM:  # before there was a driver; ``_while_idle`` raises it
            _emit(folder, origin.stopped(folder.last_step))
        elif end.code:  # a second signal
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


def _run(
    config: RunConfig,
    folder: RunFolder,
    origin: Origin,
    hashes: dict[str, str],
    progress: Progress,
    check: Check,
    head: HeadWatch,
) -> dict[str, Any]:
    """Create the driver and follow it; when it dies, create another, which continues from the
    newest checkpoint of this start. ``check`` raises ``Origin.stopped`` when a SIGTERM came while
    there was no driver. Raises RayGone when Ray is.
    """
    path = str(folder.path.resolve())
    budget = Budget(config.recovery.driver_restarts)
    for restarts in count():
        # num_cpus=0: the driver waits most of the time. Its death ends every actor it owns.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {
            "name": actor_name("driver"),
            "num_cpus": 0,
            "max_concurrency": CONCURRENCY,
            "scheduling_strategy": here,
        }
        driver = create(
            DriverActor,
            options,
            config,
            path,
            origin.resume,
            hashes,
            origin.since,
            folder.lock.fence,
        )
        # For an error before the handler is in place: nobody has asked for a stop by then.
        until = _never
        try:
            with _stop_on_signal(driver, progress, config.preemption.grace) as until:
                # A signal may have arrived before its handler was in place.
                check()
                return _follow(driver, progress, config.recovery, until, origin, folder, head)
        except RayGone as gone:
            raise _without_ray(gone, until, origin) from None
        except RayTaskError as error:
            raise typed(error) from error
        except (RayError, WorkerLost) as error:
            if not is_lost(error):
                raise
            try:
                # A lost driver may be the first sign of a lost
                # head, which could not start another one.
                head.decide()
            except RayGone as gone:
                raise _without_ray(gone, until, origin) from error
            lost = folder.events.emit(
                incidents.DriverLostEvent(restarts, brief(error), socket.gethostname())
            )
            folder.events.close()  # the next driver goes on writing it
            progress.note(describe(lost))
            if until() < math.inf:
                raise NotSaved(f"the driver was lost while it saved; {origin.again()}") from error
            if (wait := budget.wait(time.monotonic())) > config.recovery.start_timeout:
                raise DriverLost(
                    f"the driver actor died {restarts + 1} times; a sixth of recovery.replacements"
                    f" allows {budget.per_hour} an hour"
                ) from error
        finally:
            if not head.gone:  # the head and the node end actors
                ray.kill(driver)
        folder.lock.renew()
        time.sleep(wait)
        budget.take(time.monotonic())
    raise AssertionError("the loop has no end")


def _without_ray(error: RayGone, until: Callable[[], float], origin: Origin) -> RayloopError:
    """The end of a run that lost Ray: that error, or NotSaved after a stop was asked for."""
    if until() < math.inf:
        return NotSaved(f"{error}; {origin.again()}")
    error.add_note(origin.again())
    return error


def _never() -> float:
    return math.inf


def _follow(
    driver: Handle[DriverActor],
    progress: Progress,
    recovery: RecoverySettings,
    until: Callable[[], float],
    origin: Origin,
    folder: RunFolder,
    head: HeadWatch,
) -> dict[str, Any]:
    """Show the driver's reports until it ends.

    Returns its result; raises its error, RunTaken, RayGone, WorkerLost when its process gives no
    sign of life for ``health_timeout`` seconds or its loop for ``stall_timeout``, and NotSaved when
    it has not ended at the time ``until`` (``time.monotonic``).
    """
    running, seen, answered, due = submit(driver, DriverActor.main), 0, time.monotonic(), ANSWER
    up, frozen, questions = False, 0.0, 0
    while True:
        folder.lock.check()
        head.check()
        ended, _ = ray.wait([running], timeout=POLL)
        # A driver that has ended still has its last reports, which are worth a longer wait.
        patience = ANSWER if ended else max(POLL, min(SILENT, until() - time.monotonic()))
        try:
            seen, updates, doing = ray.get(
                submit(driver, DriverActor.updates, seen), timeout=patience
            )
            answered, due = time.monotonic(), SILENT
            up, frozen, questions = True, 0.0, 0
        except GetTimeoutError:
            updates, doing = [], "waiting for the driver"
            silent = time.monotonic() - answered
            # A driver that is still being started is no frozen one. What is counted is what was
            # waited: the time that has passed may be that of this process's own stop (Ctrl-Z), and
            # the driver's answers are only late then.
            if up and not _lives(driver, min(LIVE, max(POLL, until() - time.monotonic()))):
                frozen, questions = frozen + patience + LIVE, questions + 1
            else:
                frozen, questions = 0.0, 0
            left = recovery.health_timeout - frozen if frozen else recovery.stall_timeout - silent
            if left <= 0 and (not frozen or questions >= ASKED):
                raise WorkerLost(f"the driver has not answered for {silent:.0f} s") from None
            if silent > due:
                event = incidents.DriverSilent(round(silent, 1), left=round(max(0.0, left), 1))
                progress.note(describe(event.record()))
                write = threading.Thread(
                    target=folder.events.beside, args=(event.record(),), daemon=True
                )
                write.start()  # storage that hangs must not hold up this process too
                due = 2 * silent
        except RayError as error:
            if not is_lost(error):
                raise
            updates, doing = [], ""  # ``running`` raises it
        if not ended and time.monotonic() > until():
            raise NotSaved(
                "the run was not saved within preemption.grace. Raise it (and what the scheduler"
                f" allows) above the time of a step and a checkpoint; {origin.again()}"
            )
        for kind, record in updates:
            if kind == "step":
                progress.step(record)
            elif kind == "samples":
                progress.samples(record)
            elif record["event"] != "failed":  # it is raised below
                progress.note(describe(record))
        progress.doing(doing)
        if ended:
            result: dict[str, Any] = ray.get(running)
            return result


def _lives(driver: Handle[DriverActor], within: float) -> bool:
    """Whether the driver's process runs, even if its loop is held up: an actor has a thread for
    questions (actors/base.py).
    """
    answered, _ = ray.wait([submit(driver, DriverActor.host)], timeout=within)
    return bool(answered)


@contextmanager
def _while_idle(stopped: Callable[[], RayloopError]) -> Iterator[Callable[[], None]]:
    """A SIGTERM, or the SIGHUP of a closed terminal, while there is no driver unwinds, so that the
    private cluster ends too. Yields a function that raises ``stopped()`` after one: a callback may
    swallow the exception of a signal handler, but the wakeup pipe gets every signal.
    """
    seen, written = socket.socketpair()

    def unwind(number: int, frame: Any) -> None:
        leave_terminal()
        sys.exit(signal.SIGTERM)

    with seen, written, handling(unwind, signal.SIGTERM, signal.SIGHUP):
        seen.setblocking(False)
        written.setblocking(False)
        # Only whether a signal came counts, so nothing is lost in a full buffer.
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)

        def check() -> None:
            with suppress(BlockingIOError):
                # Python writes the number of each signal as one byte.
                if {signal.SIGTERM, signal.SIGHUP} & set(seen.recv(4096)):
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
    """The first signal of ``STOP`` asks the driver to save and stop, the second one ends this
    process at once, unless it is a SIGHUP. Yields a function that returns the time
    (``time.monotonic``) at which the driver must have ended: ``grace`` s after a signal.
    """
    until = math.inf

    def stop(number: int, frame: Any) -> None:
        nonlocal until
        until = time.monotonic() + grace
        leave_terminal()
        progress.note(
            f"received {signal.Signals(number).name}: saving, within {grace:g} s; send it again to"
            " stop at once"
        )
        for again in (signal.SIGTERM, signal.SIGINT):
            signal.signal(again, lambda *_: sys.exit(1))
        # A shell that closes sends a second SIGHUP, which does not ask for an end at once.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Not awaited: a handler must return, and ``until`` bounds the wait.
        submit(driver, DriverActor.stop)

    with handling(stop, *STOP):
        yield lambda: until
