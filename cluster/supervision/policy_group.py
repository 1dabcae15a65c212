"""The policy: one handle for all ranks. Every method is collective and has a deadline."""

import asyncio
import logging
import secrets
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError

from rayloop.actors.assignments import assignments
from rayloop.actors.failures import FailureAction, action, brief, cause, is_lost
from rayloop.actors.handles import Handle, submit, submit_numbered
from rayloop.actors.policy import LogprobGap, PolicyRank
from rayloop.cluster.supervision.nodes import Nodes
from rayloop.core.deadlines import until_stopped, with_deadline
from rayloop.core.failures import CheckpointError, ConfigError, PolicyLost, Preempted, WorkerLost
from rayloop.core.files import appears
from rayloop.core.groups import Group, Ref
from rayloop.core.protocols import Checksums
from rayloop.core.types import Trajectory, TrajectoryId, Version
from rayloop.launch.restarts import Budget
from rayloop.run.lifetime import RecoverySettings
from rayloop.run.sections import PolicySettings
from rayloop.transports.seam import WeightUpdate

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

LOCAL = ("node", "host", "fetch", "finish_save")
"""Calls that a rank may run twice: it answers them without the other ranks.

All other calls are numbered (``PolicyRank.numbered``), except for the calls by which the ranks
meet, and ``invite``.
"""
RETRY_AFTER_S = 2.0
"""Seconds until a rank that could not be reached is asked again."""
MIN_LOADING_TIMEOUT_S = 600.0
"""Minimum seconds that the ranks have to load the model, which is the slowest start."""
SHARED_FILE_TIMEOUT_S = 30.0
"""Seconds in which a node must see a file that another node wrote into a shared folder."""


