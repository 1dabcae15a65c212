"""A pool leases the interchangeable workers of one role, and replaces lost ones.

Serial numbers are never used twice, so a late report about a former worker has no effect. Ray's
``max_restarts`` would only rerun ``__init__``, without ``admit``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError

from rayloop.actors.failures import brief, cause, is_lost, is_spent, last_line, misconfigured
from rayloop.actors.handles import Handle, submit, submit_split
from rayloop.actors.lease import Lease
from rayloop.cluster.supervision.budget import ReplacementBudget, now
from rayloop.cluster.supervision.nodes import Nodes
from rayloop.cluster.supervision.worker import Pooled, Worker
from rayloop.core import incidents
from rayloop.core.deadlines import with_deadline
from rayloop.core.events import Emit
from rayloop.core.failures import AnswerLate, WorkerLost, WorkerStartFailed
from rayloop.core.groups import Ref
from rayloop.rollout.verdict import Seat
from rayloop.run.lifetime import RecoverySettings

A = TypeVar("A", bound=Pooled)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

CALL_ATTEMPTS = 3
"""How often a reward or reference actor is called, and each worker is started at first."""


class Pool(Generic[A]):
    """Workers of one role, actors of class ``A``.

    ``ended``: serial numbers of retired workers, whose other calls are not to blame.
    ``spawn(slot)`` creates an actor; ``admit(handle)`` prepares it for service; ``starting()``
    surrounds each replacement's start. Raises RolesExhausted by ``ReplacementBudget``.
    """

    def __init__(
        self,
        role: str,
        size: int,
        spawn: Callable[[int], Handle[A]],
        settings: RecoverySettings,
        emit: Emit,
        admit: Callable[[Handle[A]], Awaitable[None]] | None = None,
        nodes: Nodes | None = None,
        starting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self.role = role
        self.size = size
        self.settings = settings
        self.workers: dict[int, Worker[A]] = {}
        self.replaced = 0
        self.ended: set[int] = set()
        self.budget = ReplacementBudget(role, size, settings)
        self._spawn = spawn
        self._admit = admit
        self._emit = emit
        self._nodes = nodes
        self._starting = starting
        self._misses: dict[int, int] = {}
        self._homes: dict[int, str] = {}
        self._leases = 0
        if nodes is not None:
            nodes.add(self._evict, role)
        self._serial = 0
        self._changed = asyncio.Event()
        self._replacing: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Start all workers.

        Raises ConfigError when a constructor does, WorkerStartFailed for another error of a
        constructor, and WorkerLost when a worker does not answer in time.
        """
        await asyncio.gather(*(self._first(slot) for slot in range(self.size)))

    async def _first(self, slot: int) -> None:
        """Start a worker, up to ``CALL_ATTEMPTS`` times when it dies or cannot be reached."""
        for tries_left in reversed(range(CALL_ATTEMPTS)):
            worker = None
            try:
                worker = self._new_worker(slot)
                return await self._start(worker)
            except WorkerStartFailed as error:
                # A replacement has no such case: the same configuration has started
                # this worker before, so the machine must have changed since.
                reason = error.__cause__
                config_error = None if reason is None else misconfigured(reason)
                if config_error is not None:
                    raise config_error from error
                raise
            except Exception as error:
                # WorkerLost is a start that took too long:
                # another try would cost ``start_timeout`` again.
                if not tries_left or not is_lost(error) or isinstance(error, WorkerLost):
                    raise
                serial = self._serial if worker is None else worker.serial
                node = self._where(worker)
                self._emit(incidents.ReplacementFailed(self.role, serial, brief(error), node))

    def _new_worker(self, slot: int) -> Worker[A]:
        self._serial += 1
        # A new worker inherits the misses of its slot, so that a slot that keeps failing is
        # chosen last.
        return Worker(self._serial, slot, self._spawn(slot), misses=self._misses.pop(slot, 0))

    def _where(self, worker: Worker[A] | None) -> str:
        """The name of its node; "" when unknown."""
        return "" if self._nodes is None or worker is None else self._nodes.name(worker.node)

    async def _start(self, worker: Worker[A]) -> None:
        try:
            healthy = submit(worker.handle, Pooled.health)
            what = f"start of {self.role} {worker.slot}"
            timeout = self.settings.start_timeout
            await with_deadline(timeout, healthy, what, worker.handle, starts=True)
            if self._nodes is not None:
                worker.node = await self._nodes.locate(worker.handle, self.role)
            # Last, so that a later weight sync finds the worker in the pool.
            if self._admit is not None:
                await self._admit(worker.handle)
        except BaseException as error:
            # Also when cancelled: an actor in no pool would keep its CPUs and GPUs.
            ray.kill(worker.handle)
            if self._nodes is not None:
                self._nodes.left(worker.node, self.role)
            if isinstance(error, RayActorError) and not is_lost(error):
                raise WorkerStartFailed(
                    f"an actor of role {self.role} did not start: {last_line(error)}"
                ) from error
            raise

        self.workers[worker.serial] = worker
        self._homes[worker.slot] = worker.node
        self.budget.served(worker.slot)
        self._changed.set()

    async def lease(
        self, affinity: str = "", avoid: Collection[int] = (), count: int = 1
    ) -> Lease[A]:
        """Lease the worker that already serves this affinity, or the least loaded one.

        A failure weighs as much as a lease. If possible, the worker is not on a node of the slots
        to ``avoid``. Waits for a replacement; raises RolesExhausted, or WorkerLost when none comes.
        """
        await self._wait_for_worker()
        worker = self._best_worker(affinity, avoid)
        self._leases += 1
        worker.leases += count
        worker.leased = self._leases
        if affinity:
            worker.affinities[affinity] += count
        return Lease(worker.serial, worker.handle, worker.slot, worker.node)

    async def _wait_for_worker(self) -> None:
        """Wait until a worker is in service. Raises the failure of a replacement, or WorkerLost."""
        while not self.workers:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            try:
                what = f"a replacement for the {self.role} role"
                await with_deadline(self.settings.start_timeout, self._changed.wait(), what)
            except WorkerLost:
                # A replacement under way has its own deadlines, and the wait continues with it.
                if not self._replacing:
                    raise

    def _best_worker(self, affinity: str, avoid: Collection[int]) -> Worker[A]:
        """The worker for the next lease (``lease``)."""
        workers = list(self.workers.values())
        avoided_nodes = {self._homes.get(slot) for slot in avoid}
        in_other_slots = [worker for worker in workers if worker.slot not in avoid]
        on_other_nodes = [worker for worker in in_other_slots if worker.node not in avoided_nodes]
        candidates = on_other_nodes or in_other_slots or workers
        if affinity:
            serving = [worker for worker in candidates if worker.affinities[affinity]]
            candidates = serving or candidates
        # Ties go to the worker whose last lease is the oldest, so that all of them are used.
        return min(
            candidates,
            key=lambda worker: (worker.leases + worker.misses, worker.leased, worker.serial),
        )

    @property
    def homes(self) -> set[str]:
        """The nodes of its slots; of a slot that waits for a replacement, the last one."""
        return set(self._homes.values())

    def place(self, lease: Seat) -> int | str:
        """The place to which failures of a lease are counted.

        The node when the pool is on several nodes, else the slot.
        """
        return lease.node if len(self.homes) > 1 else lease.slot

    def name(self, lease: Seat) -> str:
        """The role and slot of the leased worker."""
        worker = self.workers.get(lease.worker)
        return f"{self.role} {worker.slot if worker else '(replaced)'}"

    def node_name(self, lease: Seat) -> str:
        """The host name and address of the lease's node; "" when unknown."""
        return "" if self._nodes is None else self._nodes.name(lease.node)

    def release(
        self, serial: int, affinity: str = "", well: bool | None = None, count: int = 1
    ) -> None:
        """End a lease, or a part of it.

        ``well``: whether the worker did its work; None if unknown.
        """
        worker = self.workers.get(serial)
        if worker is None:
            return
        worker.leases -= count
        if well is not None:
            worker.misses = 0 if well else worker.misses + 1
        worker.affinities[affinity] -= count
        if worker.affinities[affinity] <= 0:
            del worker.affinities[affinity]

    def lost(
        self, serial: int, why: object, charged: bool = True, spares_others: bool = False
    ) -> None:
        """Replace a lost or sick worker in the background. Idempotent.

        ``charged``: it costs one of ``recovery.replacements``; ``spares_others``: this run ends it,
        so that its other calls are not to blame for their loss.
        """
        if spares_others:
            self.ended.add(serial)
        self._end(serial, why, charged)

    def _evict(self, node: str, why: str) -> list[int]:
        """Replace all workers on a lost node, which the event ``node_lost`` records.

        Returns their serial numbers.
        """
        serials = [serial for serial, worker in self.workers.items() if worker.node == node]
        for serial in serials:
            self._end(serial, why, charged=False, recorded=True)
        return serials

    def _end(self, serial: int, why: object, charged: bool, recorded: bool = False) -> None:
        worker = self.workers.pop(serial, None)
        if worker is None:
            return
        self._misses[worker.slot] = worker.misses
        # A worker that only hangs would hold the CPUs and GPUs of its replacement.
        ray.kill(worker.handle)
        self.budget.lost(worker.slot, why)
        if not recorded:
            self._emit(incidents.WorkerLostEvent(self.role, serial, str(why), self._where(worker)))
        task = asyncio.get_running_loop().create_task(self._replace(worker, charged))
        # asyncio keeps weak references to tasks: without
        # the set one may be collected before it ends.
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, worker: Worker[A], charged: bool) -> None:
        began = now()
        try:
            # Whether the node is lost may take long to find
            # out; the role is not given up during that time.
            with self.budget.trying(worker.slot):
                charged = await self._costs(worker, charged)
            replacement = await self._try(worker, charged)
            while replacement is None:
                # Each further start is charged.
                replacement = await self._try(worker, charged=True)
        except Exception as error:
            # Nobody awaits this task: the next lease or health check raises its failure.
            self._failure = cause(error)
            self._changed.set()
            return
        seconds = round(now() - began, 3)
        node = self._where(replacement)
        self._emit(incidents.WorkerReplaced(self.role, worker.serial, seconds, node))

    async def _costs(self, worker: Worker[A], charged: bool) -> bool:
        """Whether a worker's replacement is charged.

        Waits until it is known whether the worker's node is lost.
        """
        if self._nodes is None:
            return charged
        if await self._nodes.lost(worker.node):
            return self._nodes.charge(worker.node)
        self._nodes.left(worker.node, self.role)
        if charged:
            self._nodes.failed(worker.node)
        return charged

    async def _try(self, former: Worker[A], charged: bool) -> Worker[A] | None:
        """The replacement, when it serves. Raises RolesExhausted."""
        if charged:
            await self.budget.afford(former.slot)
        self.replaced += 1

        worker = None
        try:
            async with self._starting():
                with self.budget.trying(former.slot):
                    worker = self._new_worker(former.slot)
                    await self._start(worker)
        except Exception as error:
            if not (is_lost(error) or isinstance(error, WorkerStartFailed)):
                raise
            reason = str(error)
            self.budget.why = reason
            node = self._where(worker)
            self._emit(incidents.ReplacementFailed(self.role, former.serial, reason, node))
            # An actor that Ray could not place did not fail on a node.
            placed = not isinstance(cause(error), ActorUnschedulableError)
            if placed and worker is not None and self._nodes is not None:
                self._nodes.failed(worker.node or former.node)
            return None
        return worker

    async def check(self) -> list[Any]:
        """The health of every worker. Workers that do not answer are replaced.

        Raises the failure of a replacement.
        """
        calls = [(worker, submit(worker.handle, Pooled.health)) for worker in self.workers.values()]
        # Health checks are not progress: counted, they would keep the watchdog from seeing a stall.
        answers = await self.answers("health", calls, self.settings.health_timeout, counts=False)
        if self._failure is not None:
            raise self._failure
        return answers

    async def answers(
        self,
        method: str,
        calls: Sequence[tuple[Worker[A], Ref[R]]],
        deadline: float,
        *,
        counts: bool = True,
        spares: bool = False,
    ) -> list[R]:
        """The answers of these workers. Lost workers are left out and replaced.

        Raises the first failure, when all calls have ended. ``spares``: a late call raises
        AnswerLate; it may still be answered.
        """

        async def answer_of(worker: Worker[A], answer: Ref[R]) -> list[R]:
            what = f"{method} of {self.role} {worker.slot}"
            try:
                return [await with_deadline(deadline, answer, what, worker.handle, counts=counts)]
            except Exception as error:
                if not is_lost(error) or (spares and isinstance(error, AnswerLate)):
                    raise
                self.lost(worker.serial, error)
                return []

        results = await asyncio.gather(
            *(answer_of(worker, answer) for worker, answer in calls), return_exceptions=True
        )
        answers: list[R] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            answers += result
        return answers

    def stop(self) -> None:
        """End all workers and replacements under way."""
        # First, or a replacement would start an actor after the others have ended.
        for task in self._replacing:
            task.cancel()
        for worker in self.workers.values():
            ray.kill(worker.handle)
        self.workers.clear()


