"""A node is the unit of failure: reported once, everything on it replaced at once for one unit of a
budget.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError

from benchmarks.virtual_time import live
from rayloop.cluster.supervision import nodes as module
from rayloop.cluster.supervision.nodes import Nodes
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.cluster.supervision.pool import Pool
from rayloop.core.events import Event
from rayloop.core.failures import PolicyLost
from rayloop.run.lifetime import RecoverySettings
from rayloop.run.sections import PolicySettings

START = 10.0
"""Seconds that an actor takes to start."""
LOAD = 60.0
"""Seconds that a rank of the policy takes to load the model."""


class Site:
    """Nodes a, b and c.

    ``where`` is the node that an actor of a slot is started on; ``known`` what the head says of
    each; one that is ``deaf`` accepts no connection.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray, "kill", lambda handle: None)

        async def at_once(function: Any) -> Any:
            await asyncio.sleep(0)
            return function()

        async def accepts(nodes: Nodes, node: str) -> bool:
            await asyncio.sleep(0)
            return node not in self.deaf

        monkeypatch.setattr(asyncio, "to_thread", at_once)
        monkeypatch.setattr(Nodes, "_accepts", accepts)
        self.known = dict.fromkeys("abc", True)
        self.deaf = set[str]()
        self.where: dict[int, str] = {}
        self.events: list[Event] = []
        self.spawned: list[tuple[float, str]] = []
        self.nodes = Nodes(self.events.append, self._rows)

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": node,
                "Alive": alive,
                "NodeManagerHostname": f"host-{node}",
                "NodeManagerAddress": "10.0.0.1",
            }
            for node, alive in self.known.items()
        ]

    def _actor(self, slot: int) -> Any:
        node = self.where.get(slot, "a")
        self.spawned.append((asyncio.get_running_loop().time(), node))

        async def health() -> None:
            await asyncio.sleep(START)
            if not self.known[node]:
                raise ActorDiedError

        async def place() -> str:
            await asyncio.sleep(0)
            return node

        return SimpleNamespace(
            health=SimpleNamespace(remote=health), node=SimpleNamespace(remote=place)
        )

    def pool(self, role: str, size: int) -> Pool[Any]:
        recovery = RecoverySettings(replacements=2)
        return Pool(role, size, self._actor, recovery, self.events.append, nodes=self.nodes)

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [event.record() for event in self.events if event.kind == kind]

    def crash(self, node: str) -> None:
        self.known[node] = False
        self.deaf.add(node)
        self.where = dict.fromkeys(range(9), "b")


def loading(site: Site, error: type[Exception] | None = None) -> Any:
    """A rank of the policy that takes LOAD seconds to load the model, and fails with its node, or
    with ``error``.
    """
    actor = site._actor(0)
    node = site.spawned[-1][1]

    async def address() -> tuple[str, int]:
        await asyncio.sleep(0)
        return "10.0.0.1", 1

    async def join(meeting: Any) -> None:
        await asyncio.sleep(LOAD)
        if error is not None or not site.known[node]:
            raise error or ActorDiedError

    actor.address, actor.join = SimpleNamespace(remote=address), SimpleNamespace(remote=join)
    return actor


def left(pool: Pool[Any]) -> float:
    now = asyncio.get_running_loop().time()
    return sum(budget.left(now) for budget in pool.budget._budgets)


def test_a_lost_node_is_reported_once_and_costs_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        site = Site(monkeypatch)
        engines, rewards = site.pool("rollout", 3), site.pool("reward", 1)
        site.where[2] = "c"
        await asyncio.gather(engines.start(), rewards.start())
        watching = asyncio.create_task(site.nodes.watch())
        await asyncio.sleep(5)
        site.crash("a")
        await asyncio.sleep(1.5)
        assert {worker.node for worker in engines.workers.values()} == {"c"}, (
            "all on it are out of service at once"
        )
        await asyncio.sleep(START + 3)
        assert len(engines.workers) == 3
        assert {w.node for w in [*engines.workers.values(), *rewards.workers.values()]} == {
            "b",
            "c",
        }
        [lost] = site.named("node_lost")
        assert lost["roles"] == {"rollout": 2, "reward": 1}
        assert lost["workers"] == {"rollout": [1, 2], "reward": [1]}
        assert lost["name"] == "host-a (10.0.0.1)"
        assert site.named("worker_lost") == [], "the node is reported, not each of its actors"
        assert (
            sorted(event["node"] for event in site.named("worker_replaced"))
            == ["host-b (10.0.0.1)"] * 3
        )
        assert left(engines) + left(rewards) == pytest.approx(4 * 2 - 1, abs=0.1)
        watching.cancel()

    live(test())


