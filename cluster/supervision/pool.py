"""A pool leases the interchangeable workers of one role, and replaces one that is gone.

Serial numbers are never used twice, so a late report about a former worker has no effect. Ray's
``max_restarts`` would only rerun ``__init__``, without ``admit``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError

from rayloop.actors.failures import brief, cause, is_lost, is_spent, last_line, misconfigured
from rayloop.actors.handles import Handle, submit, submit_split
from rayloop.actors.lease import Lease
from rayloop.cluster.supervision.budget import ReplacementBudget, now
from rayloop.cluster.supervision.nodes import Nodes
from rayloop.core import incidents
from rayloop.core.deadlines import with_deadline
from rayloop.core.events import Emit
from rayloop.core.failures import AnswerLate, WorkerLost, WorkerStartFailed
from rayloop.core.types import Ref
from rayloop.run.lifetime import RecoverySettings


class Pooled(Protocol):
    """The methods of every actor of a pool."""

    def health(self) -> Any:
        """Its load, for the driver's metrics. An answer shows that the actor works."""


A = TypeVar("A", bound=Pooled)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

ATTEMPTS = 3
"""Workers that may be lost with one call of a reward or reference actor, and times that each worker
is started at first.
"""


@dataclass
class Worker(Generic[A]):
    """An actor in service.

    ``misses``: its slot's failures since a success; ``leased``: the number of its last lease.
    """

    serial: int
    slot: int
    handle: Handle[A]
    leases: int = 0
    misses: int = 0
    leased: int = 0
    node: str = ""
    affinities: Counter[str] = field(default_factory=Counter)


