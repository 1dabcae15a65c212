"""A cluster of one process in virtual time: the real driver over actors that fail as a schedule
says.

``simulate`` runs a whole training: the driver, production, pools, the policy's ranks, checkpoints
on disk. Nodes, actors, the object store and the clock are simulated. A ``Fault`` names the call
that it hits and what happens there.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import exceptions

from benchmarks.virtual_time import live
from rayloop.core.deadlines import WAITS
from rayloop.core.protocols import EngineHealth, Manifest
from rayloop.core.types import (
    Completion,
    EndReason,
    FinishReason,
    RolloutRequest,
    Sampling,
    Summary,
    TokenPrompt,
    Trajectory,
    Turn,
    Version,
)
from rayloop.run.config import RunConfig
from tests.support import supervision_adapter as adapter
from tests.support.runs import settings

ALWAYS = 10**9
ROLES = {
    "RolloutActor": "rollout",
    "EnvironmentActor": "environment",
    "RewardActor": "reward",
    "ReferenceActor": "reference",
}
SECONDS = {
    "health": 5.0,
    "train": 5.0,
    "join": 30.0,
    "load": 1.0,
    "save": 1.0,
    "score": 0.2,
    "annotate": 0.5,
    "generate": 1.0,
}
"""How long calls take; health only at the start."""
SMALL: dict[str, Any] = {
    "keep_rollouts": 0,
    "data__shuffle": False,
    "environment__actors": 2,
    "rollout__actors": 2,
    "reward__actors": 2,
    "environment__episode_timeout": 200.0,
    "environment__episode__request_timeout": 100.0,
    "policy__step_timeout": 100.0,
    "reward__timeout": 50.0,
    "publish__timeout": 100.0,
}
"""What differs from the runs of other tests: two actors of each pool, and short deadlines."""
LEARNS = 8.0
"""Seconds after which the head knows that a node is gone."""
RAY: dict[str, Callable[[], Exception]] = {
    "unavailable": lambda: exceptions.ActorUnavailableError("connection reset", b"1" * 16),
    "lost message": lambda: exceptions.RpcError("lost"),
    "object store full": lambda: exceptions.ObjectStoreFullError("full"),
    "disk full": lambda: exceptions.OutOfDiskError("full"),
    "ray broke": lambda: exceptions.RaySystemError("broken"),
    "cancelled": exceptions.TaskCancelledError,
    "own node is going": lambda: exceptions.LocalRayletDiedError("gone"),
    "reservation removed": exceptions.ActorPlacementGroupRemoved,
    "object lost": lambda: exceptions.ObjectLostError("00", None, ""),
    "owner died": lambda: exceptions.OwnerDiedError("00", None, ""),
}
"""What Ray raises for a call, whose actor goes on."""
DEATHS: dict[str, Callable[[], Exception]] = {
    "died": exceptions.ActorDiedError,
    "out of memory": lambda: exceptions.OutOfMemoryError("ended by the memory monitor"),
    "crashed": exceptions.WorkerCrashedError,
}
"""What Ray raises for the calls of an actor that ended."""


@dataclass
class Fault:
    """``cause`` happens in calls of ``at`` on actors of ``role``, or in an ``episode``; each
    selector left out matches all.

    ``samples`` are the members of a group, ``attempts`` those of an episode, ``step`` the first one
    at which it happens, and ``times`` how often.
    """

    at: str
    cause: str
    role: str = ""
    tasks: Collection[str] = ()
    samples: Collection[int] = ()
    attempts: Collection[int] = ()
    slots: Collection[int] = ()
    nodes: Collection[str] = ()
    serials: Collection[int] = ()
    step: int = 0
    times: int = ALWAYS
    happened: int = 0

    def hits(self, at: str, actor: Actor, request: RolloutRequest | None) -> bool:
        """Whether it happens now."""
        pairs: list[tuple[Collection[Any], Any]] = [
            (self.slots, actor.slot),
            (self.nodes, actor.where),
            (self.serials, actor.serial),
        ]
        if request is not None:
            pairs += [
                (self.tasks, request.task.id),
                (self.samples, request.id.sample),
                (self.attempts, request.attempt),
            ]
        return (
            self.at == at
            and self.role in ("", actor.role)
            and self.happened < self.times
            and actor.cluster.step >= self.step
            and all(value in wanted for wanted, value in pairs if wanted)
        )


class Object:
    """A reference. What an actor made lies on its node, and is lost with it."""

    def __init__(
        self, cluster: Cluster, work: asyncio.Task[Any], node: str = "", index: int | None = None
    ) -> None:
        self._cluster, self.work, self.node, self._index = cluster, work, node, index

    @property
    def lost(self) -> bool:
        return self.node in self._cluster.down

    def __await__(self) -> Generator[Any, None, Any]:
        result = yield from asyncio.shield(self.work).__await__()
        if self.lost:
            raise exceptions.ObjectLostError("00", None, "")
        return result if self._index is None else result[self._index]


class Call:
    """``handle.method``, as Ray has it."""

    def __init__(self, actor: Any, name: str, returns: int = 1) -> None:
        self._actor, self._name, self._returns = actor, name, returns

    def options(self, *, num_returns: int, name: str = "") -> Call:
        return Call(self._actor, self._name, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        cluster = self._actor.cluster
        work = cluster.begin(self._actor.call(self._name, args, kwargs))
        if self._returns == 1:
            return Object(cluster, work)
        return [
            Object(cluster, work, self._actor.where if i else "", i) for i in range(self._returns)
        ]


class Handle:
    """A handle of the driver."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.where = cluster, ""

    def __getattr__(self, name: str) -> Call:
        return Call(self, name)

    async def call(self, name: str, args: Any, kwargs: Any) -> Any:
        assert name == "lease_engine"
        return await adapter.lease_engine(self.cluster.driver, *args)