def test_nothing_is_sent_to_a_node_that_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who calls an actor learns of its end seconds before the cluster learns of the node's."""

    async def test() -> None:
        site = Site(monkeypatch)
        engines = site.pool("rollout", 2)
        await engines.start()
        site.deaf.add("a")
        now = asyncio.get_running_loop().time()
        engines.lost(1, "unavailable")
        await asyncio.sleep(8)
        assert len(site.spawned) == 2
        site.crash("a")
        await asyncio.sleep(START + 3)
        assert [node for _, node in site.spawned[2:]] == ["b", "b"]
        assert site.spawned[2][0] - now < 8 + module.CHECK_INTERVAL_S + 0.1
        assert len(site.named("node_lost")) == 1
        assert site.named("replacement_failed") == []

    live(test())


def test_a_node_that_goes_on_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        site = Site(monkeypatch)
        engines = site.pool("rollout", 1)
        await engines.start()
        now = asyncio.get_running_loop().time()
        engines.lost(1, "its process died")
        await asyncio.sleep(START + 1)
        assert site.spawned[1][0] == now
        assert left(engines) == pytest.approx(1, abs=0.1)
        site.crash("a")
        await site.nodes._look()
        assert site.named("node_lost")[0]["roles"] == {"rollout": 1}, "the one before has left"

    live(test())


def test_a_start_that_fails_is_held_against_the_node_it_was_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        site, failures = Site(monkeypatch), list[Exception]()

        async def admit(handle: Any) -> None:
            await asyncio.sleep(0)
            if failures:
                raise failures.pop()

        engines = site.pool("rollout", 2)
        engines._admit = admit
        await engines.start()
        failures += [ActorDiedError() for _ in range(3)]
        site.where[0] = "b"
        engines.lost(
            next(serial for serial, worker in engines.workers.items() if worker.slot == 0), "killed"
        )
        await asyncio.sleep(3600 / 2 + 2 * START + 5)
        assert failures == []
        assert (site.nodes.bad("a"), site.nodes.bad("b")) == (False, True)
        await asyncio.sleep(3600)
        site.crash("b")
        await site.nodes._look()
        assert site.named("node_lost")[0]["roles"] == {"rollout": 1}, (
            "those that did not start are not counted"
        )

    live(test())


def test_the_policy_is_lost_with_its_node_though_nobody_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        site = Site(monkeypatch)
        group = PolicyGroup(PolicySettings(), lambda rank: None, nodes=site.nodes)  # type: ignore[arg-type,return-value]
        engines = site.pool("rollout", 1)
        await engines.start()
        group._places = [await site.nodes.locate(site._actor(0), "policy")]
        watching = asyncio.create_task(site.nodes.watch())
        asyncio.get_running_loop().call_later(30, site.crash, "a")
        with pytest.raises(
            PolicyLost, match=r"a rank of the policy: its node host-a \(10\.0\.0\.1\) was lost"
        ):
            await group.while_alive(asyncio.sleep(3600))
        await asyncio.sleep(START + 3)
        assert left(engines) == 2, "the rebuilt policy is the unit that the node costs"
        assert site.named("node_lost")[0]["roles"] == {"rollout": 1, "policy": 1}
        watching.cancel()

    live(test())


def test_a_node_that_is_lost_while_the_policy_loads_is_lost_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        site = Site(monkeypatch)
        group = PolicyGroup(PolicySettings(), lambda rank: loading(site), nodes=site.nodes)
        watching = asyncio.create_task(site.nodes.watch())
        asyncio.get_running_loop().call_later(LOAD / 2, site.crash, "a")
        await group.start()
        assert group.ranks == []
        assert site.named("node_lost")[0]["roles"] == {"policy": 1}
        assert group.blamed == ("host-a (10.0.0.1)",)
        await group.rebuild()
        assert group.places == ("host-b (10.0.0.1)",)
        watching.cancel()

    live(test())


def test_a_node_on_which_the_policy_fails_to_load_three_times_is_avoided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        site = Site(monkeypatch)
        group = PolicyGroup(
            PolicySettings(), lambda rank: loading(site, ActorDiedError), nodes=site.nodes
        )
        await site.nodes._look()
        await group.start()
        for _ in range(3):
            assert not site.nodes.bad("a")
            with pytest.raises(PolicyLost):
                await group.rebuild()
        assert site.nodes.bad("a")

    live(test())