class Pool(Generic[A]):
    """Workers of one role, actors of class ``A``.

    ``ended``: serial numbers of those retired, whose other calls are not to blame. ``spawn(slot)``
    creates an actor; ``admit(handle)`` prepares it for service; ``starting()`` surrounds each
    replacement's start. Raises RolesExhausted by ``ReplacementBudget``.
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
        self.role, self.size, self.settings = role, size, settings
        self.workers: dict[int, Worker[A]] = {}
        self.replaced = 0
        self.ended: set[int] = set()
        self.budget = ReplacementBudget(role, size, settings)
        self._misses: dict[int, int] = {}
        self._homes: dict[int, str] = {}
        self._leases = 0
        self._spawn, self._admit, self._emit, self._nodes, self._starting = (
            spawn,
            admit,
            emit,
            nodes,
            starting,
        )
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
        """Start a worker, up to ``ATTEMPTS`` times when it dies or cannot be reached."""
        for left in reversed(range(ATTEMPTS)):
            worker = None
            try:
                worker = self._made(slot)
                return await self._start(worker)
            except WorkerStartFailed as error:
                # A replacement has no such case: the same configuration has started
                # this worker before, so the machine must have changed since.
                below = error.__cause__
                if below is not None and (wrong := misconfigured(below)) is not None:
                    raise wrong from error
                raise
            except Exception as error:
                # WorkerLost is a start that took too long:
                # another try would cost ``start_timeout`` again.
                if not left or not is_lost(error) or isinstance(error, WorkerLost):
                    raise
                serial = self._serial if worker is None else worker.serial
                self._emit(
                    incidents.ReplacementFailed(
                        self.role, serial, brief(error), self._where(worker)
                    )
                )

    def _made(self, slot: int) -> Worker[A]:
        self._serial += 1
        # The slot passes its failures on, so that one which keeps failing is chosen last.
        return Worker(self._serial, slot, self._spawn(slot), misses=self._misses.pop(slot, 0))

    def _where(self, worker: Worker[A] | None) -> str:
        """The name of its node; "" when unknown."""
        return "" if self._nodes is None or worker is None else self._nodes.name(worker.node)

    async def _start(self, worker: Worker[A]) -> None:
        try:
            healthy, what = (
                submit(worker.handle, Pooled.health),
                f"start of {self.role} {worker.slot}",
            )
            await with_deadline(
                self.settings.start_timeout, healthy, what, worker.handle, starts=True
            )
            if self._nodes is not None:
                worker.node = await self._nodes.locate(worker.handle, self.role)
            if self._admit is not None:
                await self._admit(
                    worker.handle
                )  # last: a later weight sync finds it among the workers
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
        """The worker that already serves this affinity, or the least loaded one (a failure weighs
        as much as a lease), if possible on no node of the slots to ``avoid``. Waits for a
        replacement; raises RolesExhausted, or WorkerLost when none comes.
        """
        while not self.workers:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            try:
                await with_deadline(
                    self.settings.start_timeout,
                    self._changed.wait(),
                    f"a replacement for the {self.role} role",
                )
            except WorkerLost:
                # A replacement under way has deadlines of its own, and the wait goes on with it.
                if not self._replacing:
                    raise

        others = [w for w in self.workers.values() if w.slot not in avoid]
        nodes = {self._homes.get(slot) for slot in avoid}
        among = [w for w in others if w.node not in nodes] or others or list(self.workers.values())
        known = [w for w in among if affinity and w.affinities[affinity]]
        # Ties go to the worker whose last lease is the oldest, so that all of them are used.
        worker = min(known or among, key=lambda w: (w.leases + w.misses, w.leased, w.serial))

        self._leases += 1
        worker.leases, worker.leased = worker.leases + count, self._leases
        if affinity:
            worker.affinities[affinity] += count
        return Lease(worker.serial, worker.handle, worker.slot, worker.node)

    @property
    def homes(self) -> set[str]:
        """The nodes of its slots; of a slot that waits for a replacement, the last one."""
        return set(self._homes.values())

    def place(self, lease: Lease[A]) -> int | str:
        """The place to which failures of a lease are counted: the node when the pool is on several,
        else the slot.
        """
        return lease.node if len(self.homes) > 1 else lease.slot

    def name(self, lease: Lease[A]) -> str:
        """The role and slot of the leased worker."""
        worker = self.workers.get(lease.worker)
        return f"{self.role} {worker.slot if worker else '(replaced)'}"

    def release(
        self, serial: int, affinity: str = "", well: bool | None = None, count: int = 1
    ) -> None:
        """End a lease, or a part of it.

        ``well``: whether the worker did its work; None if unknown.
        """
        if (worker := self.workers.get(serial)) is not None:
            worker.leases -= count
            if well is not None:
                worker.misses = 0 if well else worker.misses + 1
            worker.affinities[affinity] -= count
            if worker.affinities[affinity] <= 0:
                del worker.affinities[affinity]

    def lost(self, serial: int, why: object) -> None:
        """Replace a lost or sick worker in the background, at the cost of one of
        ``recovery.replacements``. Idempotent.
        """
        self._end(serial, why, charged=True)

    def retire(self, serial: int, why: object, charged: bool = False) -> None:
        """Replace a worker that holds a call that hangs, or fails at every task; costs a
        replacement only when ``charged``.
        """
        self.ended.add(serial)
        self._end(serial, why, charged)

    def _evict(self, node: str, why: str) -> list[int]:
        """Replace all workers on a lost node, which the event ``node_lost`` records.

        Returns their serial numbers.
        """
        gone = [serial for serial, worker in self.workers.items() if worker.node == node]
        for serial in gone:
            self._end(serial, why, charged=False, recorded=True)
        return gone

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
        began, slot, serial = now(), worker.slot, worker.serial
        try:
            # Whether the node is lost may take long to
            # find out; the role is not given up meanwhile.
            with self.budget.trying(slot):
                charged = await self._costs(worker, charged)
            while (made := await self._try(worker, charged)) is None:
                charged = True  # each further start is charged
        except Exception as error:
            # Nobody awaits this task: the next lease or health check raises its failure.
            self._failure = cause(error)
            self._changed.set()
            return
        self._emit(
            incidents.WorkerReplaced(self.role, serial, round(now() - began, 3), self._where(made))
        )

    async def _costs(self, worker: Worker[A], charged: bool) -> bool:
        """Whether its replacement is charged; waits until it is known whether its node is lost."""
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
        slot, serial = former.slot, former.serial
        if charged:
            await self.budget.afford(slot)
        self.replaced += 1

        worker = None
        try:
            async with self._starting():
                with self.budget.trying(slot):
                    worker = self._made(slot)
                    await self._start(worker)
        except Exception as error:
            if not (is_lost(error) or isinstance(error, WorkerStartFailed)):
                raise
            self.budget.why = str(error)
            self._emit(
                incidents.ReplacementFailed(self.role, serial, str(error), self._where(worker))
            )
            # What Ray could not place failed on no node.
            placed = not isinstance(cause(error), ActorUnschedulableError)
            if placed and worker is not None and self._nodes is not None:
                self._nodes.failed(worker.node or former.node)
            return None
        return worker

    def within(
        self,
        deadline: float,
        attempts: int = 1,
        unable: Callable[[Any], bool] | None = None,
        avoid: set[int] | None = None,
        spares: bool = False,
    ) -> Calls[A]:
        """The options of a call: ``attempts`` of ``deadline`` seconds each, on workers of slots not
        in ``avoid``, to which those that were lost or unable are added. ``unable``: whether an
        answer shows that something around the worker failed. ``spares``: ``everywhere`` raises
        AnswerLate for workers that are late, and does not replace them.
        """
        return Calls(self, deadline, attempts, unable, set() if avoid is None else avoid, spares)

    async def check(self) -> list[Any]:
        """The health of every worker; replaces those that do not answer.

        Raises the failure of a replacement.
        """
        healthy = [
            (worker, submit(worker.handle, Pooled.health)) for worker in self.workers.values()
        ]
        # Health checks are not progress: counted, they would keep the watchdog from seeing a stall.
        answers = await self.answers("health", healthy, self.settings.health_timeout, counts=False)
        if self._failure is not None:
            raise self._failure
        return answers

    async def answers(
        self,
        method: str,
        asked: Sequence[tuple[Worker[A], Ref[R]]],
        deadline: float,
        *,
        counts: bool = True,
        spares: bool = False,
    ) -> list[R]:
        """The answers of these workers, without those lost, which are replaced.

        Raises the first failure, when all have ended. ``spares``: a call that is late raises
        AnswerLate; it may still be answered.
        """

        async def one(worker: Worker[A], answer: Ref[R]) -> list[R]:
            what = f"{method} of {self.role} {worker.slot}"
            try:
                return [await with_deadline(deadline, answer, what, worker.handle, counts=counts)]
            except Exception as error:
                if not is_lost(error) or (spares and isinstance(error, AnswerLate)):
                    raise
                self.lost(worker.serial, error)
                return []

        ends = await asyncio.gather(*(one(*each) for each in asked), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return [answer for end in ends if not isinstance(end, BaseException) for answer in end]

    def stop(self) -> None:
        """End all workers and replacements under way."""
        # First, or a replacement would start an actor after the others have ended.
        for task in self._replacing:
            task.cancel()
        for worker in self.workers.values():
            ray.kill(worker.handle)
        self.workers.clear()


@dataclass(frozen=True, slots=True)
class Calls(Generic[A]):
    """Calls of a pool's workers with the options of ``Pool.within``."""

    pool: Pool[A]
    deadline: float
    attempts: int
    unable: Callable[[Any], bool] | None
    avoid: set[int]
    spares: bool

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
        """``call`` of a method with ``returns`` values: the first, and references to the others,
        which the caller owns.
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

        Returns the answers of those not lost, or raises the first failure.
        """
        asked = [
            (worker, submit(worker.handle, method, *args, **kwargs))
            for worker in self.pool.workers.values()
        ]
        return await self.pool.answers(method.__name__, asked, self.deadline, spares=self.spares)

    async def _attempt(
        self, method: str, begin: Callable[[Handle[A]], tuple[Ref[R], *tuple[Ref[S], ...]]]
    ) -> tuple[R, Sequence[Ref[S]]]:
        pool, error = self.pool, None
        for _ in range(self.attempts):
            lease = await pool.lease(avoid=self.avoid)
            well = None
            try:
                answer, *others = begin(lease.handle)
                value = await with_deadline(
                    self.deadline, answer, f"{method} of {pool.name(lease)}", lease.handle
                )
                if self.unable is not None and not (well := not self.unable(value)):
                    self.avoid.add(lease.slot)
                return value, others
            except Exception as caught:
                if not is_lost(caught):
                    raise
                error = caught
                self.avoid.add(lease.slot)
                # An actor that asks to be replaced costs nothing of the budget.
                if is_spent(caught):
                    pool.retire(lease.worker, brief(caught))
                else:
                    pool.lost(lease.worker, caught)
            finally:
                pool.release(lease.worker, well=well)
        raise WorkerLost(
            f"{pool.role}.{method} failed {self.attempts} times, last: {error}"
        ) from error