class Actor:
    """A handle and its actor: each method below is one of the real actor's."""

    def __init__(self, cluster: Cluster, role: str, slot: int, node: str, serial: int) -> None:
        self.cluster, self.role, self.slot, self.where, self.serial = (
            cluster,
            role,
            slot,
            node,
            serial,
        )
        self.death: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.version = Version(0, 0)
        self.started = False

    def __getattr__(self, name: str) -> Call:
        return Call(self, name)

    def die(self, error: Exception) -> None:
        """Calls under way and to come fail with it."""
        if not self.death.done():
            self.death.set_result(error)

    async def call(self, name: str, args: Any, kwargs: Any) -> Any:
        """What a call of a method becomes: its result, the actor's death, or what it raised as Ray
        wraps that.
        """
        work = asyncio.ensure_future(self._work(name, args, kwargs))
        await asyncio.wait({work, self.death}, return_when=asyncio.FIRST_COMPLETED)
        if self.death.done():
            work.cancel()
            raise self.death.result()
        if not isinstance(error := work.exception(), Exception) or isinstance(
            error, exceptions.RayError
        ):
            return work.result()
        raise exceptions.RayTaskError(name, "trace", error).as_instanceof_cause()

    async def _work(self, name: str, args: Any, kwargs: Any) -> Any:
        if name == "numbered":
            # No answer is lost on its way here, so each number comes once.
            _number, name, *args = args
        resolved = [await arg if isinstance(arg, Object) else arg for arg in args]
        if name != "node":
            await self.cluster.befall(name, self)
        if name != "health" or not self.started:
            await asyncio.sleep(SECONDS.get(name, 0.0))
        self.started = self.started or name == "health"
        result = getattr(self, f"do_{name}")(*resolved, **kwargs)
        return await result if inspect.isawaitable(result) else result

    # All ------------------------------------------------------------------------------------------

    def do_health(self) -> Any:
        return EngineHealth(self.version, 0, 0) if self.role == "rollout" else None

    def do_node(self) -> str:
        return self.where

    def do_host(self) -> str:
        return self.where

    def do_forget(self, number: int) -> None:
        """The answers are not kept here."""

    def do_stacks(self) -> str:
        return "stacks"

    # Environments ---------------------------------------------------------------------------------

    async def do_run_episodes(
        self, requests: Sequence[RolloutRequest], lease: Any, driver: Any
    ) -> Any:
        self.cluster.calls.append((self.slot, [request.id.sample for request in requests]))
        played = await asyncio.gather(
            *(self._episode(request, lease, driver) for request in requests)
        )
        return [summary for summary, _ in played], *(payload for _, payload in played)

    async def _episode(self, request: RolloutRequest, lease: Any, driver: Any) -> tuple[Any, Any]:
        self.cluster.episodes.append(
            Episode(request.task.id, request.id.sample, request.attempt, self.slot, lease.slot)
        )
        engine = adapter.engine(request, lease, driver, 100.0)
        try:
            await self.cluster.befall("episode", self, request)
            done = await engine.generate(
                TokenPrompt((1, 2, 3), seed=request.seed), request.sampling
            )
            return _played(request, done)
        except Exception as error:
            return adapter.failed(request, error), None
        finally:
            engine.leave()

    # Engines --------------------------------------------------------------------------------------

    def do_generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        return Completion((4, 5), (-0.5, -0.5), FinishReason.END_TOKEN, self.version)

    def do_leave(self, cohort: str) -> None: ...

    def do_load(self, what: Any, source: Any, order: int = 0) -> None:
        if self.role == "rollout":
            self.version = what.version

    # Rewards and references -----------------------------------------------------------------------

    def do_score(self, task: Any, step: int, *payloads: Trajectory) -> list[Any]:
        return [self.cluster.outcome(self, payload) for payload in payloads]

    def do_score_those_left(self, payloads: Sequence[Object], task: Any, step: int) -> list[Any]:
        lost = adapter.unscored("payload_lost", "lost with its node")
        return [
            lost if one.lost else self.cluster.outcome(self, one.work.result()[_index(one)])
            for one in payloads
        ]

    def do_describe(self, group: Any, *payloads: Trajectory) -> tuple[list[Any], dict[str, bytes]]:
        return [], {}

    def do_annotate(self, payloads: Sequence[Object], folder: str | None = None) -> tuple[Any, ...]:
        return [i for i, one in enumerate(payloads) if one.lost], *(
            None if one.lost else [0.0, 0.0] for one in payloads
        )

    # Ranks ----------------------------------------------------------------------------------------

    def do_address(self) -> tuple[str, int] | None:
        return None if self.slot else ("10.0.0.1", 1)

    def do_join(self, meeting: Any) -> None: ...

    def do_shares(self, probe: str, within: float) -> None:
        Path(probe, f"rank-{self.slot}").touch()

    def do_fetch(self, updates: Any) -> list[Any]:
        self.cluster.trained.update(str(a.id) for update in updates for a in update)
        return [
            a.id
            for update in updates
            for a in update
            if a.payload.lost or (a.ref_logprobs is not None and a.ref_logprobs.lost)
        ]

    def do_train(self) -> tuple[dict[str, float], dict[Any, Any], dict[Any, Any]]:
        return {"actor/pg_loss": 0.0, "actor/grad_norm": 1.0}, {}, {}

    def do_compare(
        self, payloads: Sequence[Object], *, swap_images: bool
    ) -> list[dict[str, float]]:
        row = {"tokens": 2, "sum": 0.0, "max": 0.0, "images": 0, "image_tokens": 0, "swapped": 0.0}
        return [dict(row) for one in payloads if not one.lost]

    def do_export(self, version: Version) -> tuple[Any, Any]:
        return (None, None) if self.slot else (Manifest(version, {}), {})

    def do_save(self, folder: str) -> dict[str, Any]:
        Path(folder, f"rank-{self.slot}").write_bytes(b"1234")
        return {}

    def do_begin_save(self, folder: str) -> None:
        self.do_save(folder)

    def do_finish_save(self, within: float) -> dict[str, Any]:
        return {}


