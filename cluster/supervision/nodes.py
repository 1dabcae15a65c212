"""The nodes of a run's actors.

A node is lost once, with all actors on it. A node on which actors fail repeatedly is avoided.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rayloop.actors.base import Actor
from rayloop.actors.handles import Handle, submit
from rayloop.cluster.session import node_rows, room
from rayloop.core import incidents
from rayloop.core.deadlines import bounded, with_deadline
from rayloop.core.events import Emit
from rayloop.core.failures import WorkerLost

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Seconds between two looks at the cluster's nodes."""
ANSWER_TIMEOUT_S = 5.0
"""Seconds in which the head lists the nodes, or a node accepts a connection."""
DOUBT_TIMEOUT_S = 45.0
"""Seconds in which the cluster finds out that a node which accepts no connection is lost.

Ray asks the node several times.
"""
FAILURES_TO_AVOID = 3
"""Failures of actors in an hour after which their node is avoided.

Its GPUs are avoided too, if another node has room.
"""
FAILURE_WINDOW_S = 3600.0
"""Seconds in which failures count."""
AVOID_FOR_S = 1200.0
"""Seconds that a node is avoided after its last failure."""

Evict = Callable[[str, str], Sequence[int] | None]
"""Takes all actors on a lost node (id, why) out of service.

A pool returns its workers' serial numbers; the policy group, whose ranks have none, returns None.
"""


class Nodes:
    """Where the actors of a run are. ``rows``: ``node_rows``."""

    def __init__(self, emit: Emit, rows: Callable[[], list[dict[str, Any]]] = node_rows) -> None:
        self._emit = emit
        self._read = rows
        self._roles_by_node: dict[str, Counter[str]] = {}
        self._residents: list[tuple[str, Evict]] = []
        self._rows: dict[str, Mapping[str, Any]] = {}
        self._dead: set[str] = set()
        self._unpaid: set[str] = set()
        self._failures: dict[str, list[float]] = {}
        self._until: dict[str, float] = {}
        self._looking = asyncio.Lock()

    def add(self, resident: Evict, role: str = "policy") -> None:
        """Add an owner of actors. The policy is added first: the others wait for it."""
        self._residents.append((role, resident))

    async def locate(self, handle: Handle[Any], role: str) -> str:
        """The node of a new actor, which is recorded (``came``). Raises WorkerLost."""
        answer = submit(handle, Actor.node)
        node = await with_deadline(DOUBT_TIMEOUT_S, answer, f"node of a new {role} actor", handle)
        self.came(node, role)
        return node

    def came(self, node: str, role: str) -> None:
        """An actor has started on this node."""
        self._roles_by_node.setdefault(node, Counter())[role] += 1

    def left(self, node: str, role: str) -> None:
        """An actor has ended, and its node has not."""
        if node in self._roles_by_node:
            self._roles_by_node[node][role] -= 1

    async def watch(self) -> None:
        """Look at the nodes until cancelled."""
        while True:
            try:
                await self._look()
            except Exception:
                # Such as a full disk below the events: the next look may succeed.
                logger.exception("the nodes could not be looked at")
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def lost(self, node: str) -> bool:
        """Whether the node of a lost actor is lost.

        The cluster learns it some seconds later than the actor's caller.
        """
        now = asyncio.get_running_loop().time
        until = now() + DOUBT_TIMEOUT_S
        while node in self._roles_by_node and now() < until:
            await self._look()
            if node in self._dead or await self._accepts(node):
                break
            await asyncio.sleep(CHECK_INTERVAL_S)
        return node in self._dead

    def charge(self, node: str) -> bool:
        """Whether the caller is the first on this lost node.

        All actors of the node together cost one unit of a budget.
        """
        first = node in self._unpaid
        self._unpaid.discard(node)
        return first

    async def _look(self) -> None:
        # One look at a time: rows of an older look must not replace newer ones.
        async with self._looking:
            timeout_error = WorkerLost("the head does not answer")
            try:
                # It blocks while the head is silent.
                rows = await bounded(ANSWER_TIMEOUT_S, asyncio.to_thread(self._read), timeout_error)
            except Exception as error:
                # Without a head the next call fails.
                logger.warning("the cluster's nodes cannot be listed: %r", error)
                return
            self._rows = {row["NodeID"]: row for row in rows}
            # A copy, since ``_lose`` removes nodes.
            for node in list(self._roles_by_node):
                if not self._rows.get(node, {}).get("Alive", False):
                    self._lose(node)

    def _lose(self, node: str) -> None:
        roles = {
            role: number for role, number in self._roles_by_node.pop(node).items() if number > 0
        }
        self._dead.add(node)
        if not roles:
            return
        self._unpaid.add(node)
        name = self.name(node)
        why = f"its node {name} was lost"
        workers: dict[str, Sequence[int]] = {}
        for role, evict in self._residents:
            serials = evict(node, why)
            if serials:
                workers[role] = serials
        self._emit(incidents.NodeLost(name, node, roles, workers))

    def name(self, node: str) -> str:
        """The host name and address of a node; "" for the node "", which is unknown."""
        if not node:
            return ""
        row = self._rows.get(node, {})
        host = row.get("NodeManagerHostname", node)
        address = row.get("NodeManagerAddress", "address unknown")
        return f"{host} ({address})"

    async def _accepts(self, node: str) -> bool:
        """Whether Ray's process of this node accepts connections. Unknown counts as yes."""
        row = self._rows.get(node)
        if row is None:
            return True
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                _, writer = await asyncio.open_connection(
                    row["NodeManagerAddress"], row["NodeManagerPort"]
                )
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    def failed(self, node: str) -> None:
        """An actor failed on this node, which lives."""
        now = asyncio.get_running_loop().time()
        times = [*self._failures.get(node, ()), now][-FAILURES_TO_AVOID:]
        self._failures[node] = times
        if len(times) == FAILURES_TO_AVOID and now - times[0] <= FAILURE_WINDOW_S:
            if not self.bad(node):
                self._emit(incidents.NodeAvoided(self.name(node), node, FAILURES_TO_AVOID))
            self._until[node] = now + AVOID_FOR_S

    def avoids(self) -> bool:
        """Whether a node was ever avoided."""
        return bool(self._until)

    def bad(self, node: str) -> bool:
        """Whether this node is avoided at present."""
        return asyncio.get_running_loop().time() < self._until.get(node, 0.0)

    def elsewhere(self, wanted: Mapping[str, float], but: Collection[str] = ()) -> str | None:
        """A node with ``wanted`` free, which is not avoided; None when no node has it."""
        for node, free in room().items():
            if node in but or node in self._dead or self.bad(node):
                continue
            if all(free.get(name, 0.0) >= amount for name, amount in wanted.items()):
                return node
        return None
