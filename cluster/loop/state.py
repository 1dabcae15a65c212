"""What a checkpoint holds of the driver, so that a resumed run continues exactly (docs/algorithm.md, section 12)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from actors.lost import object_lost
from rayloop.core.deadlines import with_deadline
from rayloop.core.failures import CheckpointError, WorkerLost
from rayloop.core.groups import Group, Member
from rayloop.core.types import TrajectoryId

if TYPE_CHECKING:
    from cluster.driver import Driver


async def capture(driver: Driver) -> dict[str, Any]:
    """Everything as plain values. Ready groups and the replay buffer carry the bytes that their references stand for.

    Trajectories whose bytes are gone are excluded first. Raises CheckpointError when bytes do not come within
    ``policy.step_timeout``.
    """
    values: dict[Any, Any] = {}
    while True:
        state = _snapshot(driver)
        members = [m for g in state["ready"] for m in g.kept] + [m for ms in state["replay"].values() for m in ms]
        try:
            lost = await with_deadline(
                driver.config.policy.step_timeout, _resolve(members, values), "payloads for the checkpoint"
            )
        except WorkerLost as error:
            raise CheckpointError(str(error)) from error
        if not lost:
            ready = [dataclasses.replace(g, members=_inline(g.members, values)) for g in state["ready"]]
            replay = {task: _inline(members, values) for task, members in state["replay"].items()}
            return {**state, "ready": ready, "replay": replay}
        driver.production.lose(lost)


def _snapshot(driver: Driver) -> dict[str, Any]:
    """The state of one moment, with references: production goes on while they are resolved."""
    production = driver.production
    synchronous = driver.config.algorithm.staleness.max_staleness == 0
    return {
        "step": driver.step,
        "version": driver.version,
        "inherited": dict(driver.inherited),
        "ledger": driver.ledger.state(),
        "cursor": production.cursor.state(),
        "next_number": production.next_number,
        "in_flight": [*production.reissue, *production.in_flight.values()],
        "one_round": synchronous and (production.one_round or not production.reissue),
        "ready": list(production.ready),
        "finished": [group.bare() for group in production.finished],
        "quarantined": sorted(production.quarantined),
        "environment_failures": dict(production.blame.groups_failed),
        "acceptance": production.acceptance.state(),
        "issued_this_step": production.issued_this_step,
        "graded": production.alarms.graded,
        "replay": production.buffer.state(),
    }


def reinstate(driver: Driver, state: dict[str, Any]) -> None:
    """Become the driver that ``state`` was captured from. Groups that were in flight will be issued again."""
    production, version = driver.production, state["version"]
    driver.step = state["step"]
    driver.inherited = {**state["inherited"], version.lineage: version.step}
    driver.ledger.restore(state["ledger"])
    driver.ledger.reissue_live()
    production.cursor.restore(state["cursor"])
    production.next_number = state["next_number"]
    production.in_flight.clear()
    production.reissue = sorted(state["in_flight"], key=lambda issue: issue.number)
    production.one_round = state.get("one_round", True)
    production.ready = [_own(group) for group in state["ready"]]
    production.finished = list(state["finished"])
    production.quarantined = set(state["quarantined"])
    production.blame.restore(state["environment_failures"])
    production.acceptance.restore(state["acceptance"])
    production.issued_this_step = state["issued_this_step"]
    production.alarms.graded |= state.get("graded", driver.step > 0)  # older checkpoints do not say
    production.buffer.restore({task: [_owned(m) for m in members] for task, members in state["replay"].items()})


async def complete_references(driver: Driver) -> None:
    """Annotate the ready groups that a run without a reference has left: no step with a KL term could train on them."""
    production = driver.production
    for group in [g for g in production.ready if any(m.reference is None for m in g.kept)]:
        annotated = await driver.annotate(group)
        production.ready = [annotated if g.issue == group.issue else g for g in production.ready]


async def _resolve(members: Sequence[Member], values: dict[Any, Any]) -> set[TrajectoryId]:
    """Add to ``values`` what the members' references stand for. Returns the trajectories of which something is lost."""
    refs = {ref for m in members for ref in (m.payload, m.reference) if ref is not None and ref not in values}

    async def one(ref: Any) -> None:
        try:
            values[ref] = await ref
        except Exception as error:
            if not object_lost(error):
                raise

    await asyncio.gather(*map(one, refs))
    return {m.summary.id for m in members if any(r is not None and r not in values for r in (m.payload, m.reference))}


def _inline(members: tuple[Member, ...], values: Mapping[Any, Any]) -> tuple[Member, ...]:
    """Members with references replaced by what they refer to; members that left their group keep no payload."""

    def one(member: Member) -> Member:
        if not member.kept:
            return member.bare()
        reference = None if member.reference is None else values[member.reference]
        return dataclasses.replace(member, payload=values[member.payload], reference=reference)

    return tuple(map(one, members))


def _own(group: Group) -> Group:
    return dataclasses.replace(group, members=tuple(_owned(member) for member in group.members))


def _owned(member: Member) -> Member:
    """The same member with its bytes in the object store, owned by this driver."""
    if member.payload is None:
        return member
    reference = None if member.reference is None else ray.put(member.reference)
    return dataclasses.replace(member, payload=ray.put(member.payload), reference=reference)