def _index(one: Object) -> int:
    assert one._index is not None
    return one._index


def _played(request: RolloutRequest, done: Completion) -> tuple[Summary, Trajectory]:
    turns = (
        Turn("user", (1, 2, 3)),
        Turn("assistant", done.token_ids, (), done.logprobs, done.version, done.finish),
    )
    trajectory = Trajectory(
        request.id,
        request.attempt,
        request.task.id,
        request.seed,
        turns,
        request.sampling,
        EndReason.DONE,
    )
    summary = Summary(
        request.id,
        request.attempt,
        request.task.id,
        "",
        EndReason.DONE,
        5,
        2,
        1,
        0,
        0,
        True,
        done.version,
        done.version,
    )
    return summary, trajectory


@dataclass(frozen=True)
class Episode:
    """One attempt, and the slots that played it."""

    task: str
    sample: int
    attempt: int
    environment: int
    engine: int


class Cluster:
    """``homes``: the node that a role's slots are on; of a node that is down they move to the next
    one.
    """

    def __init__(
        self,
        config: RunConfig,
        faults: Sequence[Fault],
        nodes: Sequence[str],
        homes: dict[str, Sequence[str]],
    ) -> None:
        self.config, self.faults, self.nodes, self.homes = config, faults, nodes, homes
        self.down: dict[str, float] = {}
        self.actors: list[Actor] = []
        self.episodes: list[Episode] = []
        self.calls: list[tuple[int, list[int]]] = []
        self.driver: Any = None
        self.scored: set[str] = set()
        """Trajectories that have a reward."""
        self.trained: set[str] = set()
        """Trajectories that a rank fetched in order to train on them."""
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def step(self) -> int:
        """Steps that are trained."""
        return 0 if self.driver is None else int(self.driver.step)

    def begin(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()

    def create(self, name: str, role: str, slot: int) -> Actor:
        """A new actor, on its home or on the first node that lives.

        Raises nothing: a node that is in doubt takes it, too.
        """
        homes = self.homes.get(role, self.nodes[:1])
        home = homes[min(slot, len(homes) - 1)]
        node = (
            home
            if home not in self.down
            else next(node for node in self.nodes if node not in self.down)
        )
        assert ROLES.get(name, "policy") == role
        actor = Actor(self, role, slot, node, 1 + sum(a.role == role for a in self.actors))
        self.actors.append(actor)
        return actor

    def rows(self) -> list[dict[str, Any]]:
        """What the head says of the nodes."""
        now = asyncio.get_running_loop().time()
        return [
            {
                "NodeID": node,
                "Alive": now < self.down.get(node, now + 1) + LEARNS,
                "NodeManagerHostname": node,
                "NodeManagerAddress": node,
                "NodeManagerPort": 1,
            }
            for node in self.nodes
        ]

    async def connect(self, node: str, port: int) -> Any:
        await asyncio.sleep(0)
        if node in self.down:
            raise OSError("no route to host")
        return None, SimpleNamespace(close=lambda: None)

    def lose(self, node: str) -> None:
        """The node goes, with what is on it."""
        self.down[node] = asyncio.get_running_loop().time()
        for actor in self.actors:
            if actor.where == node:
                actor.die(exceptions.ActorDiedError())

    async def befall(self, at: str, actor: Actor, request: RolloutRequest | None = None) -> None:
        """What the schedule has for this call. Raises the cause, or never returns."""
        for fault in self.faults:
            if fault.cause.startswith("unscored ") or not fault.hits(at, actor, request):
                continue
            fault.happened += 1
            cause = fault.cause
            if cause in adapter.CAUSES:
                await asyncio.sleep(0.5)
                raise adapter.CAUSES[cause]()
            if cause in RAY:
                raise RAY[cause]()
            if cause == "CUDA out of memory":
                raise type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")
            if cause == "CUDA error":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if cause == "collective":
                raise RuntimeError("Connection closed by peer")
            if cause == "stop":
                self.driver.stop()
                continue
            assert cause in ("node lost", "silent", *DEATHS), cause
            if cause == "node lost":
                self.lose(actor.where)
            elif cause in DEATHS:
                actor.die(DEATHS[cause]())
            await asyncio.Event().wait()

    def outcome(self, actor: Actor, payload: Trajectory) -> Any:
        """The reward of a trajectory: those of a group differ.

        Or what the schedule has in its place.
        """
        for fault in self.faults:
            of_payload = not fault.tasks or payload.task_id in fault.tasks
            of_payload = of_payload and (not fault.samples or payload.id.sample in fault.samples)
            if (
                fault.cause.startswith("unscored ")
                and of_payload
                and fault.hits("score", actor, None)
            ):
                fault.happened += 1
                return adapter.unscored(fault.cause.removeprefix("unscored "), "as scheduled")
        self.scored.add(str(payload.id))
        return adapter.scored(float(payload.id.sample))


@dataclass
class Ended:
    """How a run ended: ``code`` is the command's exit code, ``counts`` the ledger's, without zeros."""

    code: int
    why: str
    counts: dict[str, int]
    events: list[dict[str, Any]]
    episodes: list[Episode]
    calls: list[tuple[int, list[int]]]
    quarantined: set[str]
    step: int
    unearned: set[str]
    """Trajectories that a rank would have trained on and that no reward actor scored."""
    notes: str = ""
    kinds: Counter[str] = field(default_factory=Counter)

    def named(self, kind: str) -> list[dict[str, Any]]:
        """The events of this kind."""
        return [event for event in self.events if event["event"] == kind]


def simulate(
    folder: Path,
    patch: pytest.MonkeyPatch,
    faults: Sequence[Fault],
    nodes: Sequence[str] = ("a", "b"),
    homes: dict[str, Sequence[str]] | None = None,
    **changes: Any,
) -> Ended:
    """Run the driver to its end.

    Raises AssertionError when that takes more than three simulated days.
    """
    values = {**SMALL, **changes}
    config = RunConfig.model_validate(settings(folder, folder, **adapter.configured(values, patch)))
    (folder / "run" / "logs").mkdir(parents=True, exist_ok=True)
    cluster = Cluster(config, faults, nodes, homes or {})

    async def at_once(function: Any, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args, **kwargs)

    async def put(value: Any) -> Any:
        return value

    async def main() -> Ended:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(asyncio, "to_thread", at_once)
            inner.setattr(asyncio, "open_connection", cluster.connect)
            inner.setattr(ray, "put", lambda value: Object(cluster, cluster.begin(put(value))))
            WAITS.open.clear()
            clock = asyncio.get_running_loop().time
            driver = cluster.driver = adapter.driver(
                config, folder / "run", Handle(cluster), clock, inner
            )
            error: Exception | None = None
            try:
                async with asyncio.timeout(3 * 86400):
                    await driver.main()
            except TimeoutError as late:
                raise AssertionError("the run does not end") from late
            except Exception as caught:
                error = caught
            return _ended(cluster, folder / "run", error)

    patch.setattr(ray, "kill", lambda actor: actor.die(exceptions.ActorDiedError()))
    patch.setattr(ray, "cancel", lambda one: one.work.cancel())
    adapter.place(patch, cluster.create, cluster.rows)
    return live(main())


def _ended(cluster: Cluster, folder: Path, error: Exception | None) -> Ended:
    driver = cluster.driver
    events = [
        json.loads(line)
        for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    counts = {name: n for name, n in driver.ledger.counts().items() if n}
    code = 0 if error is None else getattr(error, "exit_code", 1)
    made = Ended(
        code,
        "" if error is None else f"{type(error).__name__}: {error}",
        counts,
        events,
        cluster.episodes,
        cluster.calls,
        adapter.quarantined(driver),
        driver.step,
        cluster.trained - cluster.scored,
        " ".join(getattr(error, "__notes__", [])),
    )
    made.kinds = Counter(event["event"] for event in events)
    return made
