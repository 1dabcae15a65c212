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
from rayloop.cluster.supervision.pool import Calls, Pool
from rayloop.cluster.supervision.worker import Pooled
from rayloop.core import events, incidents
from rayloop.core.deadlines import with_deadline
from rayloop.core.events import Emit
from rayloop.core.failures import PolicyLost, ResourcesUnavailable, WorkerLost
from rayloop.core.protocols import Level
from rayloop.rollout.colocation import Colocation, SleepCalls
from rayloop.run.config import RunConfig
from rayloop.run.demand import bundles, demand, needs, total
from rayloop.run.sections import Placement, held_in

A = TypeVar("A", bound=Pooled)

ACTOR_COROUTINES = 1000
"""Coroutines of each asynchronous actor: episodes and requests, which mostly wait."""


def actor_name(role: str) -> str:
    """A readable name with a unique suffix.

    The actor that is replaced may still be dying, and has another suffix.
    """
    return f"{role}-{secrets.token_hex(3)}"


async def reserve(
    name: str, wanted: list[dict[str, float]], timeout: float, emit: Emit
) -> PlacementGroup:
    """Reserve all resources at once, in place of a dead driver's group.

    Waits up to ``timeout`` seconds for nodes. Raises ResourcesUnavailable.
    """
    # Ray raises ValueError for an unknown name, which is the usual case: no driver died before.
    with suppress(ValueError):
        remove_placement_group(get_placement_group(name))
    lacks = _short(wanted)
    if lacks:
        emit(incidents.WaitingForResources(lacks=lacks, seconds=timeout))

    # Ray waits forever, without an error, for what no node can hold: only the deadline ends that.
    group = placement_group(wanted, strategy="PACK", name=name)

    try:
        await with_deadline(timeout, group.ready(), f"the placement of {len(wanted)} actors")
    except WorkerLost:
        # A group that is still pending would take the resources as soon as they come.
        remove_placement_group(group)
        lacks = _short(wanted)
        if lacks:
            raise ResourcesUnavailable(
                f"the run needs {lacks}, after {timeout:g} s. Lower the roles' actors or placement,"
                " join more nodes, or raise recovery.start_timeout"
            ) from None
        # Both abort the process when a head that was started again answers (``node_rows``). The run
        # has not begun here, and such a head ends it in any case.
        free = ray.available_resources()
        present = ray.cluster_resources()
        rest = ", ".join(
            f"{free.get(name, 0.0):g} of {present[name]:g} {name}s" for name in total(wanted)
        )
        raise ResourcesUnavailable(
            f"the run's {len(wanted)} actors could not be placed within {timeout:g} s: free are"
            f" {rest}. Another run may hold the rest, or no single node has room for one actor"
        ) from None
    return group


