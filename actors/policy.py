"""One rank of the policy: trains on its share of the groups, and exports the weights."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from rayloop.actors.base import Actor
from rayloop.actors.failures import fetch
from rayloop.core.failures import WorkerLost, WorkerStartFailed
from rayloop.core.files import Checksum, appears
from rayloop.core.groups import Credit, Group, Member
from rayloop.core.model_files import resolve
from rayloop.core.protocols import Manifest, TrainItem
from rayloop.core.types import Ref, Trajectory, TrajectoryId, Version
from rayloop.engines.machine import grow_segments
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.engines.training_settings import ADAPTERS, COLLECTIVE_TIMEOUT
from rayloop.grpo.balance import MemberLength, mini_batches, shares
from rayloop.grpo.losses.settings import LossSettings
from rayloop.grpo.settings import UpdateSettings
from rayloop.grpo.staleness import lag
from rayloop.transports.seam import Sender
from rayloop.transports.settings import TransportSettings


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where the ranks meet, and the ``secret`` that only they know."""

    host: str
    port: int
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One trajectory to train on, by reference: ``payload`` and ``reference`` are object
    references.
    """

    id: TrajectoryId
    payload: Ref[Trajectory]
    credit: Credit
    reference: Ref[Any] | None = None
    on_policy: bool = False
    lag: int = 0
    group_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Sampling engine against trainer, over ``tokens`` sampled tokens: mean and max |log-prob
    difference|. ``swapped`` is the mean change of the trainer's own log-probs over trajectories
    with images when these are swapped.
    """

    tokens: int
    mean: float
    max: float
    images: int = 0
    swapped: float = 0.0

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, float]]) -> LogprobGap:
        """From the rows of ``PolicyRank.compare``."""
        tokens, image_tokens = (
            sum(row[name] for row in rows) for name in ("tokens", "image_tokens")
        )
        return cls(
            int(tokens),
            sum(row["sum"] for row in rows) / max(1, tokens),
            max(row["max"] for row in rows),
            sum(row["images"] > 0 for row in rows),
            sum(row["swapped"] for row in rows) / max(1, image_tokens),
        )

    def report(self) -> dict[str, float]:
        """The fields of the event ``log-prob check``."""
        return {
            "tokens": self.tokens,
            "mean": self.mean,
            "max": self.max,
            "images": self.images,
            "swapped": self.swapped,
        }


