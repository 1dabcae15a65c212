"""One rank of the policy: trains on its share of the groups, and exports the weights."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import ray

from rayloop.actors.assignments import Assignment
from rayloop.actors.base import Actor
from rayloop.actors.failures import fetch
from rayloop.core.failures import WorkerLost, WorkerStartFailed
from rayloop.core.files import Checksum, appears
from rayloop.core.groups import Ref
from rayloop.core.model_files import resolve
from rayloop.core.protocols import Manifest, TrainItem
from rayloop.core.types import Trajectory, TrajectoryId, Version
from rayloop.engines.machine import grow_segments
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.engines.training_settings import ADAPTERS, COLLECTIVE_TIMEOUT_S
from rayloop.grpo.losses.settings import LossSettings
from rayloop.transports.seam import Sender
from rayloop.transports.settings import TransportSettings


@dataclass(frozen=True)
class Invitation:
    """The address where the ranks meet, and the ``secret`` that only they know."""

    host: str
    port: int
    secret: str = field(repr=False)


@dataclass(frozen=True)
class LogprobGap:
    """The difference of the sampling engine's log-probs and the trainer's.

    ``mean`` and ``max`` are of |log-prob difference| over ``tokens`` sampled tokens. ``swapped`` is
    the mean change of the trainer's own log-probs over trajectories with images when the images are
    swapped.
    """

    tokens: int
    mean: float
    max: float
    images: int = 0
    swapped: float = 0.0

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, float]]) -> LogprobGap:
        """Reduce the rows of ``PolicyRank.compare``."""
        tokens = sum(row["tokens"] for row in rows)
        image_tokens = sum(row["image_tokens"] for row in rows)
        difference = sum(row["sum"] for row in rows)
        swapped_change = sum(row["swapped"] for row in rows)
        return cls(
            int(tokens),
            mean=difference / max(1, tokens),
            max=max(row["max"] for row in rows),
            images=sum(row["images"] > 0 for row in rows),
            swapped=swapped_change / max(1, image_tokens),
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


@dataclass(frozen=True)
class RankSettings:
    """The settings of all ranks.

    ``folder``: for weight updates; ``adapter_reference``: the adapter disabled is the reference;
    ``adapters_alone``: the engines keep the model of ``model.path`` and get its adapters;
    ``sight``: ``alarms.sight``; ``records``: each step's values of tokens are kept for
    ``recorded``.
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
    sight: float = 0.0
    records: bool = False


@dataclass(frozen=True)
class _Share:
    """A rank's share of a step.

    ``values``: the fetched objects by reference; ``seconds``: the duration of the fetch.
    """

    updates: Sequence[Sequence[Assignment]] = ()
    values: Mapping[Any, Any] = field(default_factory=dict)
    seconds: float = 0.0


def _keyed_by_payload(update: Sequence[Assignment]) -> list[Assignment]:
    """The assignments of an update, with the payload as the key of the reference's log-probs."""
    return [replace(assignment, ref_logprobs=assignment.payload) for assignment in update]


