"""Creates the actors of a run: one placement group, one pool per role, and the policy's ranks."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rayloop.actors.environment import EnvironmentActor
from rayloop.actors.handles import Handle, create
from rayloop.actors.policy import PolicyRank, RankSettings
from rayloop.actors.reference import ReferenceActor
from rayloop.actors.reward import RewardActor
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.supervision.nodes import Nodes
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.cluster.supervision.pool import Pool
from rayloop.cluster.supervision.worker import Pooled
from rayloop.core import events, incidents
from rayloop.core.deadlines import with_deadline
from rayloop.core.events import Emit
from rayloop.core.failures import PolicyLost, ResourcesUnavailable, WorkerLost
from rayloop.rollout.time_sharing import Sleepers, TimeSharing
from rayloop.run.config import RunConfig
from rayloop.run.demand import bundles, demand, needs, total
from rayloop.run.preflight import held_in
from rayloop.run.roles import Placement

A = TypeVar("A", bound=Pooled)

CONCURRENCY = 1000
"""Coroutines per asynchronous actor: episodes and requests, which mostly wait."""


def actor_name(role: str) -> str:
    """A name for people; its suffix differs from that of the actor that is replaced, which may
    still be dying.
    """
    return f"{role}-{secrets.token_hex(3)}"


async def reserve(
    config: RunConfig, name: str, wanted: list[dict[str, float]], emit: Emit
) -> PlacementGroup:
    """Reserve all resources at once, waiting for nodes, in place of a dead driver's group.

    Raises ResourcesUnavailable.
    """
    # Ray raises ValueError for an unknown name, which is the usual case: no driver died before.
    with suppress(ValueError):
        remove_placement_group(get_placement_group(name))
    timeout = config.recovery.start_timeout
    if short := _short(wanted):
        emit(incidents.WaitingForResources(lacks=short, seconds=timeout))

    # Ray waits for ever, without an error, for what no node can hold: only the deadline ends that.
    group = placement_group(wanted, strategy="PACK", name=name)

    try:
        await with_deadline(timeout, group.ready(), f"the placement of {len(wanted)} actors")
    except WorkerLost:
        # A group that is still pending would take the resources as soon as they come.
        remove_placement_group(group)
        if short := _short(wanted):
            raise ResourcesUnavailable(
                f"the run needs {short}, after {timeout:g} s. Lower the roles' actors or placement,"
                " join more nodes, or raise recovery.start_timeout"
            ) from None
        free, present = ray.available_resources(), ray.cluster_resources()
        rest = ", ".join(
            f"{free.get(name, 0.0):g} of {present[name]:g} {name}s" for name in total(wanted)
        )
        raise ResourcesUnavailable(
            f"the run's {len(wanted)} actors could not be placed within {timeout:g} s: free are"
            f" {rest}. Another run may hold the rest, or no single node has room for one actor"
        ) from None
    return group


def _short(wanted: list[dict[str, float]]) -> str:
    """The resources of which the cluster as a whole has too little, as text; empty when it has
    enough.
    """
    present = ray.cluster_resources()
    # The tolerance covers the rounding of sums of fractions, such as ten times 0.1.
    lacks = {
        name: amount
        for name, amount in total(wanted).items()
        if amount > present.get(name, 0.0) + 1e-6
    }
    return ", ".join(
        f"{amount:g} {name}s, the cluster has {present.get(name, 0.0):g}"
        for name, amount in lacks.items()
    )


class Services:
    """The pools that play and score, for an evaluation.

    Ray ends their actors with the process that created them. ``wanted``, ``up``: actors to start,
    and started. ``weights``: the folder where transports and engines write weight updates.
    """

    trains = False
    starting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    def __init__(self, config: RunConfig, folder: str, emit: Emit) -> None:
        self.config, self.folder = config, folder
        self.rollout_engine = (
            config.engine.beside(config.policy.engine) if self.trains else config.engine
        )
        self._emit = emit
        self._group: PlacementGroup | None = None
        self.nodes = Nodes(emit)
        self._watching: asyncio.Task[None] | None = None
        self.wanted, self.up = len(demand(config, self.trains)), 0
        self.weights = f"{folder}/weights"
        self._first: dict[str, int] = {}
        for index, (role, _) in enumerate(demand(config, self.trains)):
            self._first.setdefault(role, index)

    async def start(self, admit_engine: Callable[[Handle[RolloutActor]], Awaitable[None]]) -> None:
        """Reserve the resources and start every role.

        ``admit_engine`` loads the current weights into a rollout actor.
        """
        c, began = self.config, time.monotonic()
        self._emit(events.Starting(dict(Counter(role for role, _ in demand(c, self.trains)))))
        self._group = await reserve(
            c, f"rayloop {self.folder}", bundles(c, self.trains), self._emit
        )
        # Before the actors start, since a node may be lost while they do.
        self._watching = asyncio.create_task(self.nodes.watch())

        self.rollout = self._pool(
            "rollout",
            c.rollout.actors,
            c.rollout.placement,
            lambda options: create(
                RolloutActor, options, c.model, self.rollout_engine, c.transport, self.weights
            ),
            admit_engine,
            self.starting,
        )

        self.environment = self._pool(
            "environment",
            c.environment.actors,
            c.environment.placement,
            lambda options: create(
                EnvironmentActor,
                options,
                c.model,
                c.environment.episode,
                c.environment.kinds,
                c.environment.episode_timeout,
                c.environment.episodes_at_once,
            ),
        )

        self.reward = self._pool(
            "reward",
            c.reward.actors,
            c.reward.placement,
            lambda options: create(RewardActor, options, c.model, c.reward),
        )
        self.pools: list[Pool[Any]] = [self.rollout, self.environment, self.reward]

        await asyncio.gather(*self._starts())

        numbers = {
            "trainer": c.trainer.threads if self.trains else None,
            "engine": getattr(c.engine, "threads", None),
        }
        threads = "; ".join(
            f"{role}: {number} thread{'s' if number > 1 else ''}"
            for role, number in numbers.items()
            if number
        )
        sandbox = await asyncio.to_thread(held_in, c)
        self._emit(
            events.Started(
                seconds=round(time.monotonic() - began, 1), threads=threads, sandbox=sandbox
            )
        )

    def _starts(self) -> list[Awaitable[None]]:
        return [self._up(pool.start(), pool.size) for pool in self.pools]

    async def _up(self, start: Awaitable[None], actors: int) -> None:
        await start
        self.up += actors

    def _pool(
        self,
        role: str,
        size: int,
        placement: Placement,
        make: Callable[[dict[str, Any]], Handle[A]],
        admit: Callable[[Handle[A]], Awaitable[None]] | None = None,
        starting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> Pool[A]:
        """``make`` creates an actor of the role with Ray's options."""
        return Pool(
            role,
            size,
            lambda slot: make(self._options(role, slot, placement)),
            self.config.recovery,
            self._emit,
            admit,
            self.nodes,
            starting,
        )

    def _options(self, role: str, slot: int, placement: Placement) -> dict[str, Any]:
        """Ray's options for one actor in its bundle.

        The dashboard shows it under the name of its role.
        """
        return {
            "name": actor_name(f"{role}-{slot}"),
            "num_cpus": placement.num_cpus,
            "num_gpus": placement.num_gpus,
            "resources": placement.resources or None,
            "scheduling_strategy": self._where(self._first[role] + slot, placement),
            "max_restarts": 0,
            # Collective calls must run one by one in the order
            # of submission, so a rank has no concurrency.
            **({} if role == "policy" else {"max_concurrency": CONCURRENCY}),
        }

    def _where(self, bundle: int, placement: Placement) -> Any:
        """Its bundle; another node with room when the bundle's is avoided.

        The bundle stays reserved, with its bad GPU.
        """
        assert self._group is not None, "start() reserves"
        inside = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        # The table below is a question to Ray's head, which the usual case does without.
        if not self.nodes.avoids():
            return inside
        home = placement_group_table(self._group)["bundles_to_node_id"].get(bundle, "")
        if not self.nodes.bad(home):
            return inside
        other = self.nodes.elsewhere(needs(placement), but={home})
        # A soft affinity would allow Ray to fall back to the avoided node.
        return inside if other is None else NodeAffinitySchedulingStrategy(other, soft=False)

    def stop(self) -> None:
        """End every actor and give the resources back."""
        if self._group is None:
            return
        if self._watching is not None:
            self._watching.cancel()
        for pool in self.pools:
            pool.stop()
        remove_placement_group(self._group)
        self._group = None