def assignments(
    groups: Sequence[Group],
    ranks: int,
    update: UpdateSettings,
    seed: int,
    version: Version,
    nominal: int,
    *,
    treat_as_on_policy: bool,
    together: int = 1,
) -> list[list[list[Assignment]]]:
    """The kept members of the groups that each rank trains on, for each update of a step.

    Mini-batches are cut at group boundaries and shuffled by seed and step; whole groups are spread
    over the ranks (``shares``). ``nominal``: trajectories of a full step. ``together``: ranks in a
    row that have one share, and split its rows.
    """

    def assignment(member: Member, group_tokens: int) -> Assignment:
        assert member.credit is not None
        assert member.payload is not None
        return Assignment(
            member.summary.id,
            member.payload,
            member.credit,
            member.reference,
            on_policy=member.replayed and treat_as_on_policy,
            lag=lag(member.summary.first_version, version),
            group_tokens=group_tokens,
        )

    plan: list[list[list[Assignment]]] = [[] for _ in range(ranks)]
    sizes = [len(group.kept) for group in groups]
    for batch in mini_batches(sizes, update, seed, version.step, nominal):
        kept = [groups[index].kept for index in batch]
        lengths = [[MemberLength.of(member.summary) for member in members] for members in kept]
        tokens = [sum(member.summary.sampled_tokens for member in members) for members in kept]
        for number, share in enumerate(shares(lengths, ranks // together)):
            for rank in range(number * together, (number + 1) * together):
                plan[rank].append(
                    [assignment(kept[group][member], tokens[group]) for group, member in share]
                )
    return plan


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The settings of all ranks.

    ``folder``: for weight updates; ``adapter_reference``: the adapter disabled is the reference;
    ``adapters_alone``: the engines keep the model of ``model.path`` and get its adapters.
    """

    model: ModelSettings
    engine: FsdpSettings
    optimizer: OptimizerSettings
    loss: LossSettings
    transport: TransportSettings
    folder: str
    seed: int
    adapter_reference: bool = False
    adapters_alone: bool = False


class PolicyRank(Actor):
    """Methods are collective: the driver calls each on all ranks, with the same arguments except
    for the share.
    """

    _alone = False
    """Whether a weight sync sends adapters alone."""
    _sent: Version | None = None
    """What was sent to a meeting last, until its copy is exported."""
    _called = 0
    """The number of the last numbered call."""
    _answer: Future[Any] | None = None
    """Its answer, until ``forget``."""

    def __init__(self, settings: RankSettings, rank: int, world_size: int) -> None:
        self.settings, self.rank, self.world_size = settings, rank, world_size
        self.sender: Sender[Any] | None = None
        self._meeting: Any = None
        self._fetched: tuple[Sequence[Sequence[Assignment]], Mapping[Any, Any], float] = (
            (),
            {},
            0.0,
        )

    def numbered(self, number: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method once for each number; numbers count up from 1.

        A number that comes again gets the same answer or error: it was lost on its way, and the
        other ranks may have finished the collective. Raises WorkerLost when a number is missing.
        """
        if number != self._called:
            if number != self._called + 1:
                # The other ranks may have run what this one has not, or run it in another order.
                raise WorkerLost(
                    f"call {number} ({method}) of policy rank {self.rank} came after call"
                    f" {self._called}"
                )
            self._called, self._answer = number, Future()
            try:
                self._answer.set_result(getattr(self, method)(*args, **kwargs))
            except BaseException as error:
                self._answer.set_exception(error)
        # Ray runs the calls of a rank one by one, so that the first one has ended when it comes
        # again.
        if self._answer is None:
            raise WorkerLost(
                f"the answer to call {number} ({method}) of policy rank {self.rank} is not kept any"
                " more"
            )
        return self._answer.result()

    def forget(self, number: int) -> None:
        """Free the answer to a numbered call, which has arrived."""
        if number == self._called:
            self._answer = None

    def address(self) -> Invitation | None:
        """Open the meeting of the ranks on a free port.

        None on all but the first rank. Raises WorkerStartFailed.
        """
        if self.rank:
            return None
        host, secret = ray.util.get_node_ip_address(), secrets.token_hex(16)
        if self.world_size == 1:
            return Invitation(host, 0, secret)
        grow_segments()
        from rayloop.engines.training.sharding import meeting_place

        self._meeting = meeting_place((host, 0), COLLECTIVE_TIMEOUT, first=True)
        return Invitation(host, self._meeting.port, secret)

    def join(self, meeting: Invitation | str) -> None:
        """Build the engine; returns when all ranks have met, at ``meeting`` or a shared file://.

        Raises WorkerStartFailed.
        """
        # Before the imports below load torch, whose allocator reads the variable once.
        grow_segments()
        from rayloop.engines.training.fsdp import FsdpEngine
        from rayloop.transports.seam import transport

        s = self.settings
        where = meeting if isinstance(meeting, str) else self._met(meeting)
        self.engine = FsdpEngine(
            s.model,
            s.engine,
            s.optimizer,
            s.loss,
            rank=self.rank,
            world_size=self.world_size,
            init_method=where,
            seed=s.seed,
        )
        self._alone = s.adapters_alone and self.engine.family.adapters
        if self.rank == 0:
            self.sender = transport(s.transport, s.folder).sender(ray.util.get_node_ip_address())

    def _met(self, invited: Invitation) -> Any:
        """The store of the ranks, once all are there: one rank alone listens nowhere.

        Raises WorkerStartFailed.
        """
        from rayloop.engines.training.sharding import alone, meeting_place

        if self.world_size == 1:
            return alone()
        place = self._meeting or meeting_place(
            (invited.host, invited.port), COLLECTIVE_TIMEOUT, first=False
        )
        try:
            _, store = place.join(invited.secret, self.world_size, self.rank)
        except RuntimeError as error:
            raise WorkerStartFailed(
                f"the policy's ranks did not meet at {invited.host}:{invited.port}: {error}"
            ) from error
        return store

    def sleep(self) -> None:
        """Leave the GPU to the engines."""
        self.engine.move("cpu")

    def wake(self) -> None:
        """Take the GPU back."""
        self.engine.move()

    def fetch(self, updates: Sequence[Sequence[Assignment]]) -> list[TrajectoryId]:
        """Fetch this rank's share of the next step.

        Returns the trajectories of which data is lost, to assign the rest again.
        """
        began = time.perf_counter()
        assigned = [a for update in updates for a in update]
        found, gone = fetch(
            [ref for a in assigned for ref in (a.payload, a.reference) if ref is not None]
        )
        self._fetched = updates, found, time.perf_counter() - began
        return [a.id for a in assigned if a.payload in gone or a.reference in gone]

    def train(self) -> tuple[dict[str, float], Mapping[TrajectoryId, Any]]:
        """Run the optimizer updates of the step whose share was fetched last.

        Returns metrics reduced over all ranks, and ``rayloop.grpo.batch.TurnGaps`` of this rank's
        trajectories.
        """
        # The arrays are views into Ray's object store:
        # kept, they would fill it until the next fetch.
        (updates, found, seconds), self._fetched = self._fetched, ((), {}, 0.0)

        references = found
        if self.settings.adapter_reference:
            # With several epochs the same trajectory is in several updates, and is scored once.
            distinct = list(dict.fromkeys(a.payload for update in updates for a in update))
            scored = self.engine.logprobs([found[ref] for ref in distinct], reference=True)
            references = dict(zip(distinct, scored, strict=True))
            updates = [[replace(a, reference=a.payload) for a in update] for update in updates]

        def item(a: Assignment) -> TrainItem:
            credit, reference = a.credit, references.get(a.reference)
            return TrainItem(
                found[a.payload],
                credit.advantage,
                reference,
                a.on_policy,
                a.lag,
                credit.turns,
                credit.streams,
                a.group_tokens,
            )

        report = self.engine.train([[item(a) for a in update] for update in updates])
        return {**report, "timing_s/fetch": seconds}, self.engine.gaps

    def compare(
        self, payloads: Sequence[Ref[Trajectory]], *, swap_images: bool = False
    ) -> list[dict[str, float]]:
        """Behaviour log-probs against the trainer's: one row of sums per trajectory that is not
        lost (``LogprobGap``).
        """
        fetched, _ = fetch(payloads)
        trajectories = [fetched[ref] for ref in payloads if ref in fetched]
        found = self.engine.logprobs(trajectories)
        swapped = self.engine.logprobs(trajectories, swap_images=True) if swap_images else found

        rows = []
        for trajectory, ours, other in zip(trajectories, found, swapped, strict=True):
            flat = trajectory.flatten()
            difference = abs(ours - flat.behaviour_logprobs[flat.loss_mask])
            images = len(trajectory.images)
            rows.append(
                {
                    "tokens": len(ours),
                    "sum": float(difference.sum()),
                    "max": float(difference.max(initial=0.0)),
                    "images": images,
                    "image_tokens": len(ours) if images else 0,
                    "swapped": float(abs(other - ours).sum()) if images else 0.0,
                }
            )
        return rows

    def send(self, version: Version, meeting: Any) -> None:
        """Gather the weights; rank 0's sender sends them to ``meeting`` meanwhile, and keeps a copy
        for ``export``. Raises BroadcastFailed.
        """
        self._sent, weights = version, self.engine.stream(version, adapters=self._alone)
        if self.sender is None:
            # Gathering is collective: the other ranks take part, and drop what they get.
            deque(weights, maxlen=0)
        else:
            self.sender.send(version, weights, meeting)

    def export(self, version: Version) -> tuple[Manifest | None, Any]:
        """Gather the weights, unless they were sent; rank 0 returns the manifest and what the
        transport's sender made, the others (None, None).
        """
        if version == self._sent:
            self._sent, update = None, self.sender and self.sender.sent()
        else:
            tensors = self.engine.export(version, adapters=self._alone)
            update = self.sender and self.sender.pack(version, tensors)
        return (update.manifest, update.source) if update else (None, None)

    def write_model(self, folder: str, version: Version) -> None:
        """Gather the weights; rank 0 writes them as a model folder, which appears when it is whole."""
        tensors = self.engine.export(version)
        if self.rank == 0:
            from rayloop.engines.models.saving import save_model

            model, aside = self.settings.model, Path(f"{folder}.tmp")
            save_model(resolve(model.path, model.revision).folder, aside, tensors, limits=model)
            aside.rename(folder)

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the transport's sender, for its half in the driver
        (``rayloop.transports.seam.WeightExporter``).
        """
        return getattr(self.sender, method)(*args, **kwargs)

    def parameter_groups(self) -> list[str]:
        """The names that ``perturb`` takes, of what a weight sync sends."""
        return [ADAPTERS] if self._alone else self.engine.parameter_groups()

    def perturb(self, group: str) -> None:
        """Visibly change one parameter group (weight update self-test); ``restore_parameters``
        undoes it bit-exactly.
        """
        self.engine.perturb(group)

    def restore_parameters(self) -> None:
        """Undo ``perturb``."""
        self.engine.restore_parameters()

    def shares(self, probe: str, within: float) -> str | None:
        """Write a file into the driver's folder ``probe``.

        Returns the host name when it does not appear ``within`` seconds.
        """
        if not appears(Path(probe), within):
            return self.host()
        (Path(probe) / f"rank-{self.rank}").touch()
        return None

    def profile(self, path: str | None) -> None:
        """Begin a profile of torch, or end it and write it to ``path``."""
        from rayloop.engines.profiling import profile

        profile(path)

    def save(self, folder: str) -> Mapping[str, Checksum]:
        """Write this rank's trainer state into a shared folder.

        Returns name -> checksum of its files.
        """
        return self.engine.save(folder)

    def begin_save(self, folder: str) -> None:
        """Save beside training: returns when the state is copied to the host's memory.

        One at a time.
        """
        self._written = self.engine.begin_save(folder)

    @ray.method(concurrency_group="background")
    def finish_save(self, within: float) -> Mapping[str, Checksum]:
        """Wait ``within`` seconds until it is written.

        Returns and raises what ``save`` does; raises TimeoutError.
        """
        return self._written.result(within)

    def load(self, folder: str, sums: Mapping[str, Checksum]) -> None:
        """Restore what ``save`` wrote; ``sums``: its checksums of all ranks, as far as known.

        Raises Damaged.
        """
        self.engine.load(folder, sums)