class PolicyGroup:
    """The ranks of the policy.

    Raises PolicyLost when a rank died or a collective failed: the whole group must then be rebuilt
    (``rebuild``).
    """

    def __init__(
        self,
        settings: PolicySettings,
        spawn: Callable[[int], Handle[PolicyRank]],
        recovery: RecoverySettings | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """Take the settings. The ranks load the model in ``recovery.start_timeout``.

        At least ``MIN_LOADING_TIMEOUT_S`` are allowed for that.
        """
        self.settings = settings
        self.recovery = recovery or RecoverySettings()
        self._start_timeout = max(self.recovery.start_timeout, MIN_LOADING_TIMEOUT_S)
        self._budget = Budget(self.recovery.policy_restarts)
        self._spawn = spawn
        self._nodes = nodes
        self._places: list[str] = []
        self._dead = asyncio.Event()
        self._blamed: set[str] = set()
        if nodes is not None:
            nodes.add(self._evict)
        self.ranks: list[Handle[PolicyRank]] = []
        self._why = "there are no ranks"
        # The number of the last numbered call.
        self._number = 0

    async def start(self) -> None:
        """Create the ranks and let them meet.

        If one is lost, the first call raises PolicyLost. Raises WorkerStartFailed.
        """
        try:
            await self._meet()
        except PolicyLost as error:
            # Without ranks the next call raises PolicyLost
            # with this reason, and the driver rebuilds them.
            self.stop()
            self._why = str(error)

    async def _meet(self) -> None:
        self._dead.clear()
        self._number = 0
        self.ranks = [self._spawn(rank) for rank in range(self.settings.ranks)]
        timeout = self._start_timeout
        # Before they load, so that a node that is lost during the load is known.
        if self._nodes is not None:
            node_calls = [partial(submit, rank, PolicyRank.node) for rank in self.ranks]
            nodes = await self._answers("node", node_calls, timeout)
            for node in nodes:
                self._nodes.came(node, "policy")
            self._places = nodes
        address_calls = [partial(submit, rank, PolicyRank.address) for rank in self.ranks]
        meeting, *_ = await self._answers("address", address_calls, timeout)
        assert meeting is not None, "the first rank opens the place where all meet"
        join_calls = [partial(submit, rank, PolicyRank.join, meeting) for rank in self.ranks]
        await self._answers("join", join_calls, timeout)

    async def afford(self, lost: PolicyLost) -> None:
        """Wait for a unit of the ranks' budget (half of ``recovery.replacements``).

        Raises ``lost`` when that takes too long.
        """
        now = asyncio.get_running_loop().time
        wait = self._budget.wait(now())
        if wait > self.recovery.start_timeout:
            raise lost
        await asyncio.sleep(wait)
        self._budget.take(now())

    async def rebuild(self) -> None:
        """Replace all ranks.

        They hold the start model until ``load``. Raises PolicyLost, WorkerStartFailed.
        """
        # The old ranks end first: they hold the GPUs that the new ones need.
        self.stop()
        for node in self._places:
            if self._nodes is not None and not await self._nodes.lost(node):
                self._nodes.left(node, "policy")
                if node in self._blamed:
                    self._nodes.failed(node)
        self._places = []
        self._blamed.clear()
        await self._meet()

    @property
    def places(self) -> tuple[str, ...]:
        """The names of the ranks' nodes, by rank; empty where they are not known."""
        return self._named(self._places)

    @property
    def blamed(self) -> tuple[str, ...]:
        """The names of the nodes on which ranks failed since they met."""
        return self._named(sorted(self._blamed))

    def _named(self, nodes: Sequence[str]) -> tuple[str, ...]:
        return () if self._nodes is None else tuple(map(self._nodes.name, nodes))

    def _evict(self, node: str, why: str) -> None:
        if node in self._places and self._nodes is not None:
            # ``afford`` takes the unit of the budget.
            self._nodes.charge(node)
            self._blamed.add(node)
            self._why = f"a rank of the policy: {why}"
            self._dead.set()

    async def while_alive(self, work: Coroutine[Any, Any, R]) -> R:
        """Await ``work``, but cancel it when the policy is lost while nobody calls it.

        Raises PolicyLost then.
        """
        try:
            return await until_stopped(self._dead, work)
        except Preempted:
            if not self._dead.is_set():
                raise
            raise PolicyLost(self._why) from None

    async def all(
        self, method: Callable[Concatenate[PolicyRank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call a method on all ranks with the same arguments.

        Returns the answers by rank; raises PolicyLost.
        """
        name = method.__name__
        if name in LOCAL:
            local_calls = [partial(submit, rank, method, *args, **kwargs) for rank in self.ranks]
            return await self._answers(name, local_calls)
        number = self._next()
        calls = [
            partial(submit_numbered, rank, number, 1, method, *args, **kwargs)
            for rank in self.ranks
        ]
        return await self._answers(name, calls, again=True)

    def _next(self) -> int:
        """The number of a call that goes to all ranks at once."""
        self._number += 1
        return self._number

    async def _answers(
        self,
        method: str,
        submits: Sequence[Callable[[], Ref[R]]],
        deadline: float | None = None,
        *,
        again: bool = False,
    ) -> list[R]:
        """One answer per rank, within ``policy.step_timeout`` or ``deadline``.

        Each of ``submits`` calls its rank. ``again``: a rank that could not be reached may be
        called once more, as for ``LOCAL`` methods. Raises PolicyLost, and the first failure.
        """
        if not submits:
            raise PolicyLost(self._why)
        timeout = deadline or self.settings.step_timeout
        # A copy, since a rebuild may replace the ranks while they are awaited.
        ranks = list(self.ranks)
        # Before anything is awaited: every rank gets collective calls in one order.
        refs = [submit_call() for submit_call in submits]

        async def answer_of(rank: int, ref: Ref[R]) -> R:
            what = f"{method} of policy rank {rank}"
            starts = deadline is not None

            def answer(ref: Ref[R]) -> Awaitable[R]:
                return with_deadline(timeout, ref, what, ranks[rank], starts=starts)

            try:
                if again or method in LOCAL:
                    first = partial(answer, ref)
                    return await self._reached(what, first, lambda: answer(submits[rank]()))
                return await answer(ref)
            except Exception as error:
                # After a rebuild, late errors of the former
                # ranks must not blame the new ranks' nodes.
                if is_lost(error) and ranks == self.ranks:
                    self._blame(rank)
                raise

        calls = [asyncio.ensure_future(answer_of(rank, ref)) for rank, ref in enumerate(refs)]
        try:
            return await asyncio.gather(*calls)
        except Exception as error:
            failure = _collective_failure(method, error, len(ranks))
            if failure is not error:
                raise failure from error
            raise
        finally:
            # ``gather`` raises the first error and lets the others run: with one rank dead, the
            # rest of a collective would be awaited until the deadline.
            for call in calls:
                call.cancel()

    def _blame(self, rank: int) -> None:
        """Count a failure of a rank against its node, if that is known."""
        if self._nodes is not None and rank < len(self._places):
            self._blamed.add(self._places[rank])

    async def _reached(
        self, what: str, first: Callable[[], Awaitable[R]], again: Callable[[], Awaitable[R]]
    ) -> R:
        """The answer to ``first``, or to ``again`` while Ray cannot reach the living rank.

        Raises ActorUnavailableError when that has lasted for ``recovery.health_timeout``.
        """
        now = asyncio.get_running_loop().time
        ask = first
        until = 0.0
        while True:
            try:
                return await ask()
            except ActorUnavailableError as error:
                until = until or now() + self.recovery.health_timeout
                if now() > until:
                    raise
                logger.warning("%s could not be reached: asking again (%s)", what, brief(error))
            await asyncio.sleep(RETRY_AFTER_S)
            ask = again

    async def fetch(
        self,
        groups: Sequence[Group],
        *,
        seed: int,
        version: Version,
        treat_as_on_policy: bool,
        nominal: int,
    ) -> set[TrajectoryId]:
        """Let each rank fetch its share (``assignments``) of a step.

        Returns lost trajectories, to fetch again without them.
        """
        plan = assignments(
            groups,
            len(self.ranks),
            self.settings.update,
            seed,
            version,
            nominal,
            treat_as_on_policy=treat_as_on_policy,
            together=self.settings.engine.sequence_parallel,
        )
        calls = [
            partial(submit, rank, PolicyRank.fetch, share)
            for rank, share in zip(self.ranks, plan, strict=True)
        ]
        lost_by_rank = await self._answers("fetch", calls)
        return set(chain.from_iterable(lost_by_rank))

    async def compare(
        self, payloads: Sequence[Ref[Trajectory]], *, swap_images: bool = False
    ) -> LogprobGap:
        """The sampling engine's log-probs against the trainer's, over all sampled tokens.

        Raises WorkerLost when all are lost.
        """
        # The ranks of one sequence-parallel group get the same payloads.
        group_size = self.settings.engine.sequence_parallel
        groups = len(self.ranks) // group_size
        number = self._next()
        calls = [
            partial(
                submit_numbered,
                handle,
                number,
                1,
                PolicyRank.compare,
                payloads[rank // group_size :: groups],
                swap_images=swap_images,
            )
            for rank, handle in enumerate(self.ranks)
        ]
        rows_by_rank = await self._answers("compare", calls, again=True)
        # They return the same rows, too: the rows of one rank count.
        rows = list(chain.from_iterable(rows_by_rank[::group_size]))

        if not rows:
            raise WorkerLost(
                f"all {len(payloads)} trajectories to compare were lost with the nodes that held"
                " them"
            )
        return LogprobGap.of(rows)

    async def send(self, version: Version, meeting: Any) -> None:
        """Gather the weights and send them (``PolicyRank.send``)."""
        await self.all(PolicyRank.send, version, meeting)

    async def export(self, version: Version) -> WeightUpdate[Any]:
        """Gather the weights, or take the copy of what was sent.

        The update's source is a *reference*, owned by the driver.
        """
        number = self._next()
        ranks = list(self.ranks)
        sources: dict[int, Ref[Any]] = {}

        def begin(rank: int) -> Ref[Any]:
            manifest, sources[rank] = submit_numbered(
                ranks[rank], number, 2, PolicyRank.export, version
            )
            return cast(Ref[Any], manifest)

        calls = [partial(begin, rank) for rank in range(len(ranks))]
        manifest, *_ = await self._answers("export", calls, again=True)
        assert manifest is not None, "the first rank gathers"
        # The answer may hold all weights, which the object store has by now.
        for rank in ranks:
            submit(rank, PolicyRank.forget, number)
        return WeightUpdate(manifest, sources[0])

    async def invite(self, engines: tuple[int, ...], failures: int, timeout: float) -> Any:
        """Let the transport's sender, which lives in the first rank, ``invite`` these engines."""
        calls = [
            partial(submit, rank, PolicyRank.invite, engines, failures, timeout)
            for rank in self.ranks[:1]
        ]
        answers = await self._answers("invite", calls)
        return answers[0]

    async def save(self, folder: str) -> Checksums:
        """Write the trainer's state into a folder that all ranks see.

        Returns name -> checksum of their files.
        """
        checksums = await self.all(PolicyRank.save, folder)
        return _merged(checksums)

    async def save_beside(self, folder: str, copied: asyncio.Event) -> Checksums:
        """Save as ``save`` does; training continues once ``copied`` is set."""
        await self.all(PolicyRank.begin_save, folder)
        # From here training may change the weights.
        copied.set()
        checksums = await self.all(PolicyRank.finish_save, self.settings.step_timeout)
        return _merged(checksums)

    async def load(self, folder: str, sums: Checksums) -> None:
        """Restore what ``save`` wrote; ``sums``: the checksums that are known.

        Raises Damaged.
        """
        await self.all(PolicyRank.load, folder, sums)

    async def check_shared(self, folder: Path) -> None:
        """Check that the ranks and the driver see each other's files in ``folder``.

        Raises ConfigError when they do not.
        """
        probe = folder / f".shared-{secrets.token_hex(4)}"
        probe.mkdir(parents=True)
        try:
            answers = await self.all(PolicyRank.shares, str(probe), SHARED_FILE_TIMEOUT_S)
            blind_hosts = [host for host in answers if host]
            rank_files = [probe / f"rank-{rank}" for rank in range(len(self.ranks))]
            if blind_hosts or not await _all_appear(rank_files):
                hosts = blind_hosts or await self.all(PolicyRank.host)
                where = ", ".join(dict.fromkeys(hosts))
                raise ConfigError(
                    f"output: {folder} is not shared by the nodes of the policy ({where}), which"
                    " save their part of each checkpoint there. Set output=FOLDER to one that all"
                    " nodes see"
                )
        finally:
            shutil.rmtree(probe, ignore_errors=True)

    def stop(self) -> None:
        """End all ranks."""
        for rank in self.ranks:
            ray.kill(rank)
        self.ranks = []


def _collective_failure(method: str, error: Exception, ranks: int) -> BaseException:
    """The error of a call of all ranks, of which one raised ``error``."""
    if action(error, ranks) is FailureAction.REBUILD:
        return PolicyLost(f"the policy group failed in {method}: {brief(error)}")
    if isinstance(error, CheckpointError):
        # Without the trace that Ray puts before its text.
        return cause(error)
    return error


def _merged(parts: Sequence[Checksums]) -> Checksums:
    return dict(chain.from_iterable(checksums.items() for checksums in parts))


async def _all_appear(files: Sequence[Path]) -> bool:
    """Whether each file appears within ``SHARED_FILE_TIMEOUT_S`` of the check before."""
    visible = [await asyncio.to_thread(appears, file, SHARED_FILE_TIMEOUT_S) for file in files]
    return all(visible)