class PolicyRank(Actor):
    """A rank of the policy. Its methods are collective.

    The driver calls each on all ranks, with the same arguments except for the share.
    """

    _alone = False
    """Whether a weight sync sends adapters alone."""
    _sent: Version | None = None
    """The version that was sent to a meeting last, until its copy is exported."""
    _called = 0
    """The number of the last numbered call."""
    _answer: Future[Any] | None = None
    """Its answer, until ``forget``."""

    def __init__(self, settings: RankSettings, rank: int, world_size: int) -> None:
        self.settings = settings
        self.rank = rank
        self.world_size = world_size
        self.sender: Sender[Any] | None = None
        self._meeting: Any = None
        self._share = _Share()

    def numbered(self, number: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method once for each number; numbers count up from 1.

        A number that comes again gets the same answer or error: it was lost on its way, and the
        other ranks may have finished the collective. Raises WorkerLost when a number is missing.
        """
        if number != self._called:
            if number != self._called + 1:
                # The other ranks may have run calls that this one has not, or in another order.
                raise WorkerLost(
                    f"call {number} ({method}) of policy rank {self.rank} came after call"
                    f" {self._called}"
                )
            self._called = number
            self._answer = Future()
            try:
                result = getattr(self, method)(*args, **kwargs)
                self._answer.set_result(result)
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
        host = ray.util.get_node_ip_address()
        secret = secrets.token_hex(16)
        if self.world_size == 1:
            return Invitation(host, 0, secret)
        grow_segments()
        from rayloop.engines.training.sharding import meeting_place

        self._meeting = meeting_place((host, 0), COLLECTIVE_TIMEOUT_S, first=True)
        return Invitation(host, self._meeting.port, secret)

    def join(self, meeting: Invitation | str) -> None:
        """Build the engine; returns when all ranks have met, at ``meeting`` or a shared file://.

        Raises WorkerStartFailed.
        """
        # Before the imports below load torch, whose allocator reads the variable once.
        grow_segments()
        from rayloop.engines.training.fsdp import FsdpEngine
        from rayloop.transports.seam import transport

        settings = self.settings
        init_method = meeting if isinstance(meeting, str) else self._met(meeting)
        self.engine = FsdpEngine(
            settings.model,
            settings.engine,
            settings.optimizer,
            settings.loss,
            rank=self.rank,
            world_size=self.world_size,
            init_method=init_method,
            seed=settings.seed,
        )
        self.engine.recorder.on = settings.records
        self._alone = settings.adapters_alone and self.engine.family.adapters
        if self.rank == 0:
            weights = transport(settings.transport, settings.folder)
            self.sender = weights.sender(ray.util.get_node_ip_address())

    def _met(self, invited: Invitation) -> Any:
        """The store of the ranks, once all have met. A single rank listens nowhere.

        Raises WorkerStartFailed.
        """
        from rayloop.engines.training.sharding import alone, meeting_place

        if self.world_size == 1:
            return alone()
        address = (invited.host, invited.port)
        place = self._meeting or meeting_place(address, COLLECTIVE_TIMEOUT_S, first=False)
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

    def wake_up(self) -> None:
        """Take the GPU back."""
        self.engine.move()

    def fetch(self, updates: Sequence[Sequence[Assignment]]) -> list[TrajectoryId]:
        """Fetch this rank's share of the next step.

        Returns the trajectories of which data is lost, to assign the rest again.
        """
        began = time.perf_counter()
        assigned = list(chain.from_iterable(updates))
        refs: list[Ref[Any]] = []
        for assignment in assigned:
            refs.append(assignment.payload)
            if assignment.ref_logprobs is not None:
                refs.append(assignment.ref_logprobs)
        values, lost = fetch(refs)
        self._share = _Share(updates, values, time.perf_counter() - began)
        return [
            assignment.id
            for assignment in assigned
            if assignment.payload in lost or assignment.ref_logprobs in lost
        ]

    def train(
        self,
    ) -> tuple[dict[str, float], Mapping[TrajectoryId, Any], Mapping[TrajectoryId, Any]]:
        """Run the optimizer updates of the step whose share was fetched last.

        Returns metrics reduced over all ranks, and of this rank's trajectories
        ``rayloop.grpo.batch.TurnGaps`` and ``rayloop.grpo.sight.TurnChanges``.
        """
        # The arrays are views into Ray's object store:
        # kept, they would fill it until the next fetch.
        share = self._share
        self._share = _Share()

        updates = share.updates
        ref_logprobs = share.values
        if self.settings.adapter_reference:
            ref_logprobs = self._adapter_reference(share)
            updates = list(map(_keyed_by_payload, updates))

        def item(assignment: Assignment) -> TrainItem:
            credit = assignment.credit
            return TrainItem(
                share.values[assignment.payload],
                credit.advantage,
                ref_logprobs.get(assignment.ref_logprobs),
                assignment.on_policy,
                assignment.lag,
                credit.turns,
                credit.streams,
                assignment.group_tokens,
            )

        items_by_update = [list(map(item, update)) for update in updates]
        report = self.engine.train(items_by_update, self.settings.sight)
        report["timing_s/fetch"] = share.seconds
        return report, self.engine.gaps, self.engine.sight

    def recorded(self) -> Mapping[str, Any]:
        """The values of this rank's tokens in the last ``train`` (``TokenRecorder.result``)."""
        return self.engine.recorder.result()

    def _adapter_reference(self, share: _Share) -> dict[Any, Any]:
        """The log-probs of the share's trajectories with the adapter disabled, by payload."""
        # With several epochs the same trajectory is in several updates, and is scored once.
        assigned = chain.from_iterable(share.updates)
        payloads = list(dict.fromkeys(assignment.payload for assignment in assigned))
        trajectories = [share.values[payload] for payload in payloads]
        logprobs = self.engine.logprobs(trajectories, reference=True)
        return dict(zip(payloads, logprobs, strict=True))

    def compare(
        self, payloads: Sequence[Ref[Trajectory]], *, swap_images: bool = False
    ) -> list[dict[str, float]]:
        """Compare the rollout log-probs with the trainer's.

        Returns one row of sums per trajectory that is not lost (``LogprobGap``).
        """
        values, _ = fetch(payloads)
        trajectories = [values[payload] for payload in payloads if payload in values]
        logprobs = self.engine.logprobs(trajectories)
        swapped_logprobs = logprobs
        if swap_images:
            swapped_logprobs = self.engine.logprobs(trajectories, swap_images=True)

        rows = []
        for trajectory, present, swapped in zip(
            trajectories, logprobs, swapped_logprobs, strict=True
        ):
            flat = trajectory.flatten()
            difference = abs(present - flat.rollout_logprobs[flat.loss_mask])
            images = len(trajectory.images)
            rows.append(
                {
                    "tokens": len(present),
                    "sum": float(difference.sum()),
                    "max": float(difference.max(initial=0.0)),
                    "images": images,
                    "image_tokens": len(present) if images else 0,
                    "swapped": float(abs(swapped - present).sum()) if images else 0.0,
                }
            )
        return rows

    def send(self, version: Version, meeting: Any) -> None:
        """Gather the weights, while rank 0's sender sends them to ``meeting``.

        It keeps a copy for ``export``. Raises BroadcastFailed.
        """
        self._sent = version
        weights = self.engine.stream(version, adapters=self._alone)
        if self.sender is None:
            # Gathering is collective: the other ranks take part, and drop the weights.
            deque(weights, maxlen=0)
        else:
            self.sender.send(version, weights, meeting)

    def export(self, version: Version) -> tuple[Manifest | None, Any]:
        """Gather the weights, unless they were sent.

        Rank 0 returns the manifest and the source that the transport's sender made, the others
        (None, None).
        """
        if version == self._sent:
            self._sent = None
            update = self.sender and self.sender.sent()
        else:
            tensors = self.engine.export(version, adapters=self._alone)
            update = self.sender and self.sender.serialize(version, tensors)
        if not update:
            return None, None
        return update.manifest, update.source

    def write_model(self, folder: str, version: Version) -> None:
        """Gather the weights; rank 0 writes them as a model folder.

        The folder appears when it is complete.
        """
        tensors = self.engine.export(version)
        if self.rank == 0:
            from rayloop.engines.models.saving import save_model

            model = self.settings.model
            temporary = Path(f"{folder}.tmp")
            source = resolve(model.path, model.revision).folder
            save_model(source, temporary, tensors, limits=model)
            temporary.rename(folder)

    def invite(self, engines: tuple[int, ...], failures: int, timeout: float) -> Any:
        """Let the sender of the first rank ``invite`` these engines."""
        assert self.sender is not None
        return self.sender.invite(engines, failures, timeout)

    def parameter_groups(self) -> list[str]:
        """The names that ``perturb`` takes: the parameter groups that a weight sync sends."""
        return [ADAPTERS] if self._alone else self.engine.parameter_groups()

    def perturb(self, group: str) -> None:
        """Visibly change one parameter group (weight update self-test).

        ``restore_parameters`` undoes it bit-exactly.
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
        """Save during training: returns when the state is copied to the host's memory.

        Only one save runs at a time.
        """
        self._written = self.engine.begin_save(folder)

    @ray.method(concurrency_group="background")
    def finish_save(self, within: float) -> Mapping[str, Checksum]:
        """Wait ``within`` seconds until the state of ``begin_save`` is written.

        Returns and raises what ``save`` does; raises TimeoutError.
        """
        return self._written.result(within)

    def load(self, folder: str, sums: Mapping[str, Checksum]) -> None:
        """Restore what ``save`` wrote; ``sums``: its checksums of all ranks that are known.

        Raises Damaged.
        """
        self.engine.load(folder, sums)
