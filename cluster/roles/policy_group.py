"""The policy as the driver sees it: one handle for all ranks. Every method is collective and has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray

from actors.lost import cause
from actors.policy import Assignment, LogprobGap
from cluster.roles.pool import brief, is_lost
from rayloop.core.deadlines import with_deadline
from rayloop.core.failures import PolicyLost, WorkerLost
from rayloop.core.groups import Group, Member
from rayloop.core.protocols import BroadcastGroup, Manifest
from rayloop.core.types import TrajectoryId, Version
from rayloop.grpo.balance import shares
from rayloop.grpo.minibatches import mini_batches
from rayloop.grpo.staleness import lag
from rayloop.run.config import PolicySettings


class PolicyGroup:
    """Raises PolicyLost when a rank died or a collective failed: the whole group must then be rebuilt (``rebuild``)."""

    def __init__(self, settings: PolicySettings, spawn: Callable[[int], Any]) -> None:
        self.settings = settings
        self._spawn = spawn
        self.ranks: list[Any] = []

    async def start(self) -> None:
        self.ranks = [self._spawn(rank) for rank in range(self.settings.ranks)]
        meeting = (await self._all("address", deadline=self.settings.start_timeout))[0]
        await self._all("join", meeting, deadline=self.settings.start_timeout)

    async def rebuild(self) -> None:
        """Replace all ranks. They hold the start model until ``load``."""
        self.stop()
        await self.start()

    async def _all(self, method: str, *args: Any, deadline: float | None = None, **kwargs: Any) -> list[Any]:
        return await self._each(method, [args] * len(self.ranks), deadline=deadline, **kwargs)

    async def _each(
        self, method: str, args: Sequence[tuple[Any, ...]], *, deadline: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method on all ranks, each with its own arguments."""
        refs = [getattr(rank, method).remote(*a, **kwargs) for rank, a in zip(self.ranks, args, strict=True)]
        return await self._results(method, refs, deadline or self.settings.step_timeout)

    async def _results(self, method: str, refs: Sequence[Any], deadline: float) -> list[Any]:
        """One answer per rank; the first failure counts, since the others then wait for a peer that will not come."""
        calls = [
            asyncio.ensure_future(with_deadline(deadline, ref, f"{method} of policy rank {rank}", self.ranks[rank]))
            for rank, ref in enumerate(refs)
        ]
        try:
            return await asyncio.gather(*calls)
        except Exception as error:
            if is_lost(error) or (len(self.ranks) > 1 and isinstance(cause(error), RuntimeError)):
                raise PolicyLost(f"the policy group failed in {method}: {brief(error)}") from error
            raise
        finally:
            for call in calls:
                call.cancel()

    async def fetch(
        self, groups: Sequence[Group], *, seed: int, version: Version, treat_as_on_policy: bool, nominal: int
    ) -> set[TrajectoryId]:
        """Let each rank fetch its share of a training step on the kept members of the groups, before any begins one.

        Mini-batches are cut at group boundaries and shuffled by seed and step; within one, trajectories are spread over
        the ranks by length. ``nominal`` is the number of trajectories of a full step. Returns the trajectories that are lost
        with the node that held them; unless there are none, the step must be fetched again without them.
        """

        def assignment(member: Member) -> Assignment:
            assert member.advantage is not None
            return Assignment(
                member.summary.id, member.payload, member.advantage, member.reference,
                on_policy=member.replayed and treat_as_on_policy, lag=lag(member.summary.first_version, version),
            )  # fmt: skip

        plan: list[list[list[Assignment]]] = [[] for _ in self.ranks]
        sizes = [len(group.kept) for group in groups]
        for update in mini_batches(sizes, self.settings.update, seed, version.step, nominal):
            members = [member for index in update for member in groups[index].kept]
            for rank, share in enumerate(shares([m.summary.length for m in members], len(self.ranks))):
                plan[rank].append([assignment(members[i]) for i in share])
        return {id for lost in await self._each("fetch", [(p,) for p in plan]) for id in lost}

    async def train(self) -> dict[str, float]:
        """One training step on what was fetched last. Returns the trainer's metrics."""
        return (await self._all("train"))[0]

    async def compare(self, payloads: Sequence[Any], *, swap_images: bool = False) -> LogprobGap:
        """The sampling engine's log-probs against the trainer's, over all sampled tokens of the trajectories.

        Raises WorkerLost when all of them are gone.
        """
        args = [([payloads[i] for i in share],) for share in shares([1] * len(payloads), len(self.ranks))]
        rows = [row for part in await self._each("compare", args, swap_images=swap_images) for row in part]
        if not rows:
            raise WorkerLost(f"all {len(payloads)} trajectories to compare were lost with the nodes that held them")
        tokens, image_tokens = (sum(row[name] for row in rows) for name in ("tokens", "image_tokens"))
        return LogprobGap(
            int(tokens), sum(row["sum"] for row in rows) / max(1, tokens), max(row["max"] for row in rows),
            sum(row["images"] > 0 for row in rows), sum(row["swapped"] for row in rows) / max(1, image_tokens),
        )  # fmt: skip

    async def export(self, version: Version) -> tuple[Manifest, Any]:
        """Gather the weights. Returns the manifest and a *reference* to the source, owned by the driver."""
        refs = [rank.export.options(num_returns=2).remote(version) for rank in self.ranks]
        manifests = await self._results("export", [manifest for manifest, _ in refs], self.settings.step_timeout)
        return manifests[0], refs[0][1]

    async def invite(self, receivers: tuple[int, ...], failures: int) -> BroadcastGroup:
        """A meeting of the first rank with these rollout actors, for ``send``; a new one after another failure."""
        answer = self.ranks[0].invite.remote(receivers, failures)
        return (await self._results("invite", [answer], self.settings.step_timeout))[0]

    async def send(self, manifest: Manifest, source: Any, meeting: BroadcastGroup) -> None:
        """The first rank broadcasts an export. Raises BroadcastFailed."""
        await self._results("send", [self.ranks[0].send.remote(manifest, source, meeting)], self.settings.step_timeout)

    async def parameter_groups(self) -> list[str]:
        return (await self._all("parameter_groups"))[0]

    async def perturb(self, group: str) -> None:
        await self._all("perturb", group)

    async def restore_parameters(self) -> None:
        await self._all("restore_parameters")

    async def save(self, folder: str) -> None:
        await self._all("save", folder)

    async def load(self, folder: str) -> None:
        await self._all("load", folder)

    def stop(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)
        self.ranks = []