def test_a_save_that_ends_after_its_ranks_were_taken_away_is_a_lost_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no fault of their node: it is the rebuild that killed them."""

    async def test() -> None:
        site = Site(monkeypatch)
        answer = asyncio.get_running_loop().create_future()
        save = SimpleNamespace(remote=lambda number, method, folder: answer)
        rank: Any = SimpleNamespace(numbered=SimpleNamespace(options=lambda **_: save))
        group = PolicyGroup(PolicySettings(), lambda _: rank, nodes=site.nodes)
        group.ranks, group._places = [rank], ["a"]
        saving = asyncio.create_task(group.save("step_000001"))
        await asyncio.sleep(1)
        group.stop()
        answer.set_exception(ActorDiedError())
        with pytest.raises(PolicyLost, match="the policy group failed in save"):
            await saving
        assert group.blamed == ()
        with pytest.raises(PolicyLost):
            await group.invite((), 0, 9.0)

    live(test())


def test_a_rank_that_cannot_be_asked_where_it_is_is_a_lost_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        site = Site(monkeypatch)
        actor = loading(site)

        async def unavailable() -> str:
            raise ActorUnavailableError("connection reset", b"1" * 16)

        actor.node = SimpleNamespace(remote=unavailable)
        group = PolicyGroup(PolicySettings(), lambda rank: actor, nodes=site.nodes)
        await group.start()
        assert group.ranks == []

    live(test())


def test_a_node_on_which_actors_fail_three_times_is_avoided_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = {"a": {"GPU": 4.0}, "b": {"GPU": 0.0, "CPU": 9.0}, "c": {"GPU": 1.0}}
    monkeypatch.setattr(module, "room", lambda: room)

    async def test() -> None:
        site = Site(monkeypatch)
        await site.nodes._look()
        for _ in range(2):
            site.nodes.failed("a")
        assert not site.nodes.bad("a")
        site.nodes.failed("a")
        assert site.nodes.bad("a")
        assert site.named("node_avoided")[0]["name"] == "host-a (10.0.0.1)"
        assert site.nodes.elsewhere({"GPU": 1.0}) == "c"
        assert site.nodes.elsewhere({"GPU": 2.0}) is None
        await asyncio.sleep(3600 / 3 - 1)
        assert site.nodes.bad("a")
        await asyncio.sleep(2)
        assert not site.nodes.bad("a")

    live(test())


@pytest.mark.parametrize(
    ("minutes", "avoided"), [((0, 15, 30), True), ((0, 9.5, 19), True), ((0, 31, 62), False)]
)
def test_failures_count_for_an_hour_and_then_for_twenty_minutes(
    monkeypatch: pytest.MonkeyPatch, minutes: tuple[float, ...], avoided: bool
) -> None:
    async def test() -> None:
        site = Site(monkeypatch)
        for minute in minutes:
            await asyncio.sleep(60 * minute - asyncio.get_running_loop().time())
            site.nodes.failed("a")
        assert site.nodes.bad("a") == avoided
        await asyncio.sleep(19 * 60)
        assert site.nodes.bad("a") == avoided
        assert len(site.named("node_avoided")) == avoided

    live(test())


@pytest.mark.parametrize(
    ("error", "blamed"), [(ActorDiedError(), True), (ActorUnschedulableError("no room"), False)]
)
def test_a_replacement_that_was_never_placed_is_no_failure_of_a_node(
    monkeypatch: pytest.MonkeyPatch, error: Exception, blamed: bool
) -> None:
    async def test() -> None:
        site = Site(monkeypatch)
        starts = iter(range(9))

        def spawned(slot: int) -> Any:
            actor = site._actor(slot)

            async def fails() -> None:
                await asyncio.sleep(0)
                raise error

            if next(starts) in (1, 2):
                actor.health = SimpleNamespace(remote=fails)
            return actor

        pool: Pool[Any] = Pool(
            "reward",
            1,
            spawned,
            RecoverySettings(replacements=9),
            site.events.append,
            nodes=site.nodes,
        )
        await pool.start()
        pool.lost(1, "killed")  # a failure of the node too
        await asyncio.sleep(3600)
        assert (len(site.named("replacement_failed")), len(site.named("worker_replaced"))) == (2, 1)
        assert len(site.named("node_avoided")) == blamed

    live(test())