class TrainingServices(Services):
    """All actors of a run: also the policy's ranks, and the reference if the run has one."""

    trains = True

    def __init__(self, config: RunConfig, folder: str, emit: Emit) -> None:
        super().__init__(config, folder, emit)
        c = config
        settings = RankSettings(
            c.model,
            c.trainer,
            c.optimizer,
            c.policy.loss,
            c.transport,
            self.weights,
            c.seed,
            adapter_reference=c.reference_kind == "adapter_off",
            adapters_alone=self.rollout_engine.adapters is not None,
        )

        placement, ranks = c.policy.placement, c.policy.ranks

        def spawn(rank: int) -> Handle[PolicyRank]:
            # The options are made at each spawn, since a rebuild may have to avoid a node.
            return create(
                PolicyRank, self._options("policy", rank, placement), settings, rank, ranks
            )

        self.policy = PolicyGroup(c.policy, spawn, c.recovery, self.nodes)

        # With LoRA a sync sends adapters alone, so the engines keep the base weights asleep:
        # level1. The calls are lambdas because ``start`` makes the pool later.
        self.sharing = TimeSharing(
            c.engine.sleep and ("level1" if c.trainer.lora else c.engine.sleep),
            Sleepers(
                lambda level: self.rollout.within(c.sync_timeout).everywhere(
                    RolloutActor.sleep, level
                ),
                lambda: self.rollout.within(c.sync_timeout).everywhere(RolloutActor.wake),
                lambda: self.policy.all(PolicyRank.sleep),
                lambda: self.policy.all(PolicyRank.wake),
            ),
        )
        self.starting = self.sharing.starting
        self.reference: Pool[ReferenceActor] | None = None

    def _starts(self) -> list[Awaitable[None]]:
        c = self.config
        if c.reference_kind == "actor":
            self.reference = self._pool(
                "reference",
                c.reference.actors,
                c.reference.placement,
                lambda options: create(
                    ReferenceActor,
                    options,
                    c.reference.model(c.model),
                    c.scorer,
                    c.reference.server,
                ),
            )
            self.pools.append(self.reference)
        # Futures, since two await the engines' start: the caller's gather and the policy's start.
        engines, *others = (asyncio.ensure_future(start) for start in super()._starts())
        return [engines, *others, self._up(self._start_policy(engines), c.policy.ranks)]

    async def _start_policy(self, engines: Awaitable[None]) -> None:
        if self.config.engine.sleep:
            await engines  # they take their memory first, and let go of it
        await self.sharing.start_ranks(self.policy.start())
        with suppress(
            PolicyLost
        ):  # the next call of the ranks raises it again, and the driver rebuilds them
            await self.policy.check_shared(Path(self.folder))

    def stop(self) -> None:
        """End every actor, the ranks first."""
        if self._group is not None:
            self.policy.stop()
        super().stop()