def _short(wanted: list[dict[str, float]]) -> str:
    """The resources of which the cluster as a whole has too little, as text.

    Empty when it has enough.
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
        self.config = config
        self.folder = folder
        self.rollout_engine = config.engine
        if self.trains:
            self.rollout_engine = config.engine.beside(config.policy.engine)
        self._emit = emit
        self._group: PlacementGroup | None = None
        self.nodes = Nodes(emit)
        self._watching: asyncio.Task[None] | None = None
        self.wanted = len(demand(config, self.trains))
        self.up = 0
        self.weights = f"{folder}/weights"
        self._first: dict[str, int] = {}
        for index, (role, _) in enumerate(demand(config, self.trains)):
            self._first.setdefault(role, index)

    async def start(self, admit_engine: Callable[[Handle[RolloutActor]], Awaitable[None]]) -> None:
        """Reserve the resources and start every role.

        ``admit_engine`` loads the current weights into a rollout actor.
        """
        config = self.config
        began = time.monotonic()
        actors = Counter(role for role, _ in demand(config, self.trains))
        self._emit(events.Starting(dict(actors)))
        name = f"rayloop {self.folder}"
        self._group = await reserve(
            name, bundles(config, self.trains), config.recovery.start_timeout, self._emit
        )
        # Before the actors start, since a node may be lost while they do.
        self._watching = asyncio.create_task(self.nodes.watch())

        self.rollout = self._rollout_pool(admit_engine)
        self.environment = self._environment_pool()
        self.reward = self._reward_pool()
        self.pools: list[Pool[Any]] = [self.rollout, self.environment, self.reward]
        await asyncio.gather(*self._starts())

        sandbox = await asyncio.to_thread(held_in, config.environment)
        seconds = round(time.monotonic() - began, 1)
        self._emit(events.Started(seconds=seconds, threads=self._threads(), sandbox=sandbox))

    def _rollout_pool(
        self, admit_engine: Callable[[Handle[RolloutActor]], Awaitable[None]]
    ) -> Pool[RolloutActor]:
        config = self.config

        def make(options: dict[str, Any]) -> Handle[RolloutActor]:
            return create(
                RolloutActor,
                options,
                config.model,
                self.rollout_engine,
                config.transport,
                self.weights,
            )

        settings = config.rollout
        return self._pool(
            "rollout", settings.actors, settings.placement, make, admit_engine, self.starting
        )

    def _environment_pool(self) -> Pool[EnvironmentActor]:
        model = self.config.model
        settings = self.config.environment

        def make(options: dict[str, Any]) -> Handle[EnvironmentActor]:
            return create(
                EnvironmentActor,
                options,
                model,
                settings.episode,
                settings.kinds,
                settings.episode_timeout,
                settings.episodes_at_once,
                settings.history,
            )

        return self._pool("environment", settings.actors, settings.placement, make)

    def _reward_pool(self) -> Pool[RewardActor]:
        model = self.config.model
        settings = self.config.reward

        def make(options: dict[str, Any]) -> Handle[RewardActor]:
            return create(RewardActor, options, model, settings)

        return self._pool("reward", settings.actors, settings.placement, make)

    def _threads(self) -> str:
        """The threads of trainer and engine, where they are set, as text."""
        # Not every engine has the setting.
        engine = self.config.engine
        numbers = {
            "trainer": self.config.trainer.threads if self.trains else None,
            "engine": getattr(engine, "threads", None),
        }
        parts = []
        for role, number in numbers.items():
            if number:
                plural = "s" if number > 1 else ""
                parts.append(f"{role}: {number} thread{plural}")
        return "; ".join(parts)

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
        """A pool of a role. ``make`` creates an actor of the role with Ray's options."""
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
            **({} if role == "policy" else {"max_concurrency": ACTOR_COROUTINES}),
        }

    def _where(self, bundle: int, placement: Placement) -> Any:
        """The bundle of an actor, or another node with room when the bundle's node is avoided.

        The bundle stays reserved, with its bad GPU.
        """
        assert self._group is not None, "start() reserves"
        inside = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        # The table below is a question to Ray's head, which the usual case avoids.
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
        settings = RankSettings(
            config.model,
            config.trainer,
            config.optimizer,
            config.policy.loss,
            config.transport,
            self.weights,
            config.seed,
            adapter_reference=config.reference_kind == "adapter_off",
            adapters_alone=self.rollout_engine.adapters is not None,
            sight=config.alarms.sight,
            records=config.keep_rollouts == "all",
        )

        placement = config.policy.placement
        ranks = config.policy.ranks

        def spawn(rank: int) -> Handle[PolicyRank]:
            # The options are made at each spawn, since a rebuild may have to avoid a node.
            options = self._options("policy", rank, placement)
            return create(PolicyRank, options, settings, rank, ranks)

        self.policy = PolicyGroup(config.policy, spawn, config.recovery, self.nodes)

        def sleep_engines(level: Level) -> Awaitable[Any]:
            engines = Calls(self.rollout, config.sync_timeout)
            return engines.everywhere(RolloutActor.sleep, level)

        # With LoRA a sync sends adapters alone, so the engines keep the base weights asleep:
        # level1. The calls are functions because ``start`` makes the pool later.
        level = config.engine.sleep
        if level and config.trainer.lora:
            level = "level1"
        self.colocation = Colocation(
            level,
            SleepCalls(
                sleep_engines,
                lambda: Calls(self.rollout, config.sync_timeout).everywhere(RolloutActor.wake_up),
                lambda: self.policy.all(PolicyRank.sleep),
                lambda: self.policy.all(PolicyRank.wake_up),
            ),
        )
        self.starting = self.colocation.starting
        self.reference: Pool[ReferenceActor] | None = None

    def _starts(self) -> list[Awaitable[None]]:
        if self.config.reference_kind == "actor":
            self.reference = self._reference_pool()
            self.pools.append(self.reference)
        # Futures, since two await the engines' start: the caller's gather and the policy's start.
        engines, *further = (asyncio.ensure_future(start) for start in super()._starts())
        policy = self._up(self._start_policy(engines), self.config.policy.ranks)
        return [engines, *further, policy]

    def _reference_pool(self) -> Pool[ReferenceActor]:
        config = self.config
        settings = config.reference

        def make(options: dict[str, Any]) -> Handle[ReferenceActor]:
            model = settings.model(config.model)
            return create(ReferenceActor, options, model, config.scorer, settings.server)

        return self._pool("reference", settings.actors, settings.placement, make)

    async def _start_policy(self, engines: Awaitable[None]) -> None:
        if self.config.engine.sleep:
            # The engines take their memory first, and then release it.
            await engines
        await self.colocation.start_ranks(self.policy.start())
        # The next call of the ranks raises it again, and the driver rebuilds them.
        with suppress(PolicyLost):
            await self.policy.check_shared(Path(self.folder))

    def stop(self) -> None:
        """End every actor, the ranks first."""
        if self._group is not None:
            self.policy.stop()
        super().stop()
