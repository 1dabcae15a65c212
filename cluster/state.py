"""What a checkpoint holds of the driver, so that a resumed run continues exactly (docs/algorithm.md, section 12)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import ray

from rayloop.core.types import Group, Member

if TYPE_CHECKING:
    from cluster.driver import Driver


async def capture(driver: Driver) -> dict[str, Any]:
    """Everything as plain values. Ready groups and the replay buffer carry the bytes that their references stand for."""
    production = driver.production
    state = {  # all of one moment: production goes on while the references below are resolved
        "step": driver.step,
        "version": driver.version,
        "inherited": dict(driver.inherited),
        "ledger": driver.ledger.state(),
        "cursor": production.cursor.state(),
        "next_number": production.next_number,
        "in_flight": [*production.reissue, *production.in_flight.values()],
        "ready": list(production.ready),
        "finished": [_bare(group) for group in production.finished],
        "quarantined": sorted(production.quarantined),
        "environment_failures": dict(production.environment_failures),
        "acceptance": production.acceptance.state(),
        "issued_this_step": production.issued_this_step,
        "replay": production.buffer.state(),
    }
    ready = [dataclasses.replace(g, members=await _inline(g.members)) for g in state["ready"]]
    replay = {task: await _inline(members) for task, members in state["replay"].items()}
    return {**state, "ready": ready, "replay": replay}


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
    production.ready = [_own(group) for group in state["ready"]]
    production.finished = list(state["finished"])
    production.quarantined = set(state["quarantined"])
    production.environment_failures.clear()
    production.environment_failures.update(state["environment_failures"])
    production.acceptance.restore(state["acceptance"])
    production.issued_this_step = state["issued_this_step"]
    production.buffer.restore({task: [_owned(m) for m in members] for task, members in state["replay"].items()})


def _bare(group: Group) -> Group:
    return dataclasses.replace(
        group, members=tuple(dataclasses.replace(m, payload=None, reference=None) for m in group.members)
    )


async def _inline(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Members with references replaced by what they refer to; members that left their group keep no payload."""

    async def one(member: Member) -> Member:
        if not member.kept:
            return dataclasses.replace(member, payload=None, reference=None)
        payload = await member.payload
        reference = None if member.reference is None else await member.reference
        return dataclasses.replace(member, payload=payload, reference=reference)

    return tuple(await asyncio.gather(*(one(member) for member in members)))


def _own(group: Group) -> Group:
    return dataclasses.replace(group, members=tuple(_owned(member) for member in group.members))


def _owned(member: Member) -> Member:
    """The same member with its bytes in the object store, owned by this driver."""
    if member.payload is None:
        return member
    reference = None if member.reference is None else ray.put(member.reference)
    return dataclasses.replace(member, payload=ray.put(member.payload), reference=reference)