@dataclass(frozen=True)
class Calls(Generic[A]):
    """Calls of a pool's workers, of ``attempts`` of ``deadline`` seconds each.

    ``avoid``: slots whose workers are not called; the slots of workers that were lost or unable are
    added. ``unable``: whether an answer shows that something around the worker failed. ``spares``:
    ``everywhere`` raises AnswerLate for late workers, and does not replace them.
    """

    pool: Pool[A]
    deadline: float
    attempts: int = 1
    unable: Callable[[Any], bool] | None = None
    avoid: set[int] = field(default_factory=set)
    spares: bool = False

    async def call(
        self,
        method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a method of some worker, up to ``attempts`` times.

        Raises its error, or WorkerLost after the last attempt.
        """

        def begin(handle: Handle[A]) -> tuple[Ref[R]]:
            return (submit(handle, method, *args, **kwargs),)

        value, _ = await self._attempt(method.__name__, begin)
        return value

    async def split(
        self,
        returns: int,
        method: Callable[Concatenate[A, P], Coroutine[Any, Any, tuple[R, *tuple[S, ...]]]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[R, Sequence[Ref[S]]]:
        """Call a method with ``returns`` values, as ``call`` does.

        Returns the first value, and references to the others, which the caller owns.
        """

        def begin(handle: Handle[A]) -> tuple[Ref[R], *tuple[Ref[S], ...]]:
            return submit_split(handle, returns, method, *args, **kwargs)

        return await self._attempt(method.__name__, begin)

    async def everywhere(
        self,
        method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call a method of every worker in service.

        Returns the answers of the workers that were not lost, or raises the first failure.
        """
        calls = [
            (worker, submit(worker.handle, method, *args, **kwargs))
            for worker in self.pool.workers.values()
        ]
        return await self.pool.answers(method.__name__, calls, self.deadline, spares=self.spares)

    async def _attempt(
        self, method: str, begin: Callable[[Handle[A]], tuple[Ref[R], *tuple[Ref[S], ...]]]
    ) -> tuple[R, Sequence[Ref[S]]]:
        pool = self.pool
        error: Exception | None = None
        for _ in range(self.attempts):
            lease = await pool.lease(avoid=self.avoid)
            well = None
            try:
                answer, *further = begin(lease.handle)
                what = f"{method} of {pool.name(lease)}"
                value = await with_deadline(self.deadline, answer, what, lease.handle)
                if self.unable is not None:
                    well = not self.unable(value)
                    if not well:
                        self.avoid.add(lease.slot)
                return value, further
            except Exception as caught:
                if not is_lost(caught):
                    raise
                error = caught
                self.avoid.add(lease.slot)
                # An actor that asks to be replaced costs nothing of the budget.
                if is_spent(caught):
                    pool.lost(lease.worker, brief(caught), charged=False, spares_others=True)
                else:
                    pool.lost(lease.worker, caught)
            finally:
                pool.release(lease.worker, well=well)
        raise WorkerLost(
            f"{pool.role}.{method} failed {self.attempts} times, last: {error}"
        ) from error
